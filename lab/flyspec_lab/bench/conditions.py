"""What is compared: plain decoding, and rules with parameters, as named on the command line.

A rule is `name`, or `name:parameter=value,parameter=value`. Rules are separated by commas, too:
`fly,margin:margin_threshold=0.2,fly_window_size=4,typical` is three of them. K is a number, or
`auto` for the server's choice.

Phases of the output are `rule until TEXT then rule`: `relaxed until #### then exact`. TEXT has no
comma; `token:ID` is a token. Budgets of a phase are given like its rule's parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flyspec.errors import ConfigError
from flyspec.rules import PARAMETERS, Divergence, Rule
from flyspec.rules.presets import DEFAULT_RULE, RULE_PRESETS
from flyspec.rules.resolve import validate_rule
from flyspec.speculation_length import AUTO, SpeculationLength
from flyspec.values.phases import Phase

T = TypeVar("T")

PLAIN = "plain"
ALL = "all"
_K = "num_speculative_tokens"
_BUDGETS = "max_loose_tokens", "max_loose_cost_nats"
_BETWEEN_RULES = re.compile(r",(?!\s*\w+=)")
_BETWEEN_PHASES = re.compile(r"\s+until\s+(.+?)\s+then\s+", re.DOTALL)
_TOKEN = re.compile(r"token:([0-9]+)")


@dataclass(frozen=True)
class Condition:
    """A way to generate. Without `num_speculative_tokens` it uses the run's K.

    `rule` is the first one of several `phases`; there are none if it holds for the whole output.
    """

    name: str
    rule: Rule
    num_speculative_tokens: SpeculationLength | None = None
    phases: tuple[Phase, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Its rule, or those of its phases."""
        return tuple(phase.rule for phase in self.phases if phase.rule) or (self.rule,)

    def requested_k(self, of_run: T) -> SpeculationLength | T:
        """Return its own K, or else the run's."""
        k = self.num_speculative_tokens
        return of_run if k is None else k


_PLAIN = Condition(PLAIN, Rule("exact"), 0)
EXACT, FLY, FUZZY = (Condition(name, Rule(name)) for name in ("exact", "fly", "fuzzy"))

DEFAULT = Condition(DEFAULT_RULE, Rule(DEFAULT_RULE))
_NO_WINDOW = Condition("fly, W = 0", Rule("fly", fly_window_size=0))

CONDITIONS: tuple[Condition, ...] = tuple(dict.fromkeys((_PLAIN, EXACT, DEFAULT, FLY, _NO_WINDOW)))
"""What `flyspec eval` compares unless rules are named."""

_BY_DIVERGENCE = ("fuzzy", "fuzzy-reference")
_VARIANTS = {
    "fly": (_NO_WINDOW,),
    "margin": (Condition("margin, K = 4", Rule("margin"), 4),),
    "fuzzy": (Condition("fuzzy, JS, full", Rule("fuzzy", divergence_top_k=0)),),
}


def _of_preset(name: str) -> tuple[Condition, ...]:
    """Return the preset, once per divergence if it is known with several, and its variants."""
    kinds: tuple[Condition, ...] = (Condition(name, Rule(name)),)
    own = RULE_PRESETS[name].defaults.get("divergence")
    if own is not None and name in _BY_DIVERGENCE:
        kinds = tuple(
            Condition(f"{name}, {d.name}", Rule(name, divergence=None if d is own else d))
            for d in Divergence
        )
    return (*kinds, *_VARIANTS.get(name, ()))


ALL_CONDITIONS = (
    _PLAIN,
    *(c for name, p in RULE_PRESETS.items() if not p.hidden_layers for c in _of_preset(name)),
)
"""Every preset that any target can use, which need no trained judge, and the variants that the
literature distinguishes."""


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Parse a comma-separated list. `all` means `ALL_CONDITIONS`, `plain` means K = 0.

    `num_speculative_tokens` may be given like a rule's parameter. The server checks ranges, since
    only it knows an operator's limits and named rules. Raises `ConfigError`.
    """
    found: list[Condition] = []
    for spec in filter(None, map(str.strip, _BETWEEN_RULES.split(text))):
        name, _, parameters = spec.partition(":")
        if name == ALL and not parameters:
            found += ALL_CONDITIONS
        elif name == PLAIN and not parameters:
            found.append(_PLAIN)
        else:
            found.append(_parse(spec))
    if not found:
        raise ConfigError("--rules names no rule; give `all` or a comma list such as exact,fly")
    names = [condition.name for condition in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--rules names {twice!r} twice")
    return tuple(found)


def parse_condition(text: str) -> Condition:
    """Parse a single rule that leaves K to the run, maybe of several phases.

    Raises `ValueError` or `ConfigError`.
    """
    condition, *others = parse_conditions(text)
    if others:
        raise ValueError(f"{text!r} names {1 + len(others)} rules; give one")
    if condition.num_speculative_tokens is not None:
        raise ValueError(f"{text!r} sets K; use --num-speculative-tokens instead")
    return condition


def parse_ks(text: str) -> tuple[SpeculationLength, ...]:
    """Parse comma-separated values of K, each a number or `auto`. Raises `ValueError`."""
    found: list[SpeculationLength] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(_k(piece))
        except ValueError as error:
            raise ValueError(f"{text!r}: must be {error}, or several separated by commas") from None
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{text!r}: names no K, or the same one twice")
    return tuple(found)


def by_k(conditions: Sequence[Condition], ks: Sequence[SpeculationLength]) -> tuple[Condition, ...]:
    """Return the conditions at each of several Ks; with a single K they keep their names."""
    found = []
    for condition in conditions:
        if condition.num_speculative_tokens is not None:
            found.append(condition)
        elif len(ks) == 1:
            found.append(replace(condition, num_speculative_tokens=ks[0]))
        else:
            found += [replace(condition, name=f"{condition.name}, K {k}", num_speculative_tokens=k)
                      for k in ks if k != 0]  # fmt: skip
    return tuple(found)


def parse_rules(text: str) -> tuple[tuple[str, Rule], ...]:
    """Parse and validate rules for judging in this process, with their names.

    `all` leaves out those that differ only in K. Raises `ConfigError` if a K or phases are given.
    """
    if text.strip() == ALL:
        conditions = tuple(c for c in ALL_CONDITIONS if c.num_speculative_tokens is None)
    else:
        conditions = parse_conditions(text)
    for condition in conditions:
        if condition.num_speculative_tokens is not None:
            raise ConfigError(f"--rules: {condition.name!r} sets K, which has no part in judging")
        if condition.phases:
            raise ConfigError(f"--rules: {condition.name!r} has phases; judging knows no output")
        validate_rule(condition.rule)
    return tuple((c.name, c.rule) for c in conditions)


def with_plain(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """Return them with plain decoding first, as the baseline of recovery."""
    return (_PLAIN, *(c for c in conditions if c.name != PLAIN))


def parse_until(text: str) -> Phase:
    """Return a phase without a rule that ends with this text, or with the token of `token:ID`."""
    token = _TOKEN.fullmatch(text)
    return Phase(until_token_ids=(int(token[1]),)) if token else Phase(until=(text,))


def parse_phase(text: str) -> Phase:
    """Return the phase of a rule, which may set budgets but no K.

    Raises `ConfigError` or `ValueError`.
    """
    if _BETWEEN_PHASES.search(text):
        raise ValueError(f"{text!r}: give one rule")
    condition = parse_condition(text)
    return condition.phases[0] if condition.phases else Phase(condition.rule)


def _parse(spec: str) -> Condition:
    """Parse a rule, or several with the texts between them."""
    first, *others = _BETWEEN_PHASES.split(spec)
    rule, k, budget = _parse_rule(spec, first)
    phases = [replace(Phase(rule), **budget)]
    for until, text in zip(others[::2], others[1::2], strict=True):
        end = parse_until(until)
        phases[-1] = replace(phases[-1], until=end.until, until_token_ids=end.until_token_ids)
        following, other_k, budget = _parse_rule(spec, text)
        if other_k is not None:
            raise ConfigError(f"--rules: {spec!r}: set {_K} in the first phase, for all of them")
        phases.append(replace(Phase(following), **budget))
    if len(phases) == 1 and not phases[0].has_budget:
        phases = []
    return Condition(spec, rule, k, tuple(phases))


def _parse_rule(spec: str, text: str) -> tuple[Rule, SpeculationLength | None, dict[str, Any]]:
    """Return a rule with its parameters, its K if given, and the budgets of its phase."""
    name, _, parameters = text.partition(":")
    if not name or "=" in name or " " in name:
        raise ConfigError(
            f"--rules: {spec!r} has no rule name before a colon; write name:parameter=value, for "
            "example margin:margin_threshold=0.2, or phases such as relaxed until #### then exact"
        )
    rule = Rule(name)
    k: SpeculationLength | None = None
    budget: dict[str, Any] = {}
    for parameter in filter(None, map(str.strip, parameters.split(","))):
        field, separator, value = parameter.partition("=")
        known = (_K, *PARAMETERS, *_BUDGETS)
        if field not in known or not separator:
            raise ConfigError(
                f"--rules: {spec!r}: {parameter!r} must be PARAMETER=VALUE; parameters are "
                f"{', '.join(known)}"
            )
        try:
            if field == _K:
                k = _k(value)
            elif field in _BUDGETS:
                budget[field] = _number(value, whole=field == "max_loose_tokens")
            else:
                rule = replace(rule, **{field: PARAMETERS[field].read(value)})
        except ValueError as error:
            raise ConfigError(
                f"--rules: {spec!r}: {field} must be {error}, got {value!r}"
            ) from None
    return rule, k, budget


def _number(value: str, whole: bool) -> float:
    if whole and not value.isdecimal():
        raise ValueError("an integer, 0 or more")
    try:
        return int(value) if whole else float(value)
    except ValueError:
        raise ValueError("a number") from None


def _k(value: str) -> SpeculationLength:
    if value == AUTO:
        return AUTO
    if not value.isdecimal():
        raise ValueError("an integer, 0 or more, or auto")
    return int(value)

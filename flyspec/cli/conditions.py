"""A rule as it is written on a command line: `name`, or `name:parameter=value,parameter=value`.

Phases of the output are `rule until TEXT then rule`: `relaxed until #### then exact`. TEXT has no
comma; `token:ID` is a token. Budgets of a phase are given like its rule's parameters, and K, a
number or `auto`, as `num_speculative_tokens`. What parses raises `ValueError`.

`--until` and `--then` say the same in flags.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import typer

from flyspec.flags import Flag
from flyspec.rules import PARAMETERS, Rule
from flyspec.speculation_length import AUTO, SpeculationLength
from flyspec.values.phases import Phase
from flyspec.values.requests import GenerateOptions

T = TypeVar("T")

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


def split_rules(text: str) -> list[str]:
    """Return the rules of a comma-separated list."""
    return [rule for rule in map(str.strip, _BETWEEN_RULES.split(text)) if rule]


def parse_condition(text: str) -> Condition:
    """Parse a single rule that leaves K to the request, maybe of several phases."""
    rules = split_rules(text)
    if len(rules) != 1:
        raise ValueError(f"{text!r} names {len(rules)} rules; give one")
    condition = parse_with_k(rules[0])
    if condition.num_speculative_tokens is not None:
        raise ValueError(f"{text!r} sets K; use --num-speculative-tokens instead")
    return condition


def parse_with_k(spec: str) -> Condition:
    """Parse a single rule that may set K, maybe of several phases."""
    first, *others = _BETWEEN_PHASES.split(spec)
    rule, k, budget = _parse_rule(spec, first)
    phases = [replace(Phase(rule), **budget)]
    for until, text in zip(others[::2], others[1::2], strict=True):
        end = parse_until(until)
        phases[-1] = replace(phases[-1], until=end.until, until_token_ids=end.until_token_ids)
        following, other_k, budget = _parse_rule(spec, text)
        if other_k is not None:
            raise ValueError(f"{spec!r}: set {_K} in the first phase, for all of them")
        phases.append(replace(Phase(following), **budget))
    if len(phases) == 1 and not phases[0].has_budget:
        phases = []
    return Condition(spec, rule, k, tuple(phases))


def parse_until(text: str) -> Phase:
    """Return a phase without a rule that ends with this text, or with the token of `token:ID`."""
    token = _TOKEN.fullmatch(text)
    return Phase(until_token_ids=(int(token[1]),)) if token else Phase(until=(text,))


def parse_phase(text: str) -> Phase:
    """Return the phase of a rule, which may set budgets but no K."""
    if _BETWEEN_PHASES.search(text):
        raise ValueError(f"{text!r}: give one rule")
    condition = parse_condition(text)
    return condition.phases[0] if condition.phases else Phase(condition.rule)


def _parse_rule(spec: str, text: str) -> tuple[Rule, SpeculationLength | None, dict[str, Any]]:
    """Return a rule with its parameters, its K if given, and the budgets of its phase."""
    name, _, parameters = text.partition(":")
    if not name or "=" in name or " " in name:
        raise ValueError(
            f"{spec!r} has no rule name before a colon; write name:parameter=value, for "
            "example margin:margin_threshold=0.2, or phases such as relaxed until #### then exact"
        )
    rule = Rule(name)
    k: SpeculationLength | None = None
    budget: dict[str, Any] = {}
    for parameter in filter(None, map(str.strip, parameters.split(","))):
        field, separator, value = parameter.partition("=")
        known = (_K, *PARAMETERS, *_BUDGETS)
        if field not in known or not separator:
            raise ValueError(
                f"{spec!r}: {parameter!r} must be PARAMETER=VALUE; parameters are "
                f"{', '.join(known)}"
            )
        try:
            if field == _K:
                k = parse_k(value)
            elif field in _BUDGETS:
                budget[field] = _number(value, whole=field == "max_loose_tokens")
            else:
                rule = replace(rule, **{field: PARAMETERS[field].read(value)})
        except ValueError as error:
            raise ValueError(f"{spec!r}: {field} must be {error}, got {value!r}") from None
    return rule, k, budget


def _number(value: str, whole: bool) -> float:
    if whole and not value.isdecimal():
        raise ValueError("an integer, 0 or more")
    try:
        return int(value) if whole else float(value)
    except ValueError:
        raise ValueError("a number") from None


def parse_k(value: str) -> SpeculationLength:
    if value == AUTO:
        return AUTO
    if not value.isdecimal():
        raise ValueError("an integer, 0 or more, or auto")
    return int(value)


# fmt: off
Until = Annotated[Sequence[str], Flag(
    "Text in the output after which the rule of the --then behind it holds, or token:ID; "
    "repeatable.", group="Speculation", metavar="TEXT",
)]
Then = Annotated[Sequence[str], Flag(
    "Acceptance rule after the text of --until, with parameters as in "
    "relaxed:relaxed_delta=0.02,max_loose_tokens=5; repeatable.", group="Speculation",
    metavar="RULE",
)]
# fmt: on


def with_phases(
    options: GenerateOptions, until: Sequence[str], then: Sequence[str]
) -> GenerateOptions:
    """Return options with the phases of these flags, in their order; without any, as they are.

    The first phase has the options' own rule. Raises `typer.BadParameter`.
    """
    if len(until) != len(then):
        raise typer.BadParameter(
            f"--until: give one --then for each, the rule after that text; there are {len(until)} "
            f"--until and {len(then)} --then"
        )
    if not until:
        return options
    if "" in until:
        raise typer.BadParameter("--until: is empty; give a text")
    phases = [Phase()]
    for text, rule in zip(until, then, strict=True):
        end = parse_until(text)
        phases[-1] = replace(phases[-1], until=end.until, until_token_ids=end.until_token_ids)
        try:
            phases.append(parse_phase(rule))
        except ValueError as error:
            raise typer.BadParameter(f"--then: {error}") from None
    return replace(options, phases=tuple(phases))

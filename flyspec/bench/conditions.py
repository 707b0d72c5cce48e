"""What is compared: plain decoding and rules with their parameters, and how both are written.

On the command line a rule is `name`, or `name:parameter=value,parameter=value`; commas also stand
between rules: `fly,margin:margin_threshold=0.2,fly_window_size=4,typical` is three of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from flyspec.errors import ConfigError
from flyspec.rules import Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.validation import validate_rule

PLAIN = "plain"
ALL = "all"


@dataclass(frozen=True)
class Condition:
    """A way to generate; without `num_speculative_tokens` with the K of the run."""

    name: str
    rule: Rule
    num_speculative_tokens: int | None = None


_PLAIN = Condition(PLAIN, Rule("exact"), 0)

CONDITIONS: tuple[Condition, ...] = (
    _PLAIN,
    Condition("exact", Rule("exact")),
    Condition("fly", Rule("fly")),
    Condition("fly, W = 0", Rule("fly", fly_window_size=0)),
)
"""What is compared unless rules are named."""

ALL_CONDITIONS: tuple[Condition, ...] = (
    *CONDITIONS,
    Condition("fly-paper", Rule("fly-paper")),
    Condition("fly-reference", Rule("fly-reference")),
    Condition("margin", Rule("margin")),
    Condition("margin, K = 4", Rule("margin"), 4),
    Condition("fuzzy, JS", Rule("fuzzy")),
    Condition("fuzzy, KL", Rule("fuzzy", divergence=Divergence.KL)),
    Condition("fuzzy, TV", Rule("fuzzy", divergence=Divergence.TV)),
    Condition("fuzzy, JS, full", Rule("fuzzy", divergence_top_k=0)),
    Condition("fuzzy-reference, JS", Rule("fuzzy-reference")),
    Condition("fuzzy-reference, KL", Rule("fuzzy-reference", divergence=Divergence.KL)),
    Condition("rejection", Rule("rejection")),
    Condition("typical", Rule("typical")),
    Condition("random", Rule("random")),
)
"""Every preset, and the variants that the literature tells apart."""


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """The conditions that a comma list names; `all` stands for `ALL_CONDITIONS`, `plain` for K = 0.

    `num_speculative_tokens` may be given like a rule's parameter. Ranges are checked by the server,
    which alone knows an operator's limits and named rules. Raises `ConfigError`.
    """
    found: list[Condition] = []
    for spec in _split(text):
        name, _, parameters = spec.partition(":")
        if name == ALL and not parameters:
            found += ALL_CONDITIONS
        elif name == PLAIN and not parameters:
            found.append(_PLAIN)
        else:
            found.append(_parse(spec, name, parameters))
    if not found:
        raise ConfigError("--rules names no rule; give `all` or a comma list such as exact,fly")
    names = [condition.name for condition in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--rules names {twice!r} twice")
    return tuple(found)


def parse_rules(text: str) -> tuple[tuple[str, Rule], ...]:
    """Names and rules of a comma list, checked, for judging in this process.

    `all` leaves out what differs by K alone. Raises `ConfigError` where a K is given.
    """
    if text.strip() == ALL:
        conditions = tuple(c for c in ALL_CONDITIONS if c.num_speculative_tokens is None)
    else:
        conditions = parse_conditions(text)
    for condition in conditions:
        if condition.num_speculative_tokens is not None:
            raise ConfigError(f"--rules: {condition.name!r} sets K; only rules can be judged by")
        validate_rule(condition.rule)
    return tuple((c.name, c.rule) for c in conditions)


def with_plain(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """The same with plain decoding first, which recovery is relative to."""
    return (_PLAIN, *(c for c in conditions if c.name != PLAIN))


def _split(text: str) -> list[str]:
    """Pieces of a comma list; `parameter=value` belongs to the rule before it."""
    specs: list[str] = []
    for piece in (part.strip() for part in text.split(",")):
        if piece and "=" in piece and ":" not in piece:
            if not specs or ":" not in specs[-1]:
                raise ConfigError(
                    f"--rules: {piece!r} follows no rule; write name:parameter=value, for example "
                    "margin:margin_threshold=0.2"
                )
            specs[-1] += f",{piece}"
        elif piece:
            specs.append(piece)
    return specs


def _parse(spec: str, name: str, parameters: str) -> Condition:
    if not name:
        raise ConfigError(f"--rules: {spec!r} has no rule's name before the colon")
    rule, k = Rule(name), None
    for parameter in filter(None, parameters.split(",")):
        field, separator, value = parameter.partition("=")
        convert = _PARAMETERS.get(field)
        if convert is None or not separator:
            raise ConfigError(
                f"--rules: {spec!r}: {parameter!r} is no parameter with a value; parameters are "
                f"{', '.join(_PARAMETERS)}"
            )
        try:
            converted = convert(value)
        except (ValueError, KeyError):
            raise ConfigError(
                f"--rules: {spec!r}: {field} must be {_describe(convert)}, got {value!r}"
            ) from None
        if field == "num_speculative_tokens":
            k = converted
        else:
            rule = replace(rule, **{field: converted})
    return Condition(spec, rule, k)


def _natural(value: str) -> int:
    number = int(value)
    if number < 0:
        raise ValueError(value)
    return number


def _named(enum: type[IntEnum]) -> Callable[[str], IntEnum]:
    def convert(value: str) -> IntEnum:
        return enum[value.upper()]

    convert.__doc__ = "one of " + ", ".join(member.name.lower() for member in enum)
    return convert


def _describe(convert: Callable[[str], Any]) -> str:
    if convert is float:
        return "a number"
    return "an integer, 0 or more" if convert is _natural else str(convert.__doc__)


_PARAMETERS: dict[str, Callable[[str], Any]] = {
    "num_speculative_tokens": _natural,
    "fly_window_size": _natural,
    "fly_entropy_threshold": float,
    "fly_entropy_top_k": _natural,
    "entropy_measure": _named(EntropyMeasure),
    "window_scope": _named(WindowScope),
    "margin_threshold": float,
    "divergence": _named(Divergence),
    "divergence_threshold": float,
    "divergence_top_k": _natural,
    "typical_epsilon": float,
    "typical_delta": float,
    "random_acceptance": float,
}

"""Conditions that are compared: plain decoding, and rules as `flyspec.cli.conditions` reads them.

Rules are separated by commas: `fly,margin:margin_threshold=0.2,fly_window_size=4,typical` is three
of them. K is a number, or `auto` for the server's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flyspec.cli.conditions import Condition, parse_k, parse_with_k, split_rules
from flyspec.rules import Divergence, Rule
from flyspec.rules.presets import DEFAULT_RULE, RULE_PRESETS
from flyspec.speculation_length import SpeculationLength

PLAIN = "plain"
ALL = "all"

_PLAIN = Condition(PLAIN, Rule("exact"), 0)
EXACT, FLY = (Condition(name, Rule(name)) for name in ("exact", "fly"))

DEFAULT = Condition(DEFAULT_RULE, Rule(DEFAULT_RULE))
_NO_WINDOW = Condition("fly, W = 0", Rule("fly", fly_window_size=0))

CONDITIONS: tuple[Condition, ...] = tuple(dict.fromkeys((_PLAIN, EXACT, DEFAULT, FLY, _NO_WINDOW)))
"""Conditions that `flyspec eval` compares unless rules are named."""

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
    only it knows an operator's limits and named rules. Raises `ValueError`.
    """
    found: list[Condition] = []
    for spec in split_rules(text):
        name, _, parameters = spec.partition(":")
        if name == ALL and not parameters:
            found += ALL_CONDITIONS
        elif name == PLAIN and not parameters:
            found.append(_PLAIN)
        else:
            found.append(parse_with_k(spec))
    if not found:
        raise ValueError("names no rule; give `all` or a comma list such as exact,fly")
    names = [condition.name for condition in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"names {twice!r} twice")
    return tuple(found)


def parse_ks(text: str) -> tuple[SpeculationLength, ...]:
    """Parse comma-separated values of K, each a number or `auto`. Raises `ValueError`."""
    found: list[SpeculationLength] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(parse_k(piece))
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


def with_plain(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """Return them with plain decoding first, as the baseline of recovery."""
    return (_PLAIN, *(c for c in conditions if c.name != PLAIN))

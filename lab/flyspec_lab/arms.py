"""Arms: conditions, multiplied by grids, with a drafter, on the target or on a rival.

A grid is `PARAMETER=VALUE,VALUE`, several of them separated by spaces. A parameter is a rule's, by
its name or its symbol (`W`, `theta` for θ); `num_speculative_tokens` or `K`; or `drafter`.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from flyspec.cli.conditions import Condition
from flyspec.errors import ConfigError, InvalidArgumentError
from flyspec.rules import PARAMETERS, Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule
from flyspec.speculation_length import (
    AUTO,
    SpeculationLength,
    read_speculation_length,
    requested,
)
from flyspec.spelling import did_you_mean
from flyspec_lab.bench.conditions import PLAIN, parse_conditions, with_plain

_K, _DRAFTER = "num_speculative_tokens", "drafter"

Grid = Sequence[tuple[str, tuple[Any, ...]]]
"""Names, as typed, with the values of each."""


@dataclass(frozen=True)
class Arm:
    """One way to generate every text: a condition with its K and drafter, on the target or rival.

    `rule` is the condition's with its preset's parameters, if the preset is known here; requests
    have the condition's. `drafter` is "" where nothing is drafted. Arms with an equal `key` make
    equal samples.
    """

    condition: Condition
    rule: Rule
    num_speculative_tokens: SpeculationLength
    drafter: str = ""
    rival: bool = False

    @property
    def name(self) -> str:
        return self.condition.name

    @property
    def rule_json(self) -> str:
        """The rule and the phases of the condition, for keys and files."""
        phases = tuple(asdict(phase) for phase in self.condition.phases)
        return json.dumps(_plain({**asdict(self.rule), "phases": phases}), sort_keys=True)

    @property
    def k(self) -> int | None:
        """The requested K; None if it adapts."""
        k = self.num_speculative_tokens
        return None if k == AUTO else int(k)

    @property
    def key(self) -> tuple[Any, ...]:
        return self.rule_json, self.k, self.drafter, self.rival


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v not in (None, ())}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def parse_grid(texts: Sequence[str]) -> Grid:
    """Parse `NAME=VALUE,VALUE` texts, each with one or several separated by spaces.

    Values are read once it is known which rule they are for. Raises `ValueError`.
    """
    found: list[tuple[str, tuple[str, ...]]] = []
    for piece in itertools.chain.from_iterable(map(str.split, texts)):
        name, equals, values = piece.partition("=")
        listed = tuple(filter(None, values.split(",")))
        if not (name and equals and listed):
            raise ValueError(f"{piece!r}: must be PARAMETER=VALUE,VALUE, such as K=4,8,15")
        if name in dict(found) or len(set(listed)) < len(listed):
            raise ValueError(f"{piece!r}: names a parameter or a value twice")
        found.append((name, listed))
    return tuple(found)


def make_arms(
    conditions: Sequence[Condition],
    grid: Grid,
    k: SpeculationLength,
    drafter: str,
    known_rules: Sequence[str],
) -> list[Arm]:
    """Return plain decoding, then each condition at each point of the grid that applies to it.

    A condition keeps what it sets itself. `k` and `drafter` are those of arms without their own;
    `known_rules` the server's. Of arms that would make equal samples the first is kept. Raises
    `ConfigError`.
    """
    plain, *others = with_plain(tuple(conditions))
    arms = [Arm(plain, plain.rule, 0)]
    for condition in others:
        arms += _at_every_point(condition, grid, k, drafter)
    for unused, _ in grid:
        if any(_field(condition, unused) for condition in others):
            continue
        known = (f"{p} ({s.symbol})" if s.symbol else p for p, s in PARAMETERS.items())
        raise ConfigError(
            f"--grid {unused}: no condition that is compared takes it; parameters are "
            f"{', '.join(['K', _DRAFTER, *known])}"
        )
    found: dict[Any, Arm] = {}
    for arm in arms:
        whole = _resolved(arm, known_rules)
        found.setdefault(whole.key, whole)
    names = [arm.name for arm in found.values()]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two conditions are named {twice!r}; leave one out")
    return list(found.values())


def rival_arm(model: str) -> Arm:
    """Return plain decoding by the rival, a smaller model, alone."""
    (plain,) = with_plain(())
    return Arm(replace(plain, name=f"{model} alone"), plain.rule, 0, rival=True)


def controls_of(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return the controls of conditions: `random`, and every rule with a window without it.

    `random` is there at several probabilities, which make its curve.
    """
    without = [
        replace(c, name=f"{c.name}, W = 0", rule=replace(c.rule, fly_window_size=0))
        for c in conditions
        if not c.phases
        and c.rule.name in RULE_PRESETS
        and RULE_PRESETS[c.rule.name].defaults.get("fly_window_size", 0) != 0
        and c.rule.fly_window_size != 0
    ]
    at_random = ",".join(f"random:random_acceptance={p}" for p in (0.1, 0.3, 0.6))
    return tuple({c.name: c for c in (*without, *parse_conditions(at_random))}.values())


def _at_every_point(
    condition: Condition, grid: Grid, k: SpeculationLength, drafter: str
) -> Iterator[Arm]:
    axes: dict[str, list[tuple[str, Any]]] = {}
    for name, values in grid:
        field = _field(condition, name)
        own = condition if field == _K else condition.rule
        if field is not None and getattr(own, field, None) is None:
            axes[field] = [_choice(name, field, value) for value in values]
    for point in itertools.product(*axes.values()):
        chosen = dict(zip(axes, (value for _, value in point), strict=True))
        own_k = chosen.pop(_K, condition.requested_k(k))
        own_drafter = chosen.pop(_DRAFTER, drafter)
        rule = replace(condition.rule, **chosen)
        name = ", ".join([condition.name, *(shown for shown, _ in point)])
        at_point = replace(condition, name=name, rule=rule)
        yield Arm(at_point, rule, own_k, own_drafter if own_k != 0 else "")


def _field(condition: Condition, name: str) -> str | None:
    """Return what a name of the grid means for a condition; None if it does not apply.

    Rules of phases have their own parameters.
    """
    if name in ("K", _K):
        return _K
    if name == _DRAFTER:
        return _DRAFTER
    if condition.phases:
        return None
    preset = RULE_PRESETS.get(condition.rule.name)
    known = PARAMETERS if preset is None else preset.defaults
    return next((p for p in known if name in _names(p)), None)


def _names(parameter: str) -> set[str]:
    """Return the names of a rule's parameter: its own, its symbol, a Greek letter's in full."""
    symbol = PARAMETERS[parameter].symbol
    letter = unicodedata.name(symbol, "") if len(symbol) == 1 else ""
    return {parameter, symbol, letter.rpartition(" ")[2].lower() if "GREEK" in letter else symbol}


def _choice(name: str, field: str, text: str) -> tuple[str, Any]:
    """Read a value of the grid; return it after what it adds to a condition's name."""
    if field == _DRAFTER:
        return f"{name} = {text}", text
    try:
        if field == _K:
            k = read_speculation_length(text)
            return f"{name} = {k}", k
        value = PARAMETERS[field].read(text)
    except ValueError as error:
        reason = error if field == _K else f"must be {error}"
        raise ConfigError(f"--grid {name}={text}: {reason}") from None
    return f"{name} = {PARAMETERS[field].show(value)}", value


def _resolved(arm: Arm, known_rules: Sequence[str]) -> Arm:
    """Return the arm with all parameters of its rule. Raises `ConfigError` if they do not fit."""
    for rule in arm.condition.rules:
        if arm.name != PLAIN and rule.name not in known_rules:
            raise ConfigError(
                f"--rules: {arm.name!r}: the server has no rule {rule.name!r}"
                f"{did_you_mean(rule.name, known_rules)}; it has {', '.join(known_rules)}"
            )
    try:
        whole = [
            resolve_rule(rule, requested(arm.num_speculative_tokens))
            if rule.name in RULE_PRESETS else rule
            for rule in (arm.condition.rule, *arm.condition.rules)
        ]  # fmt: skip
    except InvalidArgumentError as error:
        raise ConfigError(f"--rules: {arm.name!r}: {error}") from None
    return replace(arm, rule=whole[0])

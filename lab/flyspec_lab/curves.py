"""Each lossy condition against the curves of other rules, where both cost the same.

A curve is the conditions of one rule that differ in their thresholds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flyspec.rules import PARAMETERS, Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec_lab.answered import ROUNDS, TIME, Answered
from flyspec_lab.arms import Arm
from flyspec_lab.bench.summaries import grouped
from flyspec_lab.frontier import AtEqualSpeed, at_equal_speed

_WINDOW = "fly_window_size"


@dataclass(frozen=True)
class EqualCost:
    """A condition against the curve of another rule, where both have the same tokens per round
    (`acceptance`) and the same tokens per second (`speed`). None where the curve does not reach."""

    task: str
    condition: str
    of: str
    acceptance: AtEqualSpeed | None
    speed: AtEqualSpeed | None


def equal_costs(answered: Answered) -> list[EqualCost]:
    """Compare each lossy condition with the curves of other rules, `random` first.

    A curve has two or more conditions of a rule (`curves_of`), or is `random`; and `exact` if that
    was compared, which every rule becomes where it accepts nothing.
    """
    if not answered.has_answers or answered.bootstrap is None:
        return []
    curves = _curves(answered.arms)
    found = []
    for arm in answered.arms:
        for name, members in curves.items():
            if arm.rival or arm in members or is_exact(arm) or is_control(arm):
                continue
            at = {
                by: at_equal_speed(
                    answered.bootstrap, answered.curve([arm], by), answered.curve(members, by)
                )
                for by in (ROUNDS, TIME)
            }
            if any(at.values()):
                found.append(EqualCost(answered.task, arm.name, name, at[ROUNDS], at[TIME]))
    return found


def curves_of(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """Return the arms that differ in their thresholds only, by what they have in common.

    That is the rule with its kinds of measures and its window, K and drafter; the name says what
    others differ in. Conditions with phases are by themselves; plain decoding and rivals are left
    out.
    """
    drafting = [arm for arm in arms if arm.k != 0 and not arm.rival]
    of_rule = grouped((arm.rule for arm in drafting), lambda rule: rule.name)
    lengths = len({arm.k for arm in drafting}) > 1
    drafters = len({arm.drafter for arm in drafting}) > 1

    def name(arm: Arm) -> str:
        if arm.condition.phases:
            return arm.name
        parts = [arm.rule.name, *_own_kinds(arm.rule, of_rule[arm.rule.name])]
        if lengths:
            parts.append(f"K = {'auto' if arm.k is None else arm.k}")
        if drafters:
            parts.append(arm.drafter)
        return ", ".join(parts)

    return grouped(drafting, name)


def _own_kinds(rule: Rule, rules: Sequence[Rule]) -> list[str]:
    """Return the rule's kinds of measures and window, where the others' are not all the same."""
    kinds = [name for name, p in PARAMETERS.items() if p.members or name == _WINDOW]
    differ = [name for name in kinds if len({getattr(other, name) for other in rules}) > 1]
    values = {name: getattr(rule, name) for name in differ}
    return [
        f"W = {value}" if name == _WINDOW else PARAMETERS[name].show(value)
        for name, value in values.items()
        if value is not None
    ]


def _curves(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """Return the curves to compare with, beginning at `exact`; `random` first."""
    exact = {(arm.k, arm.drafter): arm for arm in arms if is_exact(arm) and arm.k != 0}
    found = {}
    for name, members in curves_of(arms).items():
        start = exact.get((members[0].k, members[0].drafter))
        if is_exact(members[0]) or (len(members) < 2 and not is_control(members[0])):
            continue
        points = members if start is None else [start, *members]
        if len(points) > 1:
            found[name] = points
    return dict(sorted(found.items(), key=lambda item: not is_control(item[1][-1])))


def is_exact(arm: Arm) -> bool:
    """Whether its rule is lossless token by token, as that of plain decoding is."""
    preset = RULE_PRESETS.get(arm.rule.name)
    return preset is not None and preset.token_exact and not arm.condition.phases


def is_control(arm: Arm) -> bool:
    """Whether it accepts at random, as what other rules have to be better than."""
    preset = RULE_PRESETS.get(arm.rule.name)
    return preset is not None and preset.criterion == "random" and not arm.condition.phases

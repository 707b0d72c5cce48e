"""Studies: each can be run, claims are decided by the figures, reports have all of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from flyspec.lab.arms import make_arms
from flyspec.lab.statistics import Interval
from flyspec.lab.studies.catalogue import STUDIES, studies_named
from flyspec.lab.studies.options import StudyOptions
from flyspec.lab.studies.study import Found, value_of
from flyspec.rules.presets import RULE_PRESETS


def arms_of(study):
    run = study.run(StudyOptions(problems=3))
    return make_arms(
        run.conditions, run.grid, run.num_speculative_tokens, "model", tuple(RULE_PRESETS)
    )


def interval(value, spread=0.005):
    return Interval(value, value - spread, value + spread, value - spread)


def report(arm, recovery, tokens=10.0, upper=0.005):
    return SimpleNamespace(
        condition=arm.name,
        recovery=recovery,
        mean_accepted_tokens=tokens,
        flips=SimpleNamespace(harmful_rate_upper=upper),
    )


def found_of(study, describe, equal_costs=()):
    arms = arms_of(study)
    return Found("task", arms, [describe(arm) for arm in arms], equal_costs)


def verdicts(study, found):
    return [claim.check(found).holds for claim in study.claims]


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_a_study_compares_several_conditions(study) -> None:
    arms = arms_of(study)
    assert len(arms) > 3
    assert any(value_of(arm, study.axis) is not None for arm in arms if arm.k)
    assert study.question.endswith("?")


def test_studies_are_in_the_catalogues_order() -> None:
    assert [s.name for s in studies_named(["length", "window"])] == ["window", "length"]


@pytest.mark.parametrize(
    ("without", "with_window", "upper", "holds"),
    [
        (0.95, 0.995, 0.004, [True, True]),
        (0.95, 0.97, 0.05, [True, False]),
        (0.99, 0.992, 0.02, [None, None]),
        (0.99, 0.96, 0.06, [False, False]),
    ],
)
def test_what_a_window_saves(without, with_window, upper, holds) -> None:
    study = STUDIES["window"]

    def describe(arm):
        value = without if arm.rule.fly_window_size == 0 else with_window
        return report(arm, interval(value), upper=upper)

    assert verdicts(study, found_of(study, describe)) == holds


def test_acceptance_over_k() -> None:
    study = STUDIES["length"]
    grows = found_of(study, lambda arm: report(arm, interval(1.0), float(arm.k or 0)))
    assert verdicts(study, grows) == [True, True]
    falls = found_of(study, lambda arm: report(arm, interval(1.0), -float(arm.k or 0)))
    assert verdicts(study, falls) == [False, False]


def test_thresholds_order_speed_and_accuracy() -> None:
    study = STUDIES["entropy-threshold"]

    def describe(arm, sign=1):
        theta = sign * (arm.rule.fly_entropy_threshold or 0.0)
        return report(arm, interval(0.95 + 0.04 * theta), 12 - theta)

    assert verdicts(study, found_of(study, describe)) == [True, True]
    assert verdicts(study, found_of(study, lambda arm: describe(arm, -1))) == [False, False]


def test_settings_of_a_study_reach_its_run() -> None:
    run = STUDIES["temperature"].run(StudyOptions(problems=7, num_speculative_tokens=9))
    assert (run.temperature, run.seeds, run.problems) == (1.0, 3, 7)
    assert run.num_speculative_tokens == 9
    assert replace(run, problems=1).problems == 1

"""Studies: each can be run, claims are decided by the figures, reports have all of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from flyspec.lab.arms import make_arms
from flyspec.lab.frontier import AtEqualSpeed
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


@pytest.mark.parametrize(
    ("differences", "holds"),
    [
        ([], None),
        ([(0.02, 0.01, 0.03), (0.05, 0.04, 0.06)], True),
        ([(0.02, 0.01, 0.03), (0.0, -0.01, 0.01)], None),
        ([(0.02, 0.01, 0.03), (-0.02, -0.03, -0.01)], False),
    ],
)
def test_divergences_against_chance(differences, holds) -> None:
    study = STUDIES["divergence"]
    names = [arm.name for arm in arms_of(study) if "js" in arm.name]
    costs = [
        SimpleNamespace(condition=name, of="random", acceptance=AtEqualSpeed(10.0, *difference))
        for name, difference in zip(names, differences, strict=False)
    ]
    found = found_of(study, lambda arm: report(arm, interval(0.9)), costs)
    assert verdicts(study, found) == [holds]


def test_settings_of_a_study_reach_its_run() -> None:
    run = STUDIES["temperature"].run(StudyOptions(problems=7, num_speculative_tokens=9))
    assert (run.temperature, run.seeds, run.problems) == (1.0, 3, 7)
    assert run.num_speculative_tokens == 9
    assert replace(run, problems=1).problems == 1


def test_a_studys_tasks_are_its_own_unless_some_are_named() -> None:
    study = STUDIES["open-ended"]
    own = study.run(StudyOptions())
    assert [name for name, _ in own.task] == ["word_problems", "python_code"]
    assert (own.problems, own.seeds, own.log_likelihood) == (450, 3, True)
    assert own.temperature > 0  # texts of a prompt differ
    assert study.run(StudyOptions(problems=20)).problems == 20
    named = study.run(StudyOptions(task=(("word_problems", None),), limit=5))
    assert (named.task, named.limit) == ((("word_problems", None),), 5)
    assert study.run(StudyOptions(prompt_file="x")).task == ()
    assert STUDIES["window"].run(StudyOptions()).task == ()


def test_greedy_texts_have_one_seed_unless_more_are_asked_for() -> None:
    study = STUDIES["open-ended"]
    greedy = study.run(StudyOptions(temperature=0.0))
    assert (greedy.temperature, greedy.seeds) == (0.0, 1)
    assert study.run(StudyOptions(temperature=0.0, seeds=2)).seeds == 2
    assert study.run(StudyOptions(temperature=0.5)).seeds == 3
    assert STUDIES["window"].run(StudyOptions(temperature=0.5)).seeds == 1


@pytest.mark.parametrize(
    ("ratio", "gaps", "new", "holds"),
    [
        (interval(1.05), (0.2, 4.3), 0, [True, True, True]),
        (interval(0.9), (0.2, 1.9), 60, [False, False, False]),
        (interval(1.001), (None, 4.0), 5, [None, None, None]),
        (None, (0.2, None), None, [None, None, None]),
    ],
)
def test_what_margin_does_to_open_ended_texts(ratio, gaps, new, holds) -> None:
    study = STUDIES["open-ended"]

    def describe(arm):
        return SimpleNamespace(
            condition=arm.name, speed_ratio=ratio, mean_accepted_tokens_ratio=ratio,
            mean_loose_gap_nats=gaps[0], mean_rejected_gap_nats=gaps[1],
            new_loops=new, samples=1350,
        )  # fmt: skip

    assert verdicts(study, found_of(study, describe)) == holds


@pytest.mark.parametrize(
    ("gains", "holds"),
    [
        ({"a": 1.1, "b": 1.3, "c": 1.2}, True),
        ({"a": 1.1, "b": 1.3, "c": 1.102}, None),
        ({"a": 1.1, "b": 1.3, "c": 1.05}, False),
        ({"a": None, "b": 1.3, "c": 1.2}, None),
    ],
)
def test_open_tasks_gain_more_if_each_does(gains, holds) -> None:
    study = STUDIES["strict-open"]
    arms = arms_of(study)

    def found(task, gain):
        ratio = None if gain is None else interval(gain)
        reports = [
            SimpleNamespace(condition=a.name, mean_accepted_tokens_ratio=ratio) for a in arms
        ]
        return Found(task, arms, reports, is_open=task != "a")

    tasks = [found(task, gain) for task, gain in gains.items()]
    for claim in study.tasks_claims:
        finding = claim.check(tasks)
        assert finding.holds is holds
        assert "b +30.0%" in finding.figures

"""Studies: each can be run, claims are decided by the figures, reports have all of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.admin import DrafterStatus, ModelInfo
from flyspec_lab.answered import Answered
from flyspec_lab.arms import make_arms
from flyspec_lab.evaluation import Found
from flyspec_lab.options import EvalOptions, StudyOptions
from flyspec_lab.run import wanted_samples
from flyspec_lab.statistics import Interval
from flyspec_lab.studies.catalogue import STUDIES
from flyspec_lab.studies.study import facts_of
from tests.lab.test_compare import TARGET, rows_of, words


def drafter(name, kind, parameters=0, translated=False):
    model = ModelInfo(name, "", 100, 100, "bfloat16", "cpu", parameters, f"weights of {name}")
    return DrafterStatus(name, kind, True, "", model if parameters else None, translated=translated)


DRAFTERS = [
    drafter("model", "model", 2_000_000),
    drafter("prompt_lookup", "prompt_lookup"),
    drafter("multi_level", "multi_level", 2_000_000),
    drafter("large", "model", 9_000_000),
    drafter("bytes", "model", 1_000_000, translated=True),
    drafter("small", "model", 1_000_000),
]


def first_run(study, **options):
    return study.run(StudyOptions(**options), DRAFTERS)


def arms_of_run(run):
    return make_arms(run.conditions, run.grid, run.num_speculative_tokens, "model", [*RULE_PRESETS])


def arms_of(study):
    return arms_of_run(first_run(study, problems=3))


def interval(value, spread=0.005):
    return Interval(value, value - spread, value + spread)


def report(arm, recovery, tokens=10.0, upper=0.005, speedup=None, judge_ms=None):
    return SimpleNamespace(
        condition=arm.name,
        recovery=recovery,
        mean_accepted_tokens=tokens,
        flips=SimpleNamespace(harmful_rate_upper=upper),
        speedup=speedup,
        judge_ms=judge_ms,
    )


def found_of(study, describe):
    arms = arms_of(study)
    return Found("task", arms, [describe(arm) for arm in arms])


def verdicts(study, found):
    return [claim.check(found).holds for claim in study.claims]


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_a_study_compares_several_conditions(study) -> None:
    arms = arms_of(study)
    assert len(arms) > 3
    assert study.question.endswith("?")


@pytest.mark.parametrize(
    ("lost", "holds"),
    [
        ({0: 40}, [True, True, True]),
        ({0: 40, 6: 15}, [True, False, False]),  # better, but not restored
        ({0: 4, 6: 3}, [None, None, None]),
        ({}, [None, None, True]),
        ({6: 30}, [None, False, False]),
    ],
)
def test_what_a_window_saves(lost, holds) -> None:
    study = STUDIES["window"]
    arms, task = arms_of(study), words("task", 500)
    wanted = wanted_samples(EvalOptions(), [task], arms, TARGET, None)

    def own(unit):
        rule = unit.arm.rule
        wrong = lost.get(rule.fly_window_size, 0) if rule.name == "fly" else 0
        return {"score": float(unit.index >= wrong)}

    found = Found.on(Answered("task", arms, wanted, rows_of(wanted, own)), arms)
    assert verdicts(study, found) == holds


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
    run = first_run(STUDIES["temperature"], problems=7, num_speculative_tokens=9)
    assert (run.temperature, run.seeds, run.problems) == (1.0, 1, 7)
    assert run.num_speculative_tokens == 9


@pytest.mark.parametrize(
    ("alone", "after_lookup", "gates_ms", "holds"),
    [
        (2.0, 2.2, (0.5, 0.57), [True, True]),
        (2.0, 2.05, (None, 0.3), [None, True]),
        (2.0, 1.8, (0.5, 0.58), [False, False]),
        (None, 1.8, (None, None), [None, None]),
    ],
)
def test_prompt_lookup_before_a_draft_model(alone, after_lookup, gates_ms, holds) -> None:
    def describe(arm):
        several = arm.drafter == "multi_level"
        speedup = after_lookup if several else alone
        return report(
            arm, None, speedup=None if speedup is None else interval(speedup, 0.05),
            judge_ms=gates_ms[several],
        )  # fmt: skip

    study = STUDIES["multi-level"]
    assert verdicts(study, found_of(study, describe)) == holds


def test_draft_models_are_compared_smallest_first() -> None:
    run = first_run(STUDIES["draft-models"])
    assert dict(run.grid)["drafter"] == ("bytes", "small", "model", "large")


@pytest.mark.parametrize(
    ("name", "drafters", "missing"),
    [
        ("window", [], None),
        ("multi-level", DRAFTERS[:2], "it needs a draft model .* for the drafter multi_level"),
        ("fuzzy", DRAFTERS[:1], None),
        ("fuzzy-sampled", DRAFTERS[1:2], "it needs a draft model .* for the drafter model"),
        ("draft-models", DRAFTERS[:4], None),
        ("draft-models", DRAFTERS[:3], "it needs several draft models"),
    ],
)
def test_a_study_says_which_drafters_it_needs(name, drafters, missing) -> None:
    if missing is None:
        assert STUDIES[name].run(StudyOptions(), drafters)
    else:
        with pytest.raises(LookupError, match=missing):
            STUDIES[name].run(StudyOptions(), drafters)


def test_a_report_names_both_models() -> None:
    target = ModelInfo("big", "", 1, 1, "float32", "cpu", 12_190_000, "abc", "exactly so")
    facts = facts_of("flyspec study", [], StudyOptions(), target, [DRAFTERS[4], DRAFTERS[1]])
    assert facts["target"] == "big, 12.19 M parameters, float32 on cpu, weights abc"
    assert facts["drafter bytes"] == (
        "bytes, 1.00 M parameters, bfloat16 on cpu, weights weights of bytes, another tokenizer "
        "than the target's"
    )
    assert facts["drafter prompt_lookup"] == "no model"


def test_a_studys_tasks_are_its_own_unless_some_are_named() -> None:
    study = STUDIES["open-ended"]
    own = first_run(study)
    assert [name for name, _ in own.task] == ["word_problems", "python_code"]
    assert (own.problems, own.seeds, own.log_likelihood) == (225, 3, True)
    assert own.temperature > 0  # texts of a prompt differ
    assert first_run(study, problems=20).problems == 20
    named = first_run(study, task=(("word_problems", None),), limit=5)
    assert (named.task, named.limit) == ((("word_problems", None),), 5)
    assert first_run(study, prompt_file="x").task == ()
    assert first_run(STUDIES["window"]).task == ()


def test_greedy_texts_have_one_seed_unless_more_are_asked_for() -> None:
    study = STUDIES["open-ended"]
    greedy = first_run(study, temperature=0.0)
    assert (greedy.temperature, greedy.seeds) == (0.0, 1)
    assert first_run(study, temperature=0.0, seeds=2).seeds == 2
    assert first_run(study, temperature=0.5).seeds == 3
    assert first_run(STUDIES["window"], temperature=0.5).seeds == 1


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

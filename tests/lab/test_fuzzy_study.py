"""The study of fuzzy speculative decoding, on texts whose speeds and scores are made up."""

from __future__ import annotations

import statistics
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from flyspec.rules import Divergence
from flyspec.rules.presets import RULE_PRESETS
from flyspec_lab.answered import ROUNDS, TIME, Answered
from flyspec_lab.arms import make_arms, rival_arm
from flyspec_lab.curves import AllocationLead, AtEqualSpeed
from flyspec_lab.evaluation import compared
from flyspec_lab.options import StudyOptions
from flyspec_lab.problems import TaskProblems
from flyspec_lab.run import Progressed, wanted_samples
from flyspec_lab.statistics import Interval
from flyspec_lab.studies.catalogue import STUDIES
from flyspec_lab.studies.fuzzy import (
    GREEDY,
    SAMPLED,
    TRIALS,
    divergence_section,
    exact_speculation,
    sampled_bounds,
    threshold_rows,
    thresholds_and_bound,
)
from flyspec_lab.studies.study import Found, report_of
from flyspec_lab.tasks import Problem
from flyspec_lab.tasks.word_problems import WordProblems
from flyspec_lab.tuning.replay import DraftedDivergences
from tests.lab.test_allocation import DRAFT
from tests.lab.test_compare import TARGET, rows_of

STUDY = STUDIES["fuzzy"]
COUNT, TOKENS = 12, 60
PARTS = (GREEDY, SAMPLED)
WORDS = TaskProblems(
    "word_problems", WordProblems(), [Problem(f"problem {i}", "Q", "7") for i in range(COUNT)]
)


@cache
def thresholds_like(rule, divergence):
    """Return all thresholds of a rule with a divergence, strictest first."""
    return sorted(
        condition.rule.divergence_threshold
        for condition in STUDY.rules
        if (condition.rule.name, condition.rule.divergence) == (rule, divergence)
    )


def share_of(arm):
    """How loose an arm is: its place among the thresholds of its rule and divergence, from 0."""
    same = thresholds_like(arm.rule.name, arm.rule.divergence)
    return same.index(arm.rule.divergence_threshold) / (len(same) - 1)


def arms_of(run):
    made = make_arms(run.conditions, run.grid, run.num_speculative_tokens, "model", [*RULE_PRESETS])
    return [*made, rival_arm("draft")]


def sample(arm, index, repeat):
    """Rounds: exact 6, random 6 to 4, fuzzy 5 to 3, reference 8 to 4. Wrong: the looser, the more.

    The draft alone is fast, and right half of the time.
    """
    wobble = (index * 7 + repeat * 3) % 5 / 10
    loose = 0.0 if arm.rule.divergence_threshold is None else share_of(arm)
    wrong = (index + repeat) % 4 == 0 and loose > 0.5 - wobble
    if arm.rival:
        rounds, ns, wrong = TOKENS, 1e8, index % 2 == 0
    elif arm.k == 0:
        rounds, ns = TOKENS, 1e9
    elif arm.rule.divergence_threshold is None:
        rounds, ns = 6 - 4 * (arm.rule.random_acceptance or 0.0) + wobble, 5e8
    else:
        first, last = (8.0, 4.0) if "reference" in arm.rule.name else (5.0, 3.0)
        rounds = first + loose * (last - first) + wobble
        ns = rounds * 8e7
    return {
        "num_rounds": rounds, "total_ns": ns, "score": float(not wrong), "num_tokens": TOKENS,
        "num_accepted_draft_tokens": 0 if arm.k == 0 else TOKENS - rounds,
    }  # fmt: skip


@pytest.fixture(scope="module", params=PARTS)
def part(request):
    """A part's name, with its evaluation of made-up texts."""
    return request.param, evaluation(request.param)


@cache
def evaluation(part):
    run = STUDY.runs(StudyOptions(problems=COUNT))[part]
    arms = arms_of(run)
    wanted = wanted_samples(run, [WORDS], arms, TARGET, DRAFT)
    rows = rows_of(wanted, lambda unit: sample(unit.arm, unit.index, unit.repeat))
    answered = Answered(WORDS.name, arms, wanted, rows)
    return compared(arms, Progressed(), {WORDS.name: answered}, run.conditions[0].name)


def found_of(name, evaluation):
    task = "word_problems"
    return Found(
        task, evaluation.arms, evaluation.conditions[task], evaluation.equal_costs[task],
        evaluation.allocations[task], evaluation.answered[task], part=name,
    )  # fmt: skip


def test_its_parts_differ_in_what_replaces_a_rejected_draft():
    runs = STUDY.runs(StudyOptions(problems=5, num_speculative_tokens=9))
    greedy, sampled = (runs[name] for name in PARTS)
    assert (greedy.temperature, greedy.seeds) == (0.0, 1)
    assert (sampled.temperature, sampled.seeds) == (1.0, 1)
    for run in (greedy, sampled):
        assert (run.problems, run.rival, run.num_speculative_tokens) == (5, "draft", 9)
        for name in ("fuzzy", "fuzzy-reference"):
            kinds = {c.rule.divergence for c in run.conditions if c.rule.name == name}
            assert kinds == set(Divergence)
    assert exact_speculation(arms_of(greedy)).rule.name == "exact"
    assert exact_speculation(arms_of(sampled)).rule.name == "rejection"


def by_hand(name, by, arms, keep):
    """Return T* and recovery over some problems, by going through the thresholds."""

    def sums(arm):
        texts = [sample(arm, i, 0) for i in keep]
        spent = sum(text[by] for text in texts)
        return len(texts) * TOKENS / spent, sum(t["score"] for t in texts)

    base = exact_speculation(arms)
    speed, _ = sums(base)
    _, plain = sums(next(arm for arm in arms if arm.name == "plain"))
    own = [
        a for a in arms if a.rule.divergence and name == f"{a.rule.name} {a.rule.divergence.name}"
    ]
    points = sorted((*sums(arm), arm.rule.divergence_threshold) for arm in own)
    if speed > points[-1][0]:
        return None
    if speed <= points[0][0]:
        return points[0][2], points[0][1] / plain
    above = next(i for i, point in enumerate(points) if point[0] >= speed)
    (s0, q0, t0), (s1, q1, t1) = points[above - 1], points[above]
    part = (speed - s0) / (s1 - s0)
    return t0 + part * (t1 - t0), (q0 + part * (q1 - q0)) / plain


def test_thresholds_are_those_at_equal_speed(part):
    _, of = part
    rows = threshold_rows(of.answered["word_problems"])
    assert [(row.name, row.by) for row in rows] == [
        (f"{rule} {kind.name}", by)
        for rule in ("fuzzy", "fuzzy-reference")
        for kind in Divergence
        for by in (ROUNDS, TIME)
    ]
    trials = [range(t, COUNT, TRIALS) for t in range(TRIALS)]
    for row in rows:
        assert len(row.trials) == TRIALS
        for found, keep in zip([row.found, *row.trials], [range(COUNT), *trials], strict=True):
            expected = by_hand(row.name, row.by, of.arms, keep)
            if expected is None:
                assert found is None
                continue
            assert found is not None
            assert found.recovery is not None
            assert (found.threshold, found.recovery.value) == pytest.approx(expected)
    per_round = {row.name: row.found for row in rows if row.by == ROUNDS}
    assert per_round["fuzzy JS"].all_faster
    assert not per_round["fuzzy-reference JS"].all_faster


def test_the_table_has_means_and_spreads(part):
    name, of = part
    rows = threshold_rows(of.answered["word_problems"])
    (section,) = thresholds_and_bound(found_of(name, of))
    assert len(section.tables) == 1 + (name == SAMPLED)
    for row, shown in zip(rows, section.tables[0].rows, strict=True):
        recoveries = [t.recovery.value for t in row.trials if t is not None]
        spread = f"{statistics.mean(recoveries):.1%} ± {statistics.stdev(recoveries):.1%}"
        assert shown[6] == spread
        assert shown[3].startswith("≤") == row.found.all_faster


def test_the_bound_has_what_was_measured(part):
    name, of = part
    bounds = sampled_bounds(found_of(name, of))
    arms = {arm.name: arm for arm in of.arms}
    assert len(bounds) == 8
    for report, bound in bounds:
        arm = arms[report.condition]
        texts = [sample(arm, i, r) for i in range(COUNT) for r in range(report.samples // COUNT)]
        kept = sum(t["num_accepted_draft_tokens"] for t in texts) / len(texts)
        assert bound.value == pytest.approx(kept * arm.rule.divergence_threshold)


def test_a_report_has_both_parts():
    values = np.array([0.0, 0.01, 0.2, 0.6])
    drafted = DraftedDivergences(values, values < 0.1)
    divergences = divergence_section({"word_problems": drafted, "gsm8k": drafted})
    report = report_of(
        STUDY, {name: evaluation(name) for name in PARTS}, [WORDS], TARGET, StudyOptions(),
        "flyspec study fuzzy", further=[divergences],
    )  # fmt: skip
    headings = [section.heading for section in report.sections]
    thresholds = "thresholds as fast as exact speculation"
    for name in PARTS:
        title = f"word_problems, {name}"
        assert headings.count(title) == headings.count(f"{title}: {thresholds}") == 1
    assert report.facts["problems"] == (
        "greedy: 12 of word_problems; sampled: 12 of word_problems; seed 7"
    )
    assert [row[:3] for row in divergences.tables[0].rows] == [
        ["word_problems", "4", "50.0%"], ["gsm8k", "4", "50.0%"],
    ]  # fmt: skip
    html = report.page()
    assert html.count("<svg") == 5
    for text in ("random allocation", "at equal cost", "the bound on the loss"):
        assert text in html
    assert "word_problems, sampled: as good as exact speculation, and faster" in html


def verdict_of(claim, found):
    (one,) = [c for c in STUDY.claims if claim in c.text]
    return one.check(found).holds


def found_with(costs=(), allocations=(), reports=None):
    arms = arms_of(STUDY.runs(StudyOptions())[GREEDY])
    reports = reports or [SimpleNamespace(condition=arm.name) for arm in arms]
    return Found("task", arms, reports, costs, allocations)


NAMES = [
    arm.name
    for arm in arms_of(STUDY.runs(StudyOptions())[GREEDY])
    if arm.name.startswith("fuzzy JS")
]
LEADS = [
    ([], None),
    ([(0.02, 0.01, 0.03), (0.05, 0.04, 0.06)], True),
    ([(0.02, 0.01, 0.03), (0.0, -0.01, 0.01)], None),
    ([(0.02, 0.01, 0.03), (-0.02, -0.03, -0.01)], False),
]


@pytest.mark.parametrize(("differences", "holds"), LEADS)
def test_divergences_against_chance(differences, holds):
    costs = [
        SimpleNamespace(condition=name, of="random", acceptance=AtEqualSpeed(10.0, *difference))
        for name, difference in zip(NAMES, differences, strict=False)
    ]
    assert verdict_of("than chance", found_with(costs)) == holds


@pytest.mark.parametrize(("differences", "holds"), LEADS)
def test_divergences_against_a_random_allocation(differences, holds):
    leads = [
        AllocationLead("task", name, "plain", "draft alone", AtEqualSpeed(1e-7, *difference))
        for name, difference in zip(NAMES, differences, strict=False)
    ]
    # The line from exact speculation does not count, nor does another divergence.
    worse = AtEqualSpeed(1e-7, -0.5, -0.6, -0.4)
    leads.append(AllocationLead("task", NAMES[0], "exact", "draft alone", worse))
    leads.append(AllocationLead("task", "fuzzy KL, T = 0.8", "plain", "draft alone", worse))
    assert verdict_of("random allocation", found_with(allocations=leads)) == holds


def test_a_threshold_slower_than_plain_decoding_leaves_it_open():
    above = AtEqualSpeed(1e-7, 0.02, 0.01, 0.03)
    leads = [
        AllocationLead("task", NAMES[0], "plain", "draft alone", above),
        AllocationLead("task", NAMES[1], "plain", "draft alone", None),
    ]
    assert verdict_of("random allocation", found_with(allocations=leads[:1])) is True
    assert verdict_of("random allocation", found_with(allocations=leads)) is None


@pytest.mark.parametrize(
    ("speed", "loss", "problems", "holds"),
    [
        (1.2, (0.0, -0.005, 0.005), 100, True),
        (1.2, (-0.05, -0.06, -0.04), 100, False),
        (1.2, (-0.01, -0.03, 0.01), 100, None),
        (1.0, (0.0, -0.005, 0.005), 100, None),
        (1.2, (0.0, 0.0, 0.0), 290, None),  # no difference among few proves nothing
        (1.2, (0.0, 0.0, 0.0), 300, True),
    ],
)
def test_as_good_and_faster(speed, loss, problems, holds):
    def report(arm):
        own = Interval(speed, speed - 0.05, speed + 0.05)
        score = Interval(*loss)
        return SimpleNamespace(
            condition=arm.name,
            problems=problems,
            speed=speed,
            speed_ratio=None if arm.name == "exact" else own,
            versus=SimpleNamespace(score_difference=score),
        )

    arms = arms_of(STUDY.runs(StudyOptions())[GREEDY])
    found = found_with(reports=[report(arm) for arm in arms])
    assert verdict_of("as good as", found) == holds

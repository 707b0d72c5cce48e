"""The study of fuzzy speculative decoding, on texts whose speeds and scores are made up."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flyspec.rules import Divergence
from flyspec_lab.answered import Answered
from flyspec_lab.arms import rival_arm
from flyspec_lab.curves import AtEqualSpeed, EqualCost, allocation_from
from flyspec_lab.evaluation import Found
from flyspec_lab.options import StudyOptions
from flyspec_lab.run import wanted_samples
from flyspec_lab.statistics import Interval
from flyspec_lab.studies import fuzzy
from flyspec_lab.studies.catalogue import STUDIES
from flyspec_lab.studies.fuzzy import divergence_section, exact_speculation
from flyspec_lab.studies.study import evaluated
from flyspec_lab.tuning.replay import DraftedDivergences
from tests.lab.test_allocation import DRAFT
from tests.lab.test_compare import TARGET, rows_of, words
from tests.lab.test_studies import DRAFTERS, arms_of_run

STUDY, SAMPLED = STUDIES["fuzzy"], STUDIES["fuzzy-sampled"]
COUNT, TOKENS = 12, 60
WORDS = words("word_problems", COUNT)


def arms_of(run):
    return [*arms_of_run(run), rival_arm("draft")]


def sample(unit):
    """Loose thresholds take fewer rounds and cost answers; the draft is fast and half right."""
    arm, rule = unit.arm, unit.arm.rule
    loose = rule.divergence_threshold or rule.random_acceptance or 0.0
    wrong = (unit.index % 4 == 0 and loose > 0.1) or (arm.rival and unit.index % 2 == 0)
    rounds = TOKENS if arm.rival or arm.k == 0 else 6 - 2 * loose + unit.index % 5 / 10
    return {
        "num_rounds": rounds, "total_ns": 1e8 if arm.rival else rounds * 8e7,
        "score": float(not wrong), "num_tokens": TOKENS,
    }  # fmt: skip


def evaluation(study):
    run = study.run(StudyOptions(problems=COUNT), DRAFTERS)
    arms = arms_of(run)
    wanted = wanted_samples(run, [WORDS], arms, TARGET, DRAFT)
    answered = Answered(WORDS.name, arms, wanted, rows_of(wanted, sample))
    return [Found.on(answered, arms)]


def test_they_differ_in_what_replaces_a_rejected_draft():
    o = StudyOptions(problems=5, num_speculative_tokens=9)
    greedy, sampled = (study.run(o, DRAFTERS) for study in (STUDY, SAMPLED))
    assert (greedy.temperature, greedy.seeds) == (0.0, 1)
    assert (sampled.temperature, sampled.seeds) == (1.0, 1)
    for run in (greedy, sampled):
        assert (run.problems, run.rival, run.num_speculative_tokens) == (5, "draft", 9)
        for name in ("fuzzy", "fuzzy-reference"):
            kinds = {c.rule.divergence for c in run.conditions if c.rule.name == name}
            assert kinds == set(Divergence)
    assert exact_speculation(arms_of(greedy)).rule.name == "exact"
    assert exact_speculation(arms_of(sampled)).rule.name == "rejection"


def test_a_report_has_claims_and_divergences():
    values = np.array([0.0, 0.01, 0.2, 0.6])
    drafted = DraftedDivergences(values, values < 0.1)
    divergences = divergence_section({"word_problems": drafted, "gsm8k": drafted})
    assert [row[:4] for row in divergences.tables[0].rows] == [
        ["word_problems", "4", "50.0%", "0.1050"], ["gsm8k", "4", "50.0%", "0.1050"],
    ]  # fmt: skip
    sections, claims = evaluated(STUDY, evaluation(STUDY))
    report = STUDY.report([*sections, divergences], claims, {})
    html = report.page()
    assert html.count("<svg") == 2
    for text in ("random allocation", "at equal cost", "random"):
        assert text in html
    equal = next(t for t in sections[0].tables if t.title == "at equal cost")
    assert "random" in {row[1] for row in equal.rows}
    assert "as good as exact speculation, and faster" in html


def verdict_of(claim, found):
    (one,) = [c for c in STUDY.claims if claim in c.text]
    return one.check(found).holds


def found_with(costs=(), reports=None):
    arms = arms_of(STUDY.run(StudyOptions(), DRAFTERS))
    reports = reports or [SimpleNamespace(condition=arm.name) for arm in arms]
    return Found("task", arms, reports, costs, object())


def lead(name, difference, large="plain"):
    at = difference and AtEqualSpeed(1e-7, *difference)
    return EqualCost("task", name, allocation_from(large), None, at)


NAMES = [
    arm.name
    for arm in arms_of(STUDY.run(StudyOptions(), DRAFTERS))
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
        EqualCost("task", name, "random", AtEqualSpeed(10.0, *difference), None)
        for name, difference in zip(NAMES, differences, strict=False)
    ]
    assert verdict_of("than chance", found_with(costs)) == holds


@pytest.mark.parametrize(("differences", "holds"), LEADS)
def test_divergences_against_a_random_allocation(differences, holds):
    leads = [lead(*of) for of in zip(NAMES, differences, strict=False)]
    # The line from exact speculation does not count, nor does another divergence.
    worse = -0.5, -0.6, -0.4
    leads += [lead(NAMES[0], worse, "exact"), lead("fuzzy KL, T = 0.8", worse)]
    assert verdict_of("random allocation", found_with(leads)) == holds


def test_a_threshold_slower_than_plain_decoding_leaves_it_open():
    leads = [lead(NAMES[0], (0.02, 0.01, 0.03)), lead(NAMES[1], None)]
    assert verdict_of("random allocation", found_with(leads[:1])) is True
    assert verdict_of("random allocation", found_with(leads)) is None


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
def test_as_good_and_faster(monkeypatch, speed, loss, problems, holds):
    monkeypatch.setattr(fuzzy, "score_difference", lambda *_: Interval(*loss))

    def report(arm):
        own = Interval(speed, speed - 0.05, speed + 0.05)
        return SimpleNamespace(
            condition=arm.name,
            problems=problems,
            speed=speed,
            speed_ratio=None if arm.name == "exact" else own,
        )

    arms = arms_of(STUDY.run(StudyOptions(), DRAFTERS))
    found = found_with(reports=[report(arm) for arm in arms])
    assert verdict_of("as good as", found) == holds

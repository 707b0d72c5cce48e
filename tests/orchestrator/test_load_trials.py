"""Concurrent generations draft only if that makes all of them together faster."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from flyspec.values.admin import MeasuredStep
from flyspec.values.rounds import DraftChunk, Verdict
from orchestrator.generation.adaptive import AdaptivePace
from orchestrator.generation.experience import Experience
from orchestrator.generation.load_trials import FIRST_REST, LoadTrials
from orchestrator.generation.pace import CheckedRound
from tests.orchestrator.simulation import MS


class World:
    """`running` generations that take 5 ms for a plain token and `gain` times less with drafts.

    For 100 ms at a time all are faster or slower by up to `noise`, as on a machine that is shared.
    """

    def __init__(self, running: int, gain: float, noise: float = 0.1) -> None:
        self.trials, self.running, self.gain, self.noise = LoadTrials(), running, gain, noise
        self._random = random.Random(7)

    def run(self, seconds: float) -> tuple[float, float]:
        """Tokens per second relative to plain decoding's, and the share of drafted tokens."""
        spent_ns, tokens, drafted, pace = 0.0, 0, 0, 1.0
        trial = self.trials.at(self.running)
        assert trial is not None
        while spent_ns < seconds * 1e9:
            drafts = trial.drafts
            usual_ns = 5 * MS / (self.gain if drafts else 1.0)
            if not tokens % 20:
                pace = self._random.uniform(1 - self.noise, 1 + self.noise)
            round_ns = usual_ns * pace
            for _ in range(self.running):
                trial.emitted(1, round_ns, self.running, 5 * MS)
            spent_ns, tokens, drafted = spent_ns + round_ns, tokens + 1, drafted + drafts
        return tokens * 5 * MS / spent_ns, drafted / tokens


@pytest.mark.parametrize("running", [2, 7, 32])
@pytest.mark.parametrize("gain", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("noise", [0.1, 0.4])
def test_where_drafting_slows_everybody_down_it_is_hardly_tried(running, gain, noise):
    world = World(running, gain, noise)
    speed, drafted = world.run(60)
    assert speed > 0.96
    assert drafted < (0.08 if noise < 0.2 else 0.15)
    speed, drafted = world.run(300)  # and ever more seldom
    assert speed > 0.99
    assert drafted < 0.02


@pytest.mark.parametrize("running", [2, 7, 32])
@pytest.mark.parametrize("gain", [1.2, 2.5])
def test_where_everybody_gets_faster_all_draft(running, gain):
    world = World(running, gain)
    world.run(60)  # more are tried later
    speed, drafted = world.run(60)
    assert speed > 1 + 0.8 * (gain - 1)
    assert drafted > 0.8


def test_what_was_found_is_given_up_when_it_no_longer_holds():
    world = World(4, 2.0)
    assert world.run(30)[1] > 0.8
    world.gain = 0.6
    world.run(10)
    assert world.run(60)[1] < 0.08
    world.gain = 2.0
    world.run(60)
    assert world.run(30)[1] > 0.8


def test_every_level_of_load_is_found_out_by_itself_and_one_alone_is_free():
    trials = LoadTrials()
    assert trials.at(0) is trials.at(1) is None
    assert trials.at(2) is trials.at(3) is not trials.at(4)
    assert trials.at(4) is trials.at(7) is not trials.at(8)


def test_a_generation_neither_drafts_nor_asks_while_others_decode_plainly():
    experience = Experience([MeasuredStep(1, 5 * MS)])
    pace = AdaptivePace(experience, "d", "exact", 8)
    plain = CheckedRound(DraftChunk(), Verdict(0, 1), 1, 5 * MS)
    with ExitStack() as others:
        for _ in range(2):
            others.enter_context(experience.shared())
        assert not experience.may_draft
        for _ in range(3):
            pace.checked(plain)
            assert not pace.turn().num_drafts
            assert not pace.follows(1000)
        while not experience.may_draft:
            pace.checked(plain)
        assert pace.follows(1000)


def test_who_is_alone_for_a_moment_is_still_among_others():
    experience = Experience([MeasuredStep(1, 5 * MS)])
    with experience.shared():
        assert experience.may_draft  # alone from the start
        with experience.shared():
            assert not experience.may_draft
        experience.emitted(20, 100 * MS)
        assert not experience.may_draft
    with experience.shared():  # another one behind it is alone as well
        experience.emitted(20, 100 * MS)
        assert experience.may_draft
        with experience.shared():
            assert not experience.may_draft


def test_what_does_not_pay_for_fewer_is_tried_later_with_more():
    world = World(2, 0.6)
    world.run(60)
    trials, fewer = world.trials, world.trials.at(2)
    assert fewer is not None
    assert fewer.rest > 2 * FIRST_REST
    more = trials.at(4)
    assert more is not None
    assert more.rest == fewer.rest


def test_more_generations_are_tried_later():
    rests = [trial.rest for n in (2, 4, 8, 16, 32, 64, 500) if (trial := LoadTrials().at(n))]
    assert rests == [16, 32, 64, 128, 256, 512, 512]

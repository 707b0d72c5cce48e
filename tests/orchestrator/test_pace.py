"""Draft lengths of rounds: the Ks of an earlier run, and adaptive K."""

from __future__ import annotations

import itertools
import math
import random
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyspec.rules import Rule
from flyspec.rules.resolve import resolve_rule
from flyspec.rules.room import Room
from flyspec.values.admin import MeasuredStep
from flyspec.values.rounds import (
    Decision,
    DraftChunk,
    DraftTimings,
    Outcome,
    Verdict,
    VerifyTimings,
)
from flyspec.values.tokens import Origin
from orchestrator.generation.following import Overtaken
from orchestrator.generation.pace import (
    CheckedRound,
    FirstToken,
    FixedPace,
    NextRound,
    RepeatedPace,
)
from orchestrator.pace.acceptance import Acceptance, SharedAcceptance
from orchestrator.pace.costs import Costs as MeasuredCosts
from orchestrator.pace.policy import MAX_LOSS, MAX_TEXT_LOSS, AdaptivePace, Experience
from tests.examples import examples
from tests.orchestrator.fakes import plan_of
from tests.orchestrator.simulation import MS, Costs, Simulation
from verify_service.rules.window import Window, WindowWalk

MOST = 16
EXACT, REJECTED = Decision(Outcome.EXACT), Decision(Outcome.REJECTED, 1, None, 1.0)


def plain(count: int) -> CheckedRound:
    return CheckedRound(DraftChunk(), Verdict(0, 1, plain_token_ids=(2,) * (count - 1)), count, MS)


def drafted(k: int, accepted: int, round_ns: int = 10 * MS, **proposal) -> CheckedRound:
    decisions = [EXACT] * accepted + [REJECTED] * (accepted < k)
    decisions += [Decision(Outcome.NOT_REACHED)] * (k - len(decisions))
    origins = [Origin.EXACT_MODEL] * k
    chunk = DraftChunk(token_ids=[1] * k, origins=origins, drafter="model", **proposal)
    return CheckedRound(chunk, Verdict(accepted, 1, tuple(decisions)), accepted + 1, round_ns)


def pace_of(
    experience: Experience,
    rule: str = "exact",
    most: int = MOST,
    tokens: int = 1000,
    size: float = 0.3,
    seed: int = 0,
) -> AdaptivePace:
    judged_k = 15 if rule == "fly" else 0
    plan = plan_of(
        rule=resolve_rule(Rule(rule)), judged_k=judged_k, num_speculative_tokens=most,
        max_tokens=tokens, seed=seed,
    )  # fmt: skip
    return AdaptivePace(experience, plan, "model", FirstToken(size, 100))


# --- an earlier run -------------------------------------------------------------------------


@given(ks=st.lists(st.sampled_from([0, 0, 0, 1, 3, 7]), min_size=1, max_size=30), data=st.data())
def test_what_was_recorded_is_repeated(ks, data):
    """Whatever the verdicts accept, and however many plain tokens each has."""
    rest = FixedPace(5, at_once=True)
    pace, left = RepeatedPace(ks, rest, "model"), list(ks)
    while left:
        turn = pace.turn()
        assert turn == pace.turn()
        assert pace.follows() == 0
        assert pace.survivals(drafted(3, 1).proposal) == ()
        assert (turn.num_drafts, turn.min_confidence, turn.patience_ns) == (left[0], 0.0, None)
        if turn.num_drafts:
            pace.checked(drafted(left.pop(0), data.draw(st.integers(0, turn.num_drafts))))
            continue
        run = next((i for i, k in enumerate(left) if k), len(left))
        assert turn.max_plain_tokens == run
        count = data.draw(st.integers(1, run))
        pace.checked(plain(count))
        del left[:count]
    assert pace.turn() == rest.turn() == NextRound(5)
    assert pace.num_unrepeated == 0


def test_rounds_with_other_drafts_than_recorded_are_counted():
    pace = RepeatedPace([3, 3, 0, 3, 3], FixedPace(5), "model")
    pace.checked(drafted(3, 1))
    pace.checked(drafted(2, 2))
    assert pace.num_unrepeated == 1
    pace.window_failed()
    assert pace.num_unrepeated == 1
    pace.checked(plain(1))
    other = drafted(3, 3)
    pace.checked(other._replace(proposal=replace(other.proposal, drafter="another")))
    assert pace.num_unrepeated == 3
    pace.checked(other)
    assert pace.num_unrepeated == 3


# --- the first token ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("relative_size", "prompt_length", "k", "delayed"),
    [
        (0.0, 5000, 15, False),  # prompt lookup
        (0.1, 100, 15, True),
        (0.1, 100, 1, False),
        (0.012, 100, 15, False),
        (0.012, 513, 15, True),
        (1.0, 1, 1, True),
    ],
)
def test_a_quick_drafter_drafts_from_the_first_token_on(relative_size, prompt_length, k, delayed):
    first = FirstToken(relative_size, prompt_length)
    assert first.is_delayed(k) == delayed
    pace = FixedPace(k, at_once=not delayed)
    if delayed:
        assert (pace.turn(), pace.follows()) == (NextRound(0, max_plain_tokens=1), k)
        pace.checked(plain(1))
    assert (pace.turn(), pace.follows()) == (NextRound(k), 0)


def test_behind_an_earlier_run_k_adapts():
    rest = pace_of(Experience([MeasuredStep(1, 10 * MS)]))
    pace = RepeatedPace([2, 0], rest, "model")
    pace.checked(drafted(2, 2))
    pace.nothing_drafted()
    pace.checked(plain(1))
    assert pace.turn() == rest.turn()
    assert rest.turn().num_drafts == 0


# --- acceptance -----------------------------------------------------------------------------


@given(st.integers(0, 8), st.integers(0, 16), st.integers(1, 40), st.floats(0, 1), st.floats(0, 1))
def test_the_expected_number_of_accepted_drafts_is_that_of_the_rule(
    reach, length, most, equal, loosened
):
    """Here drafts are followed one by one, for each K."""
    room = Room(reach, max(reach, length) if reach and length else 0)
    shared = SharedAcceptance(True, most)
    shared.matches.observe(1000 * equal, 1.0, 1000)
    shared._loosened.held = shared._loosened.seen * loosened
    acceptance = Acceptance(shared)
    chances = acceptance.equal(most)
    for k, number in enumerate(acceptance.accepted(most, room), 1):
        chance, expected = 1.0, 0.0
        for index in range(k):
            chance *= chances[index] + (1 - chances[index]) * loosened * room.at(index, k)
            expected += chance
        assert number == pytest.approx(expected)


@given(st.integers(0, 8), st.integers(0, 15), st.integers(1, 32), st.data())
def test_room_is_where_the_targets_window_closes(reach, length, k, data):
    index = data.draw(st.integers(0, k - 1))
    walk = WindowWalk([Window(reach, reach)] * k, 0, [True] * k, length)
    if reach and not walk.is_bonus(index):
        assert Room(reach, length).at(index, k) == walk.allows(index)


def test_a_lossy_rule_is_learnt_where_its_window_has_room():
    room, loose = Room(2, 0), Decision(Outcome.LOOSE, 1, None, 1.0)
    shared = SharedAcceptance(True, MOST)
    begun = shared.loosened()
    for _ in range(100):
        shared.checked([EXACT, REJECTED], (), room)
    assert shared.loosened() == begun
    for _ in range(100):
        shared.checked([loose, EXACT, EXACT], (), room)
    assert shared.loosened() > 0.9


# --- times ----------------------------------------------------------------------------------


def test_plain_tokens_that_arrive_together_count_each():
    """Else those that arrive alone, later, would make plain decoding look slow."""
    costs = MeasuredCosts([MeasuredStep(1, 2 * MS)])
    for _ in range(100):
        costs.decoded(1, 5 * MS)
        costs.decoded(4, 5 * MS)
    assert costs.plain_ns() == pytest.approx(2 * MS, rel=0.1)


def test_drafts_are_charged_for_what_they_delay_others():
    costs = MeasuredCosts([MeasuredStep(1, 10 * MS), MeasuredStep(9, 18 * MS)])
    assert costs.plain_ns() == 10 * MS

    def delay() -> float:
        return costs.round_ns("model", 0.0, 4) - costs.round_ns("model", 0.0, 0)

    alone = delay()
    with costs.shared(), costs.shared(), costs.shared():
        assert costs.running == 3
        # Each of its rows holds up two others.
        assert delay() == pytest.approx(3 * alone)
    assert (costs.running, alone) == (0, pytest.approx(4 * MS))


# --- simulated texts ------------------------------------------------------------------------


def steady(agreement: float):
    return lambda position: agreement


def texts_of(costs, agreements, count, tokens=300, confident=False, rule="exact"):
    """Return texts' simulations, run one after the other by one orchestrator.

    `costs` are those of all texts, or of each.
    """
    experience, texts = None, []
    for number in range(count):
        now = costs if isinstance(costs, Costs) else costs[number]
        agreement = steady(agreements[number % len(agreements)])
        simulation = Simulation(now, agreement, number, confident)
        experience = experience or simulation.experience()
        with experience.costs.shared():
            pace = pace_of(experience, rule, tokens=tokens, size=0.1, seed=number)
            simulation.run(pace, tokens)
            pace.close()
        texts.append(simulation)
    return texts


def drafted_share(text: Simulation) -> float:
    return text.spent[0].drafted / text.position


def token_ns(text: Simulation) -> float:
    return (text.now_ns - text.costs.prompt_ns) / (text.position - 1)


PAYS = [
    (Costs(), 0.9),
    (Costs(), 0.7),
    (Costs(draft_ns=3 * MS), 0.9),
    (Costs(hop_ns=3 * MS), 0.85),
    (Costs(step_ns=2 * MS, row_ns=20_000, draft_ns=200_000, hop_ns=300_000), 0.8),
    (Costs(step_ns=176 * MS, row_ns=8 * MS, draft_ns=26 * MS, hop_ns=10 * MS), 0.8),
]


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize(("costs", "agreement"), PAYS)
def test_it_drafts_where_that_pays(costs, agreement, confident):
    best_ns = costs.best_ns(agreement, MOST)
    assert best_ns < 0.9 * costs.step_ns
    texts = texts_of(costs, [agreement], 12, confident=confident)[2:]
    took = sum(map(token_ns, texts)) / len(texts)
    assert took < best_ns + 0.15 * (costs.step_ns - best_ns)
    assert min(map(drafted_share, texts)) > 0.6


PAYS_NOT = [
    (Costs(), 0.05),
    (Costs(draft_ns=8 * MS), 0.6),
    (Costs(draft_ns=10 * MS), 0.95),
    (Costs(hop_ns=100 * MS), 0.9),
    (Costs(row_ns=10 * MS), 0.8),
    (Costs(step_ns=2 * MS, row_ns=20_000, draft_ns=1 * MS, hop_ns=2 * MS), 0.5),
]


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize(("costs", "agreement"), PAYS_NOT)
def test_where_drafts_do_not_pay_it_is_as_fast_as_plain_decoding(costs, agreement, confident):
    assert costs.best_ns(agreement, MOST) > 0.98 * costs.step_ns
    texts = texts_of(costs, [agreement], 12, confident=confident)
    took = [token_ns(text) / costs.step_ns for text in texts]
    assert took[0] < 1 + 2 * MAX_TEXT_LOSS  # its times are not known
    assert max(took[1:]) < 1 + MAX_TEXT_LOSS + 0.01  # a round may take longer than expected
    assert sum(took) / len(took) < 1 + MAX_LOSS + MAX_TEXT_LOSS / len(took) + 0.005


def test_each_text_is_drafted_as_it_deserves():
    texts = texts_of(Costs(), [0.95, 0.05], 40)[10:]
    shares = [*map(drafted_share, texts)]
    assert sum(shares[::2]) / 15 > 0.8
    assert sum(shares[1::2]) / 15 < 0.2


def test_it_follows_a_text_that_changes():
    costs, half = Costs(), 500
    shares = [[], []]
    for seed in range(5):
        simulation = Simulation(costs, lambda i: 0.92 if i // half % 2 == 0 else 0.03, seed)
        pace = pace_of(simulation.experience(), tokens=6 * half, size=0.1, seed=seed)
        for number in range(6):
            spent = simulation.run(pace, half - (simulation.position - number * half))
            shares[number % 2].append(spent.drafted / spent.tokens)
    assert sum(shares[0]) / 15 > 0.5
    assert sum(shares[1]) / 15 < 0.2


def test_a_drafter_that_becomes_slow_is_given_up():
    texts = texts_of([Costs()] * 3 + [Costs(draft_ns=40 * MS)] * 5, [0.9], 8)
    assert min(map(drafted_share, texts[:3])) > 0.6
    assert max(map(drafted_share, texts[4:])) < 0.2


BUSY = [
    Costs(draft_ns=40 * MS),
    Costs(hop_ns=10_000 * MS),  # does not answer while the text lasts
    Costs(step_ns=30 * MS, row_ns=300_000, draft_ns=10 * MS, hop_ns=10 * MS),
]


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("busy", BUSY)
def test_it_drafts_again_once_the_machine_is_no_longer_busy(busy, before):
    texts = texts_of([Costs()] * before + [busy] * 5 + [Costs()] * 8, [0.9], before + 13)
    assert min(map(drafted_share, texts[before + 8 :])) > 0.6


def test_drafts_that_come_too_late_but_would_pay_are_waited_for():
    slow = Costs(draft_ns=3 * MS)
    texts = texts_of([Costs(draft_ns=100_000)] * 3 + [slow] * 6, [0.98], 9)[4:]
    took = sum(map(token_ns, texts)) / len(texts)
    assert took < 1.15 * slow.best_ns(0.98, MOST) < 0.5 * slow.step_ns
    assert min(map(drafted_share, texts)) > 0.9


class Crowd:
    """Generations in step that take 5 ms for a plain token, all of them longer the more draft.

    If all draft, they take `slower` times as long for rounds of four drafts, and emit `gain` times
    as many tokens as steps.
    """

    def __init__(self, running: int, slower: float, gain: float) -> None:
        self.experience = Experience([MeasuredStep(1, 5 * MS), MeasuredStep(64, 5 * MS)])
        self.running, self.slower, self.gain = running, slower, gain
        self._noise = random.Random(7)

    def run(self, num_steps: int, length: int = 100) -> float:
        """Return tokens per step's time of plain decoding."""
        spent_ns = tokens = texts = 0
        with ExitStack() as stack:
            for _ in range(self.running):
                stack.enter_context(self.experience.costs.shared())
            paces, lengths = [], []
            for number in range(self.running):
                paces.append(pace_of(self.experience, most=4, tokens=length, seed=number))
                lengths.append(length * number // self.running)
            for _ in range(num_steps):
                turns = [pace.turn() for pace in paces]
                drafting = sum(turn.num_drafts > 0 for turn in turns)
                slower = 1 + (self.slower - 1) * drafting / self.running
                round_ns = int(5 * MS * slower * self._noise.uniform(0.9, 1.1))
                spent_ns += round_ns
                for index, (pace, turn) in enumerate(zip(paces, turns, strict=True)):
                    emitted = 1
                    if turn.num_drafts:
                        k = turn.num_drafts
                        accepted = min(k, int(self.gain - 1 + self._noise.random()))
                        emitted += accepted
                        pace.checked(drafted(k, accepted, round_ns)._replace(
                            num_emitted=emitted))  # fmt: skip
                    else:
                        pace.checked(plain(1)._replace(round_ns=round_ns))
                        if pace.follows():
                            proposal = DraftChunk(token_ids=[1] * 4, drafter="model")
                            pace.followed(Overtaken(proposal, 1, 1, round_ns))
                    tokens, lengths[index] = tokens + emitted, lengths[index] + emitted
                    if lengths[index] >= length:
                        pace.close()
                        texts += 1
                        paces[index] = pace_of(
                            self.experience, most=4, tokens=length, seed=100 + texts
                        )
                        lengths[index] = 0
            for pace in paces:
                pace.close()
        return tokens / self.running * 5 * MS / spent_ns


RUNNING_AND_STEPS = [(2, 1000), (7, 300), (32, 300)]


@pytest.mark.parametrize(("running", "steps"), RUNNING_AND_STEPS)
def test_where_drafting_slows_everybody_down_nobody_drafts(running, steps):
    """Though each of them would gain by it."""
    crowd = Crowd(running, slower=3.0, gain=2.0)
    crowd.run(steps)
    assert crowd.run(steps) > 0.96


@pytest.mark.parametrize(("running", "steps"), RUNNING_AND_STEPS)
def test_where_everybody_gets_faster_all_draft(running, steps):
    crowd = Crowd(running, slower=1.2, gain=2.4)
    crowd.run(steps)
    assert crowd.run(steps) > 1.7


def test_a_token_that_waited_for_anothers_drafter_is_charged_and_not_learned():
    """Also if the drafter has answered before the token arrives."""
    experience = Experience([MeasuredStep(1, 10 * MS), MeasuredStep(9, 11 * MS)])
    token, other = plain(1)._replace(round_ns=10 * MS), pace_of(experience, most=0)
    other.checked(token)
    seeds = itertools.count()
    while not (asking := pace_of(experience, size=0.1, seed=next(seeds))).follows():
        asking.close()
    asking.followed(Overtaken(DraftChunk(drafter="model"), 0, 0, MS))
    assert not experience.costs.drafting
    plain_ns = experience.costs.plain_ns()
    other.checked(token._replace(round_ns=50 * MS))
    assert experience.costs.plain_ns() == plain_ns
    assert other.saved_ns == pytest.approx(-40 * MS, rel=0.01)


# --- heads, windows, predictions ------------------------------------------------------------


def test_a_window_that_failed_without_a_draft_checked_is_no_plain_decoding():
    simulation = Simulation(Costs(prompt_ns=0), steady(0.9))
    experience = simulation.experience()
    pace = pace_of(experience, "margin")
    simulation.run(pace, 300)
    plain_ns = experience.costs.plain_ns()
    pace.checked(CheckedRound(DraftChunk(), Verdict(4, 1, start_length=8), -4, 12 * MS))
    assert experience.costs.plain_ns() == plain_ns


def test_heads_go_on_by_themselves_only_where_a_generation_is_alone():
    experience = Experience([MeasuredStep(1, 10 * MS), MeasuredStep(9, 11 * MS)])
    pace = pace_of(experience, size=0.0)
    while not pace.turn().num_drafts:
        pace.checked(plain(1)._replace(round_ns=10 * MS))
        if k := pace.follows():
            pace.followed(Overtaken(DraftChunk(token_ids=[1] * k, drafter="model"), 1, 1, MS))
    assert pace.lets_go_on
    with experience.costs.shared(), experience.costs.shared():
        assert not pace.lets_go_on


# --- odd values -----------------------------------------------------------------------------

NS = st.sampled_from([0, 1, MS, 10 * MS, 10**12])
SHARES = st.sampled_from([0.0, 1e-30, 0.1, 0.5, 0.99, 1.0])


@st.composite
def happenings(draw, k):
    """The possible outcomes of a turn of K drafts."""
    timings = DraftTimings(draw(NS), draw(NS), draw(NS))
    verify = VerifyTimings(forward_ns=draw(NS))
    if not k or draw(st.booleans()):
        count = draw(st.integers(1, 8))
        verdict = Verdict(0, 1, timings=verify, plain_token_ids=(1,) * (count - 1))
        return CheckedRound(DraftChunk(), verdict, count, draw(NS))
    count = draw(st.integers(1, k))
    confidences = draw(st.sampled_from([(), [draw(SHARES) for _ in range(count)]]))
    round_ = drafted(
        count, draw(st.integers(0, count)), draw(NS), timings=timings, confidences=confidences
    )
    verdict, emitted = round_.verdict, round_.num_emitted
    if draw(st.sampled_from([False, False, True])):  # a window failed
        left_out = draw(st.booleans())  # all of the drafts, by a target with too much to do
        verdict = Verdict(0, 1, () if left_out else verdict.decisions, start_length=5)
        emitted = draw(st.integers(-6, 0))
    verdict = Verdict(*[getattr(verdict, n) for n in ("keep_length", "next_token_id", "decisions")],
                      start_length=verdict.start_length, timings=verify)  # fmt: skip
    return CheckedRound(round_.proposal, verdict, emitted, round_.round_ns)


@given(
    data=st.data(),
    most=st.sampled_from([1, 4, 32]),
    costs=st.lists(NS, max_size=4),
    running=st.sampled_from([0, 1, 3, 300]),
)
@settings(max_examples=examples(100))
def test_odd_values_are_survived(data, most, costs, running):
    steps = [MeasuredStep(2**i, ns) for i, ns in enumerate(sorted(costs))]
    experience = Experience(steps)
    experience.costs.running = running
    pace = pace_of(experience, "fly", most)
    for _ in range(data.draw(st.integers(1, 12))):
        turn = pace.turn()
        assert 0 <= turn.num_drafts <= most
        assert 0 <= turn.min_confidence <= 1
        assert turn.patience_ns is None or turn.patience_ns >= 0
        happening = data.draw(st.sampled_from(["checked", "follows", "nothing"]))
        if happening == "checked":
            round_ = data.draw(happenings(turn.num_drafts))
            survivals = list(pace.survivals(round_.proposal))
            assert len(survivals) == len(round_.proposal.token_ids)
            chances = zip([1.0, *survivals], survivals, strict=False)
            assert all(0 <= b <= a <= 1 for a, b in chances)
            pace.checked(round_)
        elif happening == "follows":
            if k := pace.follows():
                assert 1 <= k <= most
                count, timings = data.draw(st.integers(0, k)), DraftTimings(0, *data.draw(
                    st.tuples(NS, NS)))  # fmt: skip
                agreements = data.draw(st.lists(st.booleans(), max_size=8))
                proposal = DraftChunk(
                    token_ids=[1] * count, timings=timings, agreements=agreements, drafter="model"
                )
                matched = data.draw(st.integers(0, count))
                pace.followed(Overtaken(proposal, matched, count, data.draw(NS)))
        elif turn.num_drafts:
            pace.nothing_drafted()
            assert not pace.turn().num_drafts
        assert isinstance(pace.saved_ns, int)
        assert math.isfinite(pace.saved_ns)

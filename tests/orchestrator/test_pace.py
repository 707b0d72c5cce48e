"""How many tokens rounds draft: the Ks of an earlier run, and adaptive K."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from orchestrator.generation.acceptance import Acceptance, SharedAcceptance
from orchestrator.generation.adaptive import (
    FOLLOWING_SHARE,
    AdaptivePace,
)
from orchestrator.generation.beginning import SAMPLE_TOKENS
from orchestrator.generation.experience import (
    KNOWN,
    PLAIN_EVERY,
    START_ALLOWANCE_NS,
    TRIAL_ROUNDS,
    AtOnce,
    DrafterExperience,
    Experience,
)
from orchestrator.generation.following import FOLLOWING_DRAFTS, Overtaken
from orchestrator.generation.pace import (
    CheckedRound,
    FirstToken,
    FixedPace,
    NextRound,
    RepeatedPace,
)
from orchestrator.generation.queries import FIRST_REST, FOLLOWING_COST_NS, SELDOM
from tests.examples import examples
from tests.orchestrator.simulation import MS, Costs, Simulation
from verify_service.rules.window import Window, WindowWalk

MOST = 16
EXACT, REJECTED = Decision(Outcome.EXACT), Decision(Outcome.REJECTED, 1, None, 1.0)


def plain(count: int) -> CheckedRound:
    return CheckedRound(DraftChunk(), Verdict(0, 1, plain_token_ids=(2,) * (count - 1)), count, MS)


def drafted(k: int, accepted: int, round_ns: int = 10 * MS, **proposal) -> CheckedRound:
    decisions = [EXACT] * accepted + [REJECTED] * (accepted < k)
    decisions += [Decision(Outcome.NOT_REACHED)] * (k - len(decisions))
    chunk = DraftChunk(token_ids=[1] * k, origins=[Origin.EXACT_MODEL] * k, drafter="d", **proposal)
    return CheckedRound(chunk, Verdict(accepted, 1, tuple(decisions)), accepted + 1, round_ns)


def after_trial(experience: Experience) -> Experience:
    """Return the experience of an orchestrator for which drafter "d" was too slow at first."""
    for _ in range(TRIAL_ROUNDS):
        experience.with_drafter("d", "exact").tried(-math.inf, MS)
    return experience


# --- an earlier run -------------------------------------------------------------------------


@given(
    ks=st.lists(st.sampled_from([0, 0, 0, 1, 3, 7]), min_size=1, max_size=30),
    data=st.data(),
)
def test_what_was_recorded_is_repeated(ks, data):
    """Whatever the verdicts accept, and however many plain tokens each has."""
    rest = FixedPace(5, at_once=True)
    pace, left = RepeatedPace(ks, rest, "d"), list(ks)
    while left:
        turn = pace.turn()
        assert turn == pace.turn()
        assert pace.follows(data.draw(st.integers(0, 100))) == 0
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
    pace = RepeatedPace([3, 3, 0, 3, 3], FixedPace(5), "d")
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
        assert (pace.turn(), pace.follows(0)) == (NextRound(0, max_plain_tokens=1), k)
        pace.checked(plain(1))
    assert (pace.turn(), pace.follows(0)) == (NextRound(k), 0)


def test_behind_an_earlier_run_k_adapts():
    rest = AdaptivePace(Experience([MeasuredStep(1, 10 * MS)]), "d", "exact", MOST)
    pace = RepeatedPace([2, 0], rest, "d")
    pace.checked(drafted(2, 2))
    pace.nothing_drafted()
    pace.checked(plain(1))
    assert pace.turn() == rest.turn()
    assert rest.turn().num_drafts == 0
    assert pace.follows(100) == rest.follows(100) > 0


# --- what is learnt -------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(1, MOST), st.integers(0, MOST)).map(lambda t: (t[0], min(t))),
        max_size=60,
    ),
    st.floats(0, 1),
)
def test_survivals_are_chances_that_never_rise(rounds, prior):
    others = SharedAcceptance(prior, MOST)
    acceptance = Acceptance(others, MOST)
    for k, accepted in rounds:
        acceptance.checked(k, accepted)
        acceptance.followed([True] * accepted + [False])
        others.checked(k, accepted)
        assert 0 <= acceptance.mean <= 1
        survivals = acceptance.survivals(MOST)
        assert len(survivals) == MOST
        assert all(0 <= b <= a <= 1 for a, b in zip([1.0, *survivals], survivals, strict=False))


def test_survivals_come_to_what_is_accepted():
    """Here 3 of 4 are accepted at the first position, and half of those at the second."""
    acceptance = Acceptance(SharedAcceptance(0.6, 4), 4)
    for accepted in [0, 1, 1, 2, 3, 0, 2, 1] * 100:
        acceptance.checked(3, accepted)
    first, second, third, _ = acceptance.survivals(4)
    assert first == pytest.approx(6 / 8, abs=0.1)
    assert second == pytest.approx(3 / 8, abs=0.1)
    assert third == pytest.approx(1 / 8, abs=0.1)


def test_a_drafter_that_is_too_sure_of_itself_is_believed_less():
    for rate, sure in ((0.5, 0.9), (0.9, 0.5)):
        drafter = DrafterExperience()
        for number in range(600):
            accepted = int((number + 1) * rate * 4) - int(number * rate * 4)
            verdict = drafted(4, min(4, accepted)).verdict
            drafter.checked(DraftChunk(token_ids=[1] * 4, confidences=[sure] * 4), verdict, MS)
        expected = sum(drafter.survivals([sure] * 4))
        assert expected == pytest.approx(rate * 4, rel=0.15)


def test_generations_share_what_they_learn():
    experience = Experience([MeasuredStep(1, 10 * MS), MeasuredStep(9, 18 * MS)])
    assert experience.plain_ns == 10 * MS
    assert experience.verify_ns(8) == pytest.approx(18 * MS)
    for _ in range(800):
        experience.decoded(2, 40 * MS)
    assert experience.plain_ns == pytest.approx(20 * MS)
    alone = experience.verify_ns(4)
    with experience.shared(), experience.shared(), experience.shared():
        assert experience.running == 3
        # Each of its rows holds up two others.
        assert experience.verify_ns(4) - experience.verify_ns(0) == pytest.approx(3 * 4 * MS)
    assert (experience.running, experience.verify_ns(4)) == (0, alone)


@given(st.integers(0, 8), st.integers(0, 15), st.integers(1, 32), st.data())
def test_room_is_where_the_targets_window_closes(reach, length, k, data):
    index = data.draw(st.integers(0, k - 1))
    walk = WindowWalk([Window(reach, reach)] * k, 0, [True] * k, length)
    if reach and not walk.is_bonus(index):
        assert Room(reach, length).at(index, k) == walk.allows(index)


def test_what_a_window_had_no_room_for_says_nothing_of_longer_rounds():
    """Every other draft matches, and the others may stand where 6 places follow."""
    ks = {}
    for room in (Room(6), Room()):
        experience = Experience([MeasuredStep(1, 10 * MS), MeasuredStep(33, 14 * MS)])
        pace = AdaptivePace(experience, "d", "fly", 32, room=room)
        pace.checked(plain(1)._replace(round_ns=10 * MS))
        loose = Decision(Outcome.LOOSE, 2, gap_nats=0.1)
        for _ in range(200):
            k = pace.turn().num_drafts or 8
            accepted = max(0, k - 6)
            outcomes = ([EXACT, loose] * k)[:accepted] + [REJECTED] * (accepted < k)
            outcomes += [Decision(Outcome.NOT_REACHED)] * (k - len(outcomes))
            chunk = DraftChunk(token_ids=[1] * k, origins=[Origin.EXACT_MODEL] * k, drafter="d")
            verdict = Verdict(accepted, 1, tuple(outcomes))
            pace.checked(CheckedRound(chunk, verdict, accepted + 1, 14 * MS))
        ks[room] = pace.turn().num_drafts
    assert ks[Room(6)] > 24 > ks[Room()]


@pytest.mark.parametrize("step_ns", [MS // 2, 10 * MS, 100 * MS])
def test_a_new_drafter_is_tried_until_it_is_known_or_has_lost_too_much(step_ns):
    """In that time rounds draft, whether or not they save time, unless all are refused."""
    steps = [MeasuredStep(1, step_ns), MeasuredStep(32, 2 * step_ns)]
    tried = {}
    for accepted, num_steps in ((15, 8), (15, 30), (0, 2)):
        experience = Experience(steps)
        drafter = experience.with_drafter("d", "exact")
        pace = AdaptivePace(experience, "d", "exact", MOST)
        pace.checked(plain(1)._replace(round_ns=step_ns))
        trial = after = 0
        while pace.turn().num_drafts and trial + after < 20:
            timings = DraftTimings(0, step_ns // 2, step_ns // 2)
            trial, after = trial + drafter.is_on_trial, after + (not drafter.is_on_trial)
            pace.checked(drafted(15, accepted, num_steps * step_ns, timings=timings))
        assert (after == 20 - trial) if num_steps == 8 else (after < 8)
        assert drafter.allowance_ns >= START_ALLOWANCE_NS - 8 * 8 * step_ns, "trials cost nothing"
        tried[accepted, num_steps] = trial
        if not accepted:
            again = AdaptivePace(experience, "d", "exact", MOST)
            assert (again.turn(), again.follows(0)) == (NextRound(0), 0)
    assert tried[15, 8] == math.ceil(KNOWN / 15), "until it is known"
    assert tried[15, 30] <= TRIAL_ROUNDS, "until it has lost too much"
    assert tried[0, 2] < 12


def test_one_interrupted_round_does_not_end_drafting():
    experience = Experience([MeasuredStep(1, 10 * MS), MeasuredStep(32, 20 * MS)])
    ended = []
    for interrupted in (1, 6):
        pace = AdaptivePace(experience, "d", "exact", MOST)
        pace.checked(plain(1)._replace(round_ns=10 * MS))
        for _ in range(6):
            pace.checked(drafted(15, 15, 30 * MS, timings=DraftTimings(0, MS, MS)))
        assert pace.turn().num_drafts
        for _ in range(interrupted):
            pace.checked(drafted(15, 7, 900 * MS, timings=DraftTimings(0, MS, MS)))
        ended.append(not pace.turn().num_drafts)
    assert ended == [False, True]


def test_much_shorter_rounds_are_tried_before_drafting_ends():
    """What rounds of 15 drafts take says little of rounds of 4."""
    for row_ns, accepted in ((2 * MS, 4), (2 * MS, 0)):
        steps = [MeasuredStep(1, 10 * MS), MeasuredStep(32, 10 * MS + 31 * row_ns)]
        pace = AdaptivePace(after_trial(Experience(steps)), "d", "exact", MOST)
        pace.checked(plain(1)._replace(round_ns=10 * MS))
        pace._enter(15, 1.1 / (10 * MS))
        for _ in range(3):
            pace.checked(drafted(15, accepted, 100 * MS))
        assert bool(pace.turn().num_drafts) == bool(accepted)
        assert pace.turn().num_drafts < 9


def test_a_long_prompt_is_only_read_where_that_is_likely_to_pay_off():
    """The longer a text is already, the more of it is likely to follow."""
    experience = Experience([MeasuredStep(1, MS // 2), MeasuredStep(32, MS)])
    drafter = experience.with_drafter("d", "exact")
    first = AdaptivePace(experience, "d", "exact", MOST)
    for _ in range(8):
        first.checked(drafted(15, 15, 4 * MS, timings=DraftTimings(0, MS, MS)))
    assert drafter.is_known
    burst = Verdict(0, 1, plain_token_ids=(2,) * 39, plain_confidence=0.9)
    for prompt_length in (1, 1000):
        drafter.at_once._left_out = 1
        pace = AdaptivePace(experience, "d", "exact", MOST, FirstToken(1.0, prompt_length))
        pace.checked(plain(1))
        asked = []
        while len(asked) < 50 and not any(asked):
            pace.checked(CheckedRound(DraftChunk(), burst, 40, 20 * MS))
            asked.append(pace.follows(40) > 0)
        assert any(asked)
        assert (len(asked) > 4) == (prompt_length == 1000)


def test_an_interrupted_step_says_little_of_others():
    experience = Experience([MeasuredStep(1, 10 * MS), MeasuredStep(9, 18 * MS)])
    experience.decoded(1, 300 * MS)
    experience.stepped(1, 300 * MS)
    assert experience.plain_ns < 11 * MS
    assert experience.verify_ns(0) < 14 * MS
    experience.stepped(9, 400 * MS)
    assert experience.verify_ns(8) < 3 * 18 * MS


def test_a_round_that_asks_a_head_for_the_drafts_of_the_next_one_is_not_held_against_it():
    for asked_head in (True, False):
        experience = Experience([MeasuredStep(1, 10 * MS), MeasuredStep(32, 20 * MS)])
        pace = AdaptivePace(after_trial(experience), "d", "exact", MOST)
        for _ in range(4):
            pace.checked(plain(1)._replace(round_ns=10 * MS))
        assert pace.follows(64) > 0
        proposal = DraftChunk(token_ids=[1] * 8, drafter="d", agreements=[True] * 8)
        pace.followed(Overtaken(proposal, 8, 0, 10 * MS))
        assert pace.turn().num_drafts
        assert pace.lets_go_on
        pace.checked(plain(1)._replace(round_ns=400 * MS, asked_head=asked_head))
        assert bool(pace.turn().num_drafts) == asked_head


def test_heads_go_on_by_themselves_only_where_a_generation_is_alone():
    experience = Experience([MeasuredStep(1, 10 * MS), MeasuredStep(32, 20 * MS)])
    pace = AdaptivePace(experience, "d", "exact", MOST)
    assert not pace.lets_go_on, "it decodes plainly"
    pace.checked(plain(1)._replace(round_ns=10 * MS))
    pace.checked(drafted(8, 8, 20 * MS))
    with experience.shared():
        assert pace.lets_go_on
        with experience.shared():
            assert not pace.lets_go_on


# --- simulated texts ------------------------------------------------------------------------


def steady(agreement: float):
    return lambda position: agreement


def pace_of(simulation: Simulation, most: int = MOST) -> AdaptivePace:
    return AdaptivePace(simulation.experience(), "model", "exact", most)


PAYS = [
    (Costs(), 0.9),
    (Costs(), 0.7),
    (Costs(draft_ns=3 * MS), 0.9),
    (Costs(hop_ns=3 * MS), 0.85),
    (Costs(step_ns=2 * MS, row_ns=20_000, draft_ns=200_000, hop_ns=300_000), 0.8),
]


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize(("costs", "agreement"), PAYS)
def test_it_drafts_where_that_pays(costs, agreement, confident):
    best_ns = costs.best_ns(agreement, MOST)
    assert best_ns < 0.9 * costs.step_ns
    took = 0
    for seed in range(5):
        simulation = Simulation(costs, steady(agreement), seed, confident)
        pace = pace_of(simulation)
        simulation.run(pace, 100)
        spent = simulation.run(pace, 900)
        assert spent.drafted > 0.6 * spent.tokens
        took += spent.time_ns / spent.tokens
        assert pace.saved_ns > 0
    assert took / 5 < 1.15 * best_ns


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
    """An orchestrator's first text pays for its measurements."""
    assert costs.best_ns(agreement, MOST) > 0.98 * costs.step_ns
    took = [0.0, 0.0, 0.0]
    for seed in range(5):
        experience = Simulation(costs, steady(agreement)).experience()
        for number in range(3):
            simulation = Simulation(costs, steady(agreement), 3 * seed + number, confident)
            spent = simulation.run(AdaptivePace(experience, "model", "exact", MOST), 1000)
            allowed = START_ALLOWANCE_NS + FOLLOWING_SHARE * simulation.plain_ns
            assert sum(simulation.follows_ns[1:-1]) <= allowed  # the last one may be more
            took[number] += (simulation.now_ns - costs.prompt_ns) / spent.tokens / costs.step_ns / 5
    assert took[0] < 1.09
    assert max(took[1:]) < 1.03


def test_a_drafter_that_is_sure_of_itself_is_believed_at_once():
    """By its confidence, before there is any evidence; if that proves wrong, not for long."""
    drafted = []
    quick = Costs(step_ns=MS // 2, row_ns=5_000, draft_ns=50_000, hop_ns=50_000, prompt_ns=0)
    for agreement in (1.0, 0.0):
        simulation = Simulation(quick, steady(1.0), confident=True)
        pace = pace_of(simulation)
        simulation.agreement = steady(agreement)
        sure = [0.99] * 15
        assert pace.follows(FIRST_REST) == 15
        proposal = DraftChunk(token_ids=[7] * 15, confidences=sure, drafter="model")
        pace.followed(Overtaken(proposal, 1, 1, MS))
        assert pace.turn().num_drafts == 15
        drafted.append(simulation.run(pace, 100).drafted)
    assert drafted[0] > 90
    assert drafted[1] < 20


def test_it_follows_a_text_that_changes():
    costs, half = Costs(), 500
    shares, took = [[], []], 0
    for seed in range(5):
        simulation = Simulation(costs, lambda i: 0.92 if i // half % 2 == 0 else 0.03, seed)
        pace = pace_of(simulation)
        for number in range(6):
            spent = simulation.run(pace, half - (simulation.position - number * half))
            shares[number % 2].append(spent.drafted / spent.tokens)
            took += spent.time_ns
    assert min(shares[0]) > 0.5
    assert max(shares[1]) < 0.3
    # Each half at its best, but for what it takes to find out.
    best = 15 * half * (costs.best_ns(0.92, MOST) + costs.step_ns)
    assert took < 1.15 * best


@pytest.mark.parametrize("agreement", [0.9, 0.3])
def test_where_drafts_pay_the_next_text_is_drafted_from_its_second_token(agreement):
    costs = Costs()
    first = Simulation(costs, steady(agreement))
    experience = first.experience()
    pace = AdaptivePace(experience, "model", "exact", MOST)
    assert pace.turn() == NextRound(0, max_plain_tokens=1), "the drafter is on trial"
    assert pace.follows(0) == FOLLOWING_DRAFTS
    first.run(pace, 300)
    pace = AdaptivePace(experience, "model", "exact", MOST)
    if agreement < 0.5:
        assert (pace.turn(), pace.follows(0)) == (NextRound(0), 0)
        return
    assert pace.turn() == NextRound(0, max_plain_tokens=1)
    k = pace.follows(0)
    assert k > 0
    pace.checked(plain(1))
    assert pace.turn().num_drafts == k
    # A quick drafter drafts with the prompt, whose time counts for nothing.
    pace = AdaptivePace(experience, "model", "exact", MOST, FirstToken(0.001, 100))
    assert (pace.turn().num_drafts, pace.follows(0)) == (k, 0)
    plain_ns, verify_ns = experience.plain_ns, experience.verify_ns(k)
    pace.checked(drafted(k, k, round_ns=1000 * costs.step_ns))
    assert (pace.turn().num_drafts > 0, pace.saved_ns > 0) == (True, True)
    assert (experience.plain_ns, experience.verify_ns(k)) == (plain_ns, verify_ns)
    second = Simulation(costs, steady(agreement), seed=1)
    spent = second.run(AdaptivePace(experience, "model", "exact", MOST), 60)
    assert spent.drafted >= 59
    # A text that is not like them takes little longer than without.
    other = Simulation(costs, steady(0.05), seed=2)
    spent = other.run(AdaptivePace(experience, "model", "exact", MOST), 200)
    assert spent.drafted < 30
    assert other.now_ns - costs.prompt_ns < 1.25 * spent.tokens * costs.step_ns


def test_the_first_proposal_is_short_and_a_text_that_samples_plain_decoding_undisturbed():
    costs = Costs()
    first = Simulation(costs, steady(0.99))
    experience = first.experience()
    first.run(AdaptivePace(experience, "model", "exact", MOST), 300)
    for number in range(1, 2 * PLAIN_EVERY + 1):
        pace = AdaptivePace(experience, "model", "exact", MOST)
        if number % PLAIN_EVERY:
            assert pace.follows(0) == FOLLOWING_DRAFTS < pace._first_k
            continue
        timed = math.ceil(pace._text.lasting(SAMPLE_TOKENS))
        assert (pace.turn(), pace.follows(0)) == (NextRound(0, max_plain_tokens=1 + timed), 0)
        pace.checked(plain(1))
        for _ in range(timed):
            assert (pace.turn().num_drafts, pace.follows(timed)) == (0, 0)
            pace.checked(plain(1)._replace(round_ns=costs.step_ns))
        assert pace.turn().num_drafts > 0


def test_texts_are_drafted_from_their_start_as_long_as_that_saves_time():
    """Occasionally one is not, to keep the measurement of plain decoding current."""
    at_once = AtOnce()
    chosen = []
    for _ in range(2 * PLAIN_EVERY):
        chosen.append(at_once.next())
        if chosen[-1]:
            at_once.saved(MS)
    assert chosen == 2 * [*[True] * (PLAIN_EVERY - 1), False]
    left_out = []
    for _ in range(8):
        at_once.saved(-100 * MS)
        left_out.append(0)
        while not at_once.next():
            left_out[-1] += 1
    assert left_out == [2, 4, 8, 16, 32, 64, 64, 64]
    at_once.saved(MS)
    at_once.saved(-2 * MS)
    assert [at_once.next() for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("step_ns", "rest"), [(MS // 4, FIRST_REST), (4 * MS, 4), (40 * MS, 1)])
def test_the_slower_the_target_the_sooner_the_drafter_is_asked(step_ns, rest):
    pace = AdaptivePace(Experience([MeasuredStep(1, step_ns)]), "d", "exact", MOST)
    pace.checked(plain(1))
    assert pace.follows(rest - 1) == 0
    assert pace.follows(rest) > 0


def test_texts_are_told_apart_by_how_sure_the_target_is_of_them():
    """The drafter is queried early in kinds of text where drafts pay off, and rarely in others."""
    costs = Costs(step_ns=MS // 2, row_ns=10_000, draft_ns=25_000, hop_ns=MS // 2, prompt_ns=0)
    experience = Simulation(costs, steady(0.0)).experience()
    shares, asked = [], []
    for number in range(80):
        good = Simulation(costs, steady(0.98), number, sure=0.95)
        spent = good.run(AdaptivePace(experience, "model", "exact", MOST), 128)
        shares.append(spent.drafted / spent.tokens)
        poor = Simulation(costs, steady(0.3), number, sure=0.6)
        poor.run(AdaptivePace(experience, "model", "exact", MOST), 128)
        asked.append(len(poor.follows_ns))
    assert sum(shares[40:]) / 40 > 0.85
    assert sum(asked[40:]) <= 40 * 128 / SELDOM + 1


def test_a_question_costs_what_it_delays_plain_decoding():
    """As where drafter and target share processors, and the drafter has a long prompt to read."""
    experience = Experience([MeasuredStep(1, MS), MeasuredStep(32, 2 * MS)])
    drafter = experience.with_drafter("d", "exact")
    pace = AdaptivePace(after_trial(experience), "d", "exact", MOST, FirstToken(1.0, 1000))
    pace.checked(plain(1))
    pace.checked(plain(40)._replace(round_ns=40 * MS))
    assert pace.follows(40) > 0
    before = drafter.allowance_ns
    pace.checked(plain(10)._replace(round_ns=60 * MS))
    proposal = DraftChunk(token_ids=[1] * 8, drafter="d", agreements=[False] * 40)
    pace.followed(Overtaken(proposal, 0, 8, 60 * MS))
    assert before - drafter.allowance_ns == pytest.approx(50 * MS, rel=0.05)
    assert drafter.allowance_ns < 0
    assert pace.follows(1000) == 0


def test_noise_of_a_slow_target_is_no_delay_by_a_question():
    experience = Experience([MeasuredStep(1, 100 * MS), MeasuredStep(32, 110 * MS)])
    drafter = experience.with_drafter("d", "exact")
    pace = AdaptivePace(experience, "d", "exact", MOST)
    for _ in range(4):
        pace.checked(plain(1)._replace(round_ns=100 * MS))
    assert pace.follows(4) > 0
    before = drafter.allowance_ns
    pace.checked(plain(1)._replace(round_ns=104 * MS))
    earned = FOLLOWING_SHARE * 104 * MS
    proposal = DraftChunk(token_ids=[1] * 8, drafter="d", agreements=[False] * 4)
    pace.followed(Overtaken(proposal, 0, 1, 104 * MS))
    assert drafter.allowance_ns == before + earned - FOLLOWING_COST_NS


def test_one_bad_round_of_a_slow_target_does_not_outweigh_what_drafts_have_just_saved():
    experience = Experience([MeasuredStep(1, 100 * MS), MeasuredStep(32, 150 * MS)])
    pace = AdaptivePace(experience, "d", "exact", MOST)
    drafter = experience.with_drafter("d", "exact")
    pace.checked(plain(1)._replace(round_ns=100 * MS))
    for _ in range(3):
        pace.checked(drafted(15, 15, 120 * MS))
    pace.checked(drafted(15, 0, 200 * MS))
    assert drafter.allowance_ns > 0
    for _ in range(12):
        pace.checked(drafted(15, 0, 200 * MS))
    assert drafter.allowance_ns < 0
    assert not pace.turn().num_drafts
    assert not pace.follows(1), "what they saved is spent"


def test_ending_plain_decoding_for_a_proposal_that_is_empty_is_no_time_of_a_token():
    experience = Experience([MeasuredStep(1, 100 * MS), MeasuredStep(32, 110 * MS)])
    pace = AdaptivePace(experience, "d", "exact", MOST)
    for _ in range(4):
        pace.checked(plain(1)._replace(round_ns=100 * MS))
    assert pace.follows(4) > 0
    proposal = DraftChunk(token_ids=[1] * 8, drafter="d", agreements=[True] * 8)
    pace.followed(Overtaken(proposal, 1, 1, 10 * MS))
    assert pace.turn().num_drafts
    pace.nothing_drafted()
    pace.checked(plain(1)._replace(round_ns=195 * MS))
    assert experience.plain_ns == 100 * MS
    pace.checked(plain(1)._replace(round_ns=102 * MS))
    assert 100 * MS < experience.plain_ns < 101 * MS


def test_a_lossy_drafter_goes_on_where_it_is_unsure_as_far_as_that_is_let_stand():
    """It stops where drafts of such confidence were mostly rejected."""
    stops = []
    for loosened in (True, False):
        simulation = Simulation(Costs(), steady(0.9))
        experience = simulation.experience()
        loosening = experience.with_drafter("model", "fly").loosening
        for _ in range(300):
            loosening.observe(loosened)
        pace = AdaptivePace(experience, "model", "fly", MOST)
        simulation.run(pace, 100)
        stops.append(pace.turn().min_confidence)
    assert stops[0] == 0.0
    assert stops[1] > 0.0


def test_a_drafter_that_becomes_slow_is_given_up():
    simulation = Simulation(Costs(), steady(0.9))
    pace = pace_of(simulation)
    assert simulation.run(pace, 300).drafted > 200
    simulation.costs = slow = Costs(hop_ns=300 * MS)
    spent = simulation.run(pace, 600)
    assert spent.drafted < 60
    assert spent.time_ns < 1.5 * spent.tokens * slow.step_ns
    spent = simulation.run(pace, 1000)
    assert spent.time_ns < 1.1 * spent.tokens * slow.step_ns
    simulation.costs = Costs()
    simulation.run(pace, 1500)
    assert simulation.run(pace, 500).drafted > 300


def test_one_long_reading_of_a_prompt_does_not_spoil_the_drafter_for_good():
    """The drafter takes long for its first proposal, since it reads the prompt."""
    costs = Costs(prompt_ns=2_000 * MS)
    simulation = Simulation(costs, steady(0.9))
    experience = simulation.experience()
    simulation.run(AdaptivePace(experience, "model", "exact", MOST), 2000)
    again = Simulation(Costs(), steady(0.9), seed=1)
    spent = again.run(AdaptivePace(experience, "model", "exact", MOST), 600)
    assert spent.drafted > 400


def test_a_window_that_failed_without_a_draft_checked_is_no_plain_decoding():
    simulation = Simulation(Costs(prompt_ns=0), steady(0.9))
    experience = simulation.experience()
    pace = AdaptivePace(experience, "model", "margin", MOST)
    assert simulation.run(pace, 300).drafted > 200
    plain_ns = experience.plain_ns
    pace.checked(CheckedRound(DraftChunk(), Verdict(4, 1, start_length=8), -4, 12 * MS))
    assert experience.plain_ns == plain_ns


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
    experience.running = running
    pace = AdaptivePace(experience, "d", "margin", most)
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
            if k := pace.follows(data.draw(st.integers(0, 100))):
                assert 1 <= k <= most
                count, timings = data.draw(st.integers(0, k)), DraftTimings(0, *data.draw(
                    st.tuples(NS, NS)))  # fmt: skip
                agreements = data.draw(st.lists(st.booleans(), max_size=8))
                proposal = DraftChunk(
                    token_ids=[1] * count, timings=timings, agreements=agreements, drafter="d"
                )
                matched = data.draw(st.integers(0, count))
                pace.followed(Overtaken(proposal, matched, count, data.draw(NS)))
        elif turn.num_drafts:
            pace.nothing_drafted()
            assert not pace.turn().num_drafts
        assert isinstance(pace.saved_ns, int)
        assert math.isfinite(pace.saved_ns)


def test_plain_text_counts_as_rounds_that_end_where_a_draft_would_have_been_refused():
    followed, checked = SharedAcceptance(0.5, 4), SharedAcceptance(0.5, 4)
    followed.followed([True, True, False, *[True] * 4, True, False, True])
    for drafts, accepted in [(4, 2), (4, 4), (4, 1), (1, 1)]:
        checked.checked(drafts, accepted)
    assert [followed.at(i) for i in range(4)] == [checked.at(i) for i in range(4)]
    assert followed.mean == checked.mean


def test_of_the_tokens_that_differ_as_many_count_as_accepted_as_lately():
    drafter = DrafterExperience(lossy=True)  # half of them, before any is known
    accepted = drafter.would_accept([True, False, True, False, False, False])
    assert accepted == [True, True, True, False, True, False]
    assert DrafterExperience().would_accept([True, False, False]) == [True, False, False]

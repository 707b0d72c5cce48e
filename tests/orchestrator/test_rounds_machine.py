"""Windows across rounds, driven at random against a replay of the whole history."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flyspec.rules import Rule
from flyspec.values.rounds import DistributionSpec, DraftChunk
from flyspec.values.tokens import Origin
from orchestrator.generation.ledger import RoundOutcome
from orchestrator.generation.pace import FixedPace, NextRound, Pace, RepeatedPace
from orchestrator.generation.window import Hide, Show
from tests.examples import examples
from tests.orchestrator.fakes import Fakes, plan_of
from tests.orchestrator.reference import replay
from tests.orchestrator.tokenizer import TOKENIZER
from tests.orchestrator.world import EOS, World

MAX_ROUNDS = 3000


class Generations(RuleBasedStateMachine):
    """One generation; the rules run rounds, with K changing, or break a stream."""

    pace: Pace | None = None
    drafter = ""

    @initialize(
        world=st.builds(
            World,
            seed=st.integers(0, 2**32),
            agreement=st.sampled_from([0.9, 0.8, 0.6, 0.95, 0.3]),
            tolerance=st.sampled_from([1.0, 0.9, 0.5, 1.0, 0.0]),
            eos_share=st.sampled_from([0.0, 0.01, 0.05]),
        ),
        window_size=st.sampled_from([3, 6, 2, 4, 9, 1, 0]),
        k=st.sampled_from([4, 2, 7, 3, 1, 0]),
        max_tokens=st.sampled_from([40, 60, 30, 17, 8, 2, 1]),
        room=st.integers(0, 20),
        max_loose_tokens=st.sampled_from([None, None, None, 3, 1, 0]),
        max_loose_cost_nats=st.sampled_from([None, None, None, 2.0, 0.5, 0.0]),
        exact_prefix=st.sampled_from([0, 0, 5]),
        ignore_eos=st.booleans(),
        eager=st.booleans(),
        logprobs=st.sampled_from([None, 1]),
        distribution=st.sampled_from([None, DistributionSpec()]),
    )
    def begin(self, world, window_size, k, max_tokens, room, exact_prefix, **changes):
        self.window_size = window_size
        self.plan = plan_of(
            num_speculative_tokens=k,
            adaptive=self.pace is not None,
            max_tokens=max_tokens,
            context_length=3 + max_tokens + room,
            exact_until_position=3 + exact_prefix if exact_prefix else 0,
            **changes,
        )
        self.world = world
        self.fakes = Fakes(
            world, self.plan, TOKENIZER, window_size, pace=self.pace, drafter=self.drafter
        )
        self.loop = asyncio.new_event_loop()
        self.running = self.fakes.run(MAX_ROUNDS)
        self.history: list[list[int]] = []
        self.num_failed = 0
        self.sent: list = []
        self.final: list = []
        self.done = False

    def next_round(self):
        before = replay(self.world, self.plan, self.window_size, self.history)
        try:
            round_, update = self.loop.run_until_complete(anext(self.running))
        except StopAsyncIteration:
            self.done = True
            return
        self.check_services(round_, before.tokens)
        self.num_failed += round_.verdict is None
        self.history += history_of(self.fakes, round_)
        if not self.plan.reporting.eager:
            assert not any(isinstance(c, Show | Hide) for c in round_.commands)
        if update.retraction is not None:
            assert update.retraction.output_token_index >= len(self.final)
            del self.sent[update.retraction.output_token_index :]
        self.sent += update.tokens
        self.final += update.final
        self.done = self.fakes.output.finish_reason is not None

    def check_services(self, round_, tokens):
        """Both services had exactly the sequence that results from the history."""
        if round_.verdict is None:
            return
        round_id = round_.verdict.round_id
        verify, draft = self.fakes.verify, self.fakes.draft
        assert round_.start == len(tokens)
        if round_.verdict.decisions:
            assert verify.sequences[round_id] == tokens
            # A proposal that plain decoding overtook, as after the first token, was asked for under
            # another id; one that was drafted ahead, before the last token.
            drafted_on = draft.sequences.get(round_id)
            if self.drafter:  # a relay asked for what follows the head's block
                assert not round_.proposal.ahead
                asked, drafts = drafted_on or tokens, list(round_.proposal.token_ids)
                assert asked == [*tokens, *drafts][: len(asked)]
            elif round_.proposal.ahead:
                assert drafted_on == tokens[:-1]
            else:
                overtaken = (
                    self.pace is not None or len(tokens) == len(self.plan.prompt_token_ids) + 1
                )
                assert drafted_on == tokens or (overtaken and drafted_on is None)
            sent, drafts = verify.distributions[round_id], round_.request.draft_token_ids
            assert len(sent) == (len(drafts) if self.plan.drafts.distribution else 0)
        else:
            held = verify.sequences[round_id]
            assert held == tokens[: len(held)]

    @rule(offers=st.lists(st.sampled_from([1000, 1000, 1000, 2, 1, 0]), min_size=1, max_size=5))
    def run(self, offers):
        for k in offers:
            if not self.done:
                self.next_round()
                self.fakes.offer.k = k
                self.agrees_with_the_replay()

    @rule(kind=st.sampled_from(["write", "read"]))
    def lose_the_target(self, kind):
        self.fakes.verify.break_at(kind)

    @rule(kind=st.sampled_from(["write", "read"]))
    def lose_the_drafter(self, kind):
        self.fakes.draft.break_at(kind)

    @invariant()
    def agrees_with_the_replay(self):
        if not hasattr(self, "history"):
            return
        rounds, output, ledger = self.fakes.rounds, self.fakes.output, self.fakes.ledger
        progress = self.fakes.progress
        prompt = len(self.plan.prompt_token_ids)
        whole = replay(self.world, self.plan, self.window_size, self.history)
        # What is not handed out before the next round is with the target.
        kept = [entry for r in rounds._kept for entry in history_of(self.fakes, r)]
        ahead = replay(self.world, self.plan, self.window_size, [*self.history, *kept])
        assert progress.sequence.tokens == ahead.tokens
        assert progress.state.length == len(ahead.tokens)
        assert progress.state.committed_length == ahead.committed
        committed = whole.tokens[prompt : whole.committed]
        stops = () if self.plan.limits.ignore_eos else (EOS,)
        end = next((i + 1 for i, t in enumerate(committed) if t in stops), len(committed))
        num_final = min(end, self.plan.limits.max_tokens)
        assert [t.token_id for t in self.final] == committed[:num_final]
        assert [t.origin for t in self.final] == whole.origins[:num_final]
        assert [t.gap_nats for t in self.final] == whole.gaps[:num_final]
        if self.plan.reporting.eager:
            shown = whole.tokens[prompt:]
            assert [t.token_id for t in self.sent] == shown[: len(self.sent)]
            assert len(self.sent) >= num_final
        else:
            assert self.sent == self.final
        assert output.num_final_tokens == num_final
        if self.plan.reporting.logprobs is not None:
            for index, token in enumerate(self.final):
                before = whole.tokens[: prompt + index]
                assert token.logprobs == self.world.logprobs(before, token.token_id)
        loose = [t.gap_nats for t in self.final if t.origin is Origin.LOOSE]
        assert (ledger.metrics.num_loose_tokens, ledger.metrics.loose_cost_nats) == (
            len(loose),
            sum(loose),
        )
        allowed = self.plan.judging.allowed
        if allowed.loose_tokens is not None:
            assert len(loose) <= allowed.loose_tokens
        if allowed.loose_cost_nats is not None:
            assert sum(loose) <= allowed.loose_cost_nats
        assert ledger.metrics.num_rollbacks == whole.num_rollbacks
        end = prompt + num_final if self.done else math.inf
        assert ledger.metrics.num_rejected_tokens == len(whole.rejected(end))
        assert ledger.metrics.rejected_cost_nats == sum(whole.rejected(end))
        if self.done:
            counts = whole.accepted(end)
            histogram = [0] * (max(counts, default=-1) + 1)
            for accepted in counts:
                histogram[accepted] += 1
            assert ledger.metrics.acceptance_histogram == histogram
            assert ledger.metrics.num_accepted_draft_tokens == sum(counts)
            drafted = [drafts for drafts in self.history if drafts]
            assert ledger.metrics.num_spec_steps == len(drafted)
            num_drafts = sum(map(len, drafted))
            if self.history[-1]:
                beyond = whole.spans[-1][0] + len(drafted[-1]) - end
                num_drafts -= min(len(drafted[-1]), max(0, beyond))
            assert ledger.metrics.num_draft_tokens == num_drafts
            plain, bursts = ledger.num_draft_tokens_per_round.count(0), ledger.metrics
            plain -= self.num_failed  # windows, for want of drafts
            assert (bursts.num_plain_tokens, bursts.num_rounds) == (plain, plain + len(drafted))
            assert [k for k in ledger.num_draft_tokens_per_round if k] == [*map(len, drafted)]

    def teardown(self):
        if not hasattr(self, "history"):
            return
        self.fakes.offer.k = 1000
        while not self.done:
            self.next_round()
            self.agrees_with_the_replay()
        self.loop.run_until_complete(self.running.aclose())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def history_of(fakes: Fakes, round_: RoundOutcome) -> list[list[int]]:
    """The drafts of the rounds that this stands for in the replay: one round per plain token."""
    if round_.verdict is None or not round_.verdict.decisions:
        return [[]] * (1 + len(round_.verdict.plain_token_ids) if round_.verdict else 1)
    return [list(fakes.verify.rounds[round_.verdict.round_id].draft_token_ids)]


class WilfulPace(FixedPace):
    """Follows a script."""

    def __init__(self) -> None:
        super().__init__(0)
        self.following = 0
        self.likely = False

    def will(self, whim: Whim) -> None:
        """Set its behaviour from now on."""
        self._turn, self.following, self.likely = whim.turn, whim.following, whim.likely

    def follows(self) -> int:
        return self.following

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        return [0.9**k for k in range(len(proposal.token_ids))] if self.likely else ()


class Whim(NamedTuple):
    """The pace's choices, the drafter's behaviour, and whether the target takes all drafts."""

    turn: NextRound
    following: int
    likely: bool
    delay: int
    confidences: bool
    scores: bool
    full: bool


whims = st.builds(
    Whim,
    turn=st.builds(
        NextRound,
        num_drafts=st.sampled_from([4, 0, 2, 7, 1, 0]),
        min_confidence=st.sampled_from([0.0, 0.0, 0.1, 0.6]),
        max_plain_tokens=st.sampled_from([None, None, 1, 3]),
        patience_ns=st.sampled_from([None, 0, 10**12, 0]),
    ),
    following=st.sampled_from([0, 3, 7, 1]),
    likely=st.booleans(),
    delay=st.sampled_from([0, 0, 1, 4, 12]),
    confidences=st.booleans(),
    scores=st.booleans(),
    full=st.booleans(),
)


class WilfulGenerations(Generations):
    """One generation whose pace does anything at any time, with a drafter that may be slow."""

    def __init__(self) -> None:
        super().__init__()
        self.pace = WilfulPace()

    @rule(whim=whims)
    def change(self, whim):
        tell(self.fakes, whim)


class HeadGenerations(WilfulGenerations):
    """One generation drafted by a head of the target, which may have no proposal."""

    drafter = "head"


class RelayGenerations(WilfulGenerations):
    """One drafted by a head and a draft service."""

    drafter = "relay"

    @rule(k=st.sampled_from([0, 1, 3, 1000]))
    def shorten(self, k):
        self.fakes.verify.head_k = k


def tell(fakes: Fakes, whim: Whim) -> None:
    """Change everyone's behaviour."""
    fakes.pace.will(whim)
    offer, fakes.verify.full = fakes.offer, whim.full
    offer.delay, offer.confidences, offer.scores = whim.delay, whim.confidences, whim.scores


TestGenerations = Generations.TestCase
TestGenerations.settings = settings(max_examples=examples(40), stateful_step_count=25)
TestWilfulGenerations = WilfulGenerations.TestCase
TestWilfulGenerations.settings = settings(max_examples=examples(50), stateful_step_count=30)
TestHeadGenerations = HeadGenerations.TestCase
TestHeadGenerations.settings = settings(max_examples=examples(40), stateful_step_count=25)
TestRelayGenerations = RelayGenerations.TestCase
TestRelayGenerations.settings = settings(max_examples=examples(40), stateful_step_count=25)

WORLDS = st.builds(
    World,
    seed=st.integers(0, 2**32),
    agreement=st.sampled_from([0.9, 0.8, 0.6, 0.95, 0.3]),
    tolerance=st.sampled_from([1.0, 0.9, 0.5, 1.0, 0.0]),
    eos_share=st.sampled_from([0.0, 0.01, 0.05]),
)


async def whole(fakes: Fakes, minds: Sequence[Whim] = ()) -> list[int]:
    """The text of a generation whose choices change with every round."""
    final: list[int] = []
    for whim in minds[:1]:
        tell(fakes, whim)
    number = 0
    async for _, update in fakes.run(MAX_ROUNDS):
        number += 1
        if minds:
            tell(fakes, minds[number % len(minds)])
        final += [token.token_id for token in update.final]
    return final


@given(
    world=WORLDS,
    minds=st.lists(whims, min_size=1, max_size=8),
    max_tokens=st.integers(1, 60),
    drafter=st.sampled_from(["", "head", "relay"]),
)
@settings(max_examples=examples(80))
def test_an_exact_text_is_that_of_plain_decoding_whatever_the_pace(
    world, minds, max_tokens, drafter
):
    world = replace(world, tolerance=0.0)
    plan = plan_of(
        rule=Rule("exact"), adaptive=True, num_speculative_tokens=7, max_tokens=max_tokens
    )
    fakes = Fakes(world, plan, TOKENIZER, window_size=0, pace=WilfulPace(), drafter=drafter)
    tokens = list(plan.prompt_token_ids)
    while len(tokens) < len(plan.prompt_token_ids) + max_tokens and tokens[-1] != EOS:
        tokens.append(world.own(tokens))
    assert asyncio.run(whole(fakes, minds)) == tokens[len(plan.prompt_token_ids) :]


@given(
    world=WORLDS,
    minds=st.lists(whims, min_size=1, max_size=8),
    max_tokens=st.integers(1, 60),
    window_size=st.sampled_from([3, 6, 2, 1, 0]),
    drafter=st.sampled_from(["", "head"]),
)
@settings(max_examples=examples(80))
def test_a_lossy_run_is_repeated_by_its_rounds(world, minds, max_tokens, window_size, drafter):
    plan = plan_of(adaptive=True, num_speculative_tokens=7, max_tokens=max_tokens)
    fakes = Fakes(world, plan, TOKENIZER, window_size, pace=WilfulPace(), drafter=drafter)
    tokens = asyncio.run(whole(fakes, minds))
    rounds = fakes.ledger.num_draft_tokens_per_round
    pace = RepeatedPace(rounds, FixedPace(0), drafter or "model")
    again = Fakes(world, plan, TOKENIZER, window_size, pace=pace, drafter=drafter)
    assert asyncio.run(whole(again)) == tokens
    assert again.ledger.num_draft_tokens_per_round == rounds
    assert pace.num_unrepeated == 0

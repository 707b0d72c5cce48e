"""The orchestrator's reaction to a service that is slow, silent, lost or unsuitable."""

from __future__ import annotations

from collections import Counter

import grpc
import numpy as np
import pytest

from flyspec import wire
from flyspec.engine.distributions import decode
from flyspec.errors import UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.rules import Rule
from flyspec.values.generation import RecoveryKind, SpeculationMetrics
from flyspec.values.rounds import (
    DistributionSpec,
    DraftAdvance,
    DraftChunk,
    DraftOpen,
    StagedOn,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import Origin, SamplingParams, TokenDistribution
from orchestrator.generation.ledger import Ledger
from orchestrator.generation.proposals import LocalLookup, fit, fit_proposal
from orchestrator.generation.verifying import Verifying
from orchestrator.upstreams import connection, verify
from orchestrator.upstreams.protocol import Correlation
from orchestrator.upstreams.verify import GrpcVerifyUpstream
from tests.orchestrator.fakes import FULL, FakeDraft, Fakes, Offer, plan_of
from tests.orchestrator.stacks import start_stack
from tests.orchestrator.tokenizer import TOKENIZER
from tests.orchestrator.world import World
from tests.waiting import until

EXACT = Rule("exact")
PROMPT = "The cat sat on the mat, and the dog sat"


async def _check(session, sequence, drafts):
    round_ = VerifyRound(1, 0, (), drafts)
    return [verdict async for verdict in session.check(sequence, round_)][-1]


async def test_a_session_closed_for_silence_is_opened_again(model_dirs):
    async with start_stack(model_dirs, verify={"idle_timeout_s": 0.2}) as stack:
        plan = plan_of(prompt_token_ids=[5, 6, 7], rule=EXACT)
        fleet = stack.orchestrator.fleet
        targets = fleet.replicas_of(fleet.target.info.model)
        session = Verifying(targets, plan, 5.0, Ledger())
        sequence = TokenSequence([5, 6, 7])
        first = await _check(session, sequence, [8, 9])
        await until(lambda: not stack.verify_engine.sessions.active)
        again = await _check(session, sequence, [8, 9])
        assert (again.keep_length, again.next_token_id) == (first.keep_length, first.next_token_id)
        session.close()
        assert await stack.idle()


async def test_a_staged_round_belongs_to_its_request_in_traces():
    class Traced(Correlation):
        traceparent = "00-the-request's-own-span-01"

    sent = []

    class Call:
        async def write(self, message):
            sent.append(message)

    session = GrpcVerifyUpstream("nowhere:1", 5.0).open(
        VerifyOpen((), 1, EXACT, SamplingParams(), 0), SpeculationMetrics(), Traced()
    )
    session._call = Call()
    await session.stage(VerifyRound(2, 4, (), (7,), staged_on=StagedOn(1, 3, 9)))
    assert sent[0].round.traceparent == Traced.traceparent


async def test_tokens_that_the_drafter_was_never_asked_to_follow_are_not_taken_for_its_own():
    world = World(seed=5, eos_share=0.0)
    draft = FakeDraft(world, Offer(1000))
    session = draft.open(DraftOpen((), SamplingParams(), 0), SpeculationMetrics())
    sent = []

    def seen(message):
        if message.DESCRIPTOR.name.endswith("Request"):
            sent.append(wire.unwrap(message))

    draft.seen = seen

    async def propose(tokens, max_tokens=6, **options):
        request = DraftAdvance(len(sent), 0, (), max_tokens, **options)
        proposal = await session.propose(tokens, request, 5.0)
        assert draft.sequences[request.round_id] == tokens
        return proposal, sent[-1]

    tokens = [3, 4, 5]
    proposal, request = await propose(tokens)
    # It opens with them all, and could not say what it would have proposed.
    assert (request.keep_length, request.append_token_ids) == (3, [])
    tokens += [*proposal.token_ids[:4], 9]  # four of its six stand, then comes a correction
    proposal, request = await propose(tokens, score=True)
    assert (request.keep_length, request.append_token_ids, request.score) == (7, [9], True)
    tokens += [*proposal.token_ids, 7, 8]  # all of them, and two that it was not asked about
    proposal, request = await propose(tokens, 0)
    assert (request.keep_length, request.append_token_ids) == (14, [7, 8])
    session.keep(12)  # a window failed, and what comes now is what came before
    proposal, request = await propose([*tokens[:12], *tokens[12:14]], score=True)
    assert (request.keep_length, request.append_token_ids) == (12, tokens[12:14])
    session.keep(40)
    tokens = [*tokens[:14], *proposal.token_ids[:1]]
    _, request = await propose(tokens, score=True)
    assert (request.keep_length, request.append_token_ids, request.score) == (15, [], False)


async def test_a_drafter_that_sends_no_distributions_is_given_up():
    """The rule needs distributions: prompt lookup gives its tokens probability 1."""
    fakes = Fakes(World(seed=3), plan_of(distribution=FULL, max_tokens=20), TOKENIZER)
    fakes.draft.alter = lambda answers: [chunk.ClearField("distributions") for chunk in answers]
    origins = [token.origin async for _, update in fakes.run() for token in update.final]
    assert fakes.draft.opened == fakes.drafters.get("model").stats.failures_total > 0
    assert [r.kind for r in fakes.ledger.recoveries.kept] == [RecoveryKind.DRAFTER_FALLBACK]
    assert Origin.EXACT_MODEL not in origins
    for round_id, sent in fakes.verify.distributions.items():
        drafts = fakes.verify.rounds[round_id].draft_token_ids
        assert sent == [TokenDistribution()] * len(drafts)


def test_distributions_travel_in_pieces_before_their_round(monkeypatch):
    monkeypatch.setattr(verify, "DISTRIBUTIONS_PIECE_BYTES", 100)
    made = [TokenDistribution(bytes(size)) for size in (40, 60, 1, 300, 20, 20, 100)]
    pieces = list(verify._pieces(7, 30, made))
    assert [len(p.distributions) for p in pieces] == [2, 1, 1, 2, 1]
    assert [p.first_position for p in pieces] == [30, 32, 33, 34, 36]
    assert [q for p in pieces for q in p.distributions] == made
    assert list(verify._pieces(7, 30, [])) == []


async def test_bytes_are_those_of_the_messages():
    """Compared with the bytes that the fake services received and sent."""
    for distribution in (None, DistributionSpec(4)):
        counted = Counter()
        fakes = Fakes(World(seed=5), plan_of(distribution=distribution), TOKENIZER)

        def count(message, counted=counted):
            name = message.DESCRIPTOR.name
            kind = message.WhichOneof("request") if name.endswith("Request") else "answer"
            if kind == "open":
                return
            size = message.ByteSize()
            counted["round"] += size
            if kind == "distributions":
                counted["distributions"] += size
            elif name == "DraftResponse":
                bare = type(message).FromString(message.SerializeToString())
                bare.ClearField("distributions")
                counted["distributions"] += size - bare.ByteSize()

        fakes.draft.seen = fakes.verify.seen = count
        async for _ in fakes.run():
            pass
        traffic = fakes.ledger.metrics
        # The proposal that was asked for last may still be on its way.
        assert 0 <= counted["round"] - traffic.round_bytes < 200
        assert counted["distributions"] - traffic.distribution_bytes in range(100)
        assert (traffic.distribution_bytes > 0) == (distribution is not None)


async def test_prompt_lookup_here_sends_distributions_only_if_asked():
    for wanted in (False, True):
        proposal = LocalLookup(wanted).propose([3, 4, 5, 3, 4], 2)
        assert proposal.token_ids == [5, 3]
        assert proposal.distributions == [TokenDistribution()] * (2 if wanted else 0)


def _halves(*values):
    return np.array(values, dtype="<f2").tobytes()


def test_distributions_of_a_padded_vocabulary_cover_the_targets():
    whole = TokenDistribution(_halves(-1, -2, -3, -0.5))
    assert fit(whole, 4) is whole
    assert fit(whole, 3) == TokenDistribution(_halves(-1, -2, -3))
    assert fit(whole, 6) == TokenDistribution(_halves(-1, -2, -3, -0.5, -65504, -65504))
    listed = TokenDistribution(_halves(-1, -2, -3), (2, 5, 0))
    assert fit(listed, 6) is listed
    assert fit(listed, 5) == TokenDistribution(_halves(-1, -3), (2, 0))
    assert fit(TokenDistribution(), 6) == TokenDistribution()


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("width", [5, 9])
def test_what_was_fitted_is_read(width, renormalise):
    """Tokens that only one model has get no probability; the others keep their proportions."""
    sent = np.log(np.arange(1, width + 1) / sum(range(1, width + 1)))
    whole = TokenDistribution(_halves(*sent))
    read = decode([fit(whole, 7)], [2], 7, renormalise=renormalise)
    assert read.token_ids is None
    q = read.log_probs[0].exp().numpy()
    shared = min(width, 7)
    expected = np.zeros(7)
    expected[:shared] = np.exp(sent[:shared])
    if renormalise:
        expected /= expected.sum()
    assert q == pytest.approx(expected, abs=1e-3)


def test_a_proposal_ends_before_a_token_that_the_target_does_not_have():
    q = TokenDistribution(_halves(*[-2] * 8))
    padded = DraftChunk(
        token_ids=[3, 7, 5], origins=[Origin.EXACT_MODEL] * 3, distributions=[q] * 3
    )
    proposal = fit_proposal(padded, 6)
    assert proposal.token_ids == [3]
    assert proposal.origins == [Origin.EXACT_MODEL]
    assert proposal.distributions == [TokenDistribution(_halves(*[-2] * 6))]


@pytest.mark.parametrize(
    ("code", "details", "lost"),
    [
        ("OK", "", True),
        ("CANCELLED", "CANCELLED", True),
        ("UNKNOWN", "Stream removed", True),
        ("INTERNAL", "Received RST_STREAM with error code 2", True),
        ("INTERNAL", "internal error in Verify: KeyError(3)", False),
        ("UNAVAILABLE", "going away", True),
        ("INVALID_ARGUMENT", "round: bad", False),
    ],
)
def test_what_no_server_of_ours_says_is_a_lost_connection(code, details, lost):
    error = connection.error_of_end(grpc.StatusCode[code], details)
    assert isinstance(error, UnavailableError) == lost
    assert details in str(error)

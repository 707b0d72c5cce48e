"""What the orchestrator does when a service is slow, silent, lost, or does not fit."""

from __future__ import annotations

import asyncio

import pytest

from flyspec import rpc
from flyspec.client import Chunk, GenerateOptions
from flyspec.errors import UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.types import Origin, Rule, SamplingParams, VerifyRound
from flyspec.v1 import verify_pb2_grpc
from orchestrator import directory, upstreams
from orchestrator.drafting import Drafting
from orchestrator.upstreams import DraftSession, Proposal, VerifyUpstream
from tests.orchestrator.conftest import start_stack
from tests.tiny import make_model

EXACT = Rule("exact")
PROMPT = "The cat sat on the mat, and the dog sat"


async def _check(session, sequence, drafts):
    round_ = VerifyRound(1, 0, (), drafts)
    return [verdict async for verdict in session.check(sequence, round_)][-1]


async def test_a_session_closed_for_silence_is_opened_again(model_dirs):
    async with start_stack(model_dirs, verify={"idle_timeout_s": 0.05}) as stack:
        session = stack.orchestrator.directory.verify.session(3, EXACT, SamplingParams(), 1)
        sequence = TokenSequence([5, 6, 7])
        first = await _check(session, sequence, [8, 9])
        await asyncio.sleep(0.3)
        again = await _check(session, sequence, [8, 9])
        assert (again.keep_length, again.next_token_id) == (first.keep_length, first.next_token_id)
        session.close()
        assert await stack.idle()


@pytest.mark.parametrize(("k", "sampling"), [(0, SamplingParams()), (15, SamplingParams(1.0))])
async def test_a_restarted_target_goes_on_with_the_same_text(model_dirs, k, sampling):
    async with start_stack(model_dirs) as stack:
        options = GenerateOptions(
            rule=EXACT,
            max_tokens=120,
            ignore_eos=True,
            num_speculative_tokens=k,
            sampling=sampling,
            seed=7,
        )
        undisturbed = await stack.client.complete(PROMPT, options)
        tokens: list[int] = []
        async for event in stack.client.generate(PROMPT, options):
            if isinstance(event, Chunk):
                if not tokens:
                    await stack.restart_verify()
                tokens += event.token_ids
        assert tokens == undisturbed.token_ids
        assert await stack.idle()


class _Silent(verify_pb2_grpc.VerifyServiceServicer):
    """Accepts calls and never answers."""

    async def Describe(self, request, context):
        await asyncio.sleep(60)


async def test_a_service_that_does_not_answer_is_named_and_unavailable(monkeypatch):
    monkeypatch.setattr(upstreams, "DESCRIBE_TIMEOUT_S", 0.05)
    add = verify_pb2_grpc.add_VerifyServiceServicer_to_server
    server = rpc.GrpcServer("127.0.0.1", 0, [(add, _Silent())], ["flyspec.v1.VerifyService"])
    upstream = VerifyUpstream(f"127.0.0.1:{await server.start()}", 1.0)
    with pytest.raises(UnavailableError, match=upstream.address):
        await upstream.describe()
    await upstream.close()
    await server.stop(0)


def test_tokens_that_the_drafter_was_never_asked_to_follow_are_not_taken_for_its_own():
    session = DraftSession.__new__(DraftSession)
    session._held, session._synced = 20, 10
    session.accept(15)  # five of its ten stand, then comes a correction
    session.accept(16)  # a round without a proposal
    assert session._synced == 15


async def test_a_proposal_ends_before_a_token_that_the_target_does_not_have():
    class Padded:
        async def propose(self, sequence, max_tokens, round_id):
            return Proposal([3, 400, 5], [Origin.EXACT_MODEL] * 3)

    proposal = await Drafting(Padded(), vocab_size=400).propose(TokenSequence([1]), 4, 1)
    assert proposal.token_ids == [3]
    assert proposal.origins == [Origin.EXACT_MODEL]


async def test_a_late_drafter_that_does_not_fit_stays_out(model_dirs, tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "MONITOR_S", 0.01)
    other = str(make_model(tmp_path / "other", text="completely different words here " * 9))
    async with start_stack(model_dirs) as stack, start_stack((other, other)) as foreign:
        known = stack.orchestrator.directory
        own, known.draft = known.draft, foreign.orchestrator.directory.draft
        known._draft_info = None
        monitor = asyncio.create_task(known.monitor())
        await asyncio.sleep(0.1)
        assert not monitor.done()
        generation = await stack.client.complete(PROMPT, GenerateOptions(max_tokens=4))
        assert generation.started.drafter == "prompt_lookup"
        known.draft = own
        await asyncio.sleep(0.1)
        generation = await stack.client.complete(PROMPT, GenerateOptions(max_tokens=4))
        assert generation.started.drafter == "model"
        monitor.cancel()

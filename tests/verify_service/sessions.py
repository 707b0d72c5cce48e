"""Sessions of a verify engine, directly and over gRPC."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import grpc

from flyspec import rpc, wire
from flyspec.config import VerifySettings
from flyspec.prefix import TokenSequence
from flyspec.rpc.sizes import MAX_STREAMS
from flyspec.rules import Rule
from flyspec.v1 import verify_pb2_grpc
from flyspec.values.admin import TokenizerBundle
from flyspec.values.rounds import VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.plain_tokens import one_by_one
from tests.waiting import until
from verify_service.engine import VerifyEngine
from verify_service.server import SERVICE_NAME
from verify_service.service import VerifyServicer

GREEDY = SamplingParams()
EXACT = Rule("exact")
PROMPT = [0, 17, 45, 120, 33, 250, 91, 14]
SHORT_PROMPT = PROMPT[:4]
HELD = len(SHORT_PROMPT)


def tokenizer_of(*eos):
    """Return a bundle that says only which tokens end a text."""
    return TokenizerBundle(b"", "", eos, eos, None, "", "{}")


@asynccontextmanager
async def engine_over(model, tokenizer=None, **options):
    """A running engine over a scripted model, whose texts end at 31."""
    engine = VerifyEngine(model, tokenizer or tokenizer_of(31), 64, **options)
    await asyncio.wrap_future(engine.start())
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


@asynccontextmanager
async def serving(engine, tokenizer, max_streams=MAX_STREAMS, **settings):
    """A server of an engine; its address."""
    servicer = VerifyServicer(engine, tokenizer, VerifySettings(model="x", **settings))
    add = verify_pb2_grpc.add_VerifyServiceServicer_to_server
    server = rpc.GrpcServer("127.0.0.1", 0, [(add, servicer)], [SERVICE_NAME], max_streams)
    try:
        yield f"127.0.0.1:{await server.start()}"
    finally:
        await server.stop(0)


def opening(tokens, rule=EXACT, sampling=GREEDY, seed=0):
    return VerifyOpen(tokens, len(tokens), rule, sampling, seed)


async def answers(engine, session, round_, distributions=()):
    """Return a round's verdicts, per token in plain decoding; raise what ended it."""
    inbox, result = engine.submit(session, round_, distributions), []
    while not result or not result[-1].last:
        answer = await asyncio.wait_for(inbox.get(), 120)
        if isinstance(answer, Exception):
            raise answer
        result += one_by_one([answer])
    return result


async def speculate(engine, open_, num_tokens, propose):
    """Run rounds with the drafts and parents of `propose(tokens)`; return text and rounds."""
    session, sequence, round_id = engine.open(open_), TokenSequence(open_.token_ids), 0
    start = len(sequence)
    while len(sequence) < start + num_tokens:
        round_id += 1
        drafts, parents = propose(sequence.tokens)
        round_ = VerifyRound(
            round_id, len(sequence), [], drafts, draft_parents=parents, prefix_hash=sequence.hash
        )
        (verdict,) = await answers(engine, session, round_)
        path = verdict.path if parents else range(len(drafts))
        assert len(verdict.decisions) == len(path)
        kept = [drafts[i] for i in path[: verdict.num_accepted]]
        sequence.extend([*kept, verdict.next_token_id])
    engine.close(session)
    return sequence.tokens[start : start + num_tokens], round_id


def open_message(token_ids=SHORT_PROMPT, rule="exact", **changes):
    return wire.encode(
        VerifyOpen(token_ids, len(token_ids), Rule(rule, **changes), SamplingParams(), 1)
    )


def rules_message(*others):
    """Opens a session with the rule fuzzy and these."""
    fuzzy = Rule("fuzzy")
    prompt = SHORT_PROMPT, len(SHORT_PROMPT)
    return wire.encode(VerifyOpen(*prompt, fuzzy, SamplingParams(), 1, other_rules=others))


def round_message(drafts=(), keep=HELD, plain=1, segments=()):
    return wire.encode(
        VerifyRound(1, keep, [], drafts, max_plain_tokens=plain, rule_segments=segments)
    )


async def status_of(call):
    """Read to the end; (code, message)."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


async def drained(engine):
    """Wait until it has no session."""
    return await until(lambda: engine.sessions.active == 0)

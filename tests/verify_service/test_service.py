"""The verify service over gRPC: statuses, messages, hostile ones, leaks."""

import asyncio
import math
from collections import Counter

import grpc
import numpy as np
import pytest
import torch

from flyspec import rpc, wire
from flyspec.engine.loading import load_model
from flyspec.engine.runner import ModelRunner
from flyspec.rpc import malformed
from flyspec.rules import Rule
from flyspec.tokenizer import Tokenizer
from flyspec.v1 import verify_pb2, verify_pb2_grpc
from flyspec.values.admin import VerifyServiceInfo
from flyspec.values.chat import Chat
from flyspec.values.rounds import DraftDistributions, RuleSegment, StagedOn, Verdict, VerifyRound
from flyspec.values.tokens import TokenDistribution
from tests.hostile import fuzz, logged
from tests.scripted_heads import ScriptedHead
from tests.verify_service.sessions import (
    HELD,
    drained,
    open_message,
    round_message,
    rules_message,
    serving,
    status_of,
)
from tests.waiting import until
from verify_service.engine import VerifyEngine
from verify_service.heads import Heads
from verify_service.server import SERVICE_NAME


def owned_message(orchestrator_id):
    message = open_message()
    message.open.orchestrator_id = orchestrator_id
    return message


def halves(*values):
    return np.array(values, "<f2").tobytes()


def sent(log_probs, token_ids=()):
    piece = DraftDistributions(1, HELD, [TokenDistribution(log_probs, token_ids)])
    return wire.encode(piece)


def with_round(**fields):
    return verify_pb2.VerifyRequest(
        round=verify_pb2.VerifyRound(round_id=1, keep_length=HELD, **fields)
    )


def with_window(target_logprobs):
    window = verify_pb2.OpenWindow(
        position=HELD, target_token_id=5, remaining_matches=1, target_logprobs=target_logprobs
    )
    return with_round(append_token_ids=[6], draft_token_ids=[7], open_window=window)


def point_masses(count, round_id=1, first=HELD):
    piece = DraftDistributions(round_id, first, [TokenDistribution()] * count)
    return wire.encode(piece)


STAGED = VerifyRound(2, HELD + 1, [], [], staged_on=StagedOn(1, HELD, 9))
BEFORE_OPENING = [
    ([round_message()], "must be `open`"),
    ([open_message([])], "empty"),
    ([owned_message("x" * 65)], "orchestrator_id"),
    ([open_message([400])], "ids 0 to 399"),
    ([open_message([5] * 257)], "context of 256"),
    ([open_message(rule="loose")], "exact, fly"),
    ([open_message(rule="fly", fly_entropy_threshold=-0.1)], "rule.fly_entropy_threshold"),
    ([rules_message(*[Rule("exact")] * 17)], "open.other_rules: 17 rules"),
    ([rules_message(Rule("fly"), Rule("fyl"))], "open.other_rules[1].name"),
    (
        [rules_message(Rule("margin", guarded_token_ids=(5,) * 1025))],
        "open.other_rules[0].guarded_token_ids: 1025 tokens",
    ),
    ([rules_message(Rule("kl", divergence_top_k=3))], "need different draft distributions"),
    ([verify_pb2.VerifyRequest()], "set one of"),
]
OPENED = [
    ([open_message()], "one session"),
    ([round_message([7], segments=[RuleSegment(HELD, 1)])], "rule_index must be between 0 and 0"),
    ([round_message([400])], "draft_token_ids"),
    ([round_message([5] * 65)], "at most 64"),
    ([round_message(plain=65)], "max_plain_tokens"),
    ([round_message(keep=9)], "whole prefix"),
    ([round_message([7]), wire.encode(STAGED)], "a staged round needs drafts"),
    ([with_round(draft_token_ids=[7], remaining_loose_cost_nats=math.nan)], "at least 0, got"),
    ([with_round(draft_token_ids=[7], remaining_loose_cost_nats=-0.5)], "at least 0"),
    ([with_round(draft_token_ids=[7], draft_survivals=[math.nan])], "between 0 and 1"),
    ([with_round(draft_token_ids=[7], draft_survivals=[1.5])], "between 0 and 1"),
    ([with_round(draft_token_ids=[7], num_top_tokens=17)], "between 0 and 16, got 17"),
    ([with_round(append_token_ids=[5] * 1_000_000)], "exceed the model's context"),
    ([with_round(draft_token_ids=[5] * 1_000_000)], "at most 64"),
    ([with_window({"top_token_ids": [5] * 21})], "at most 20"),
    ([with_window({"top_token_ids": [400], "top_logprobs": [-1.0]})], "400 is out of range"),
    ([with_window({"top_token_ids": [5]})], "a number for each"),
    ([with_window({"top_token_ids": [5], "top_logprobs": [math.nan]})], "a number for each"),
    ([with_window({"logprob": math.nan})], "a number for each"),
]
FUZZY = [
    # Looked at as they come, before their round, whatever the rule.
    ([sent(halves(-1, math.inf), (1, 2))], "+inf"),
    ([sent(halves(*[-6.0] * 399, math.nan))], "NaN"),
    ([sent(b"\x80")], "1 bytes for 400"),
    ([sent(halves(-1), (400,))], "between 0 and 399"),
    ([sent(b"", tuple([5] * 500))], "at most 400"),
    ([point_masses(2), round_message([5])], "2 for 1 drafted"),
    ([point_masses(1, round_id=2), round_message([5])], "for round 2"),
    ([point_masses(1, first=5), round_message([5])], "from position 5"),
    ([point_masses(65)], "between 1 and 64"),
    ([round_message([5])], "distributions"),
]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        *BEFORE_OPENING,
        *(([open_message(), *messages], text) for messages, text in [*OPENED, *FUZZY[:5]]),
        *(([open_message(rule="fuzzy"), *messages], text) for messages, text in FUZZY),
    ],
)
async def test_bad_messages_close_their_session_only(service, engine, messages, text):
    async with service() as stub:
        good = stub.Verify()
        await good.write(open_message())
        bad = stub.Verify()
        for message in messages:
            await bad.write(message)
        code, details = await status_of(bad)
        expected = "FAILED_PRECONDITION" if text == "whole prefix" else "INVALID_ARGUMENT"
        assert (code.name, text in details) == (expected, True), (code, details)
        await good.write(round_message([7, 8]))
        assert wire.decode(Verdict, await good.read()).last
        await good.done_writing()
        assert (await status_of(good))[0] is grpc.StatusCode.OK
        assert await drained(engine)


async def test_a_full_service_says_so_and_recovers(service, engine):
    async with service() as stub:
        calls = []
        for _ in range(4):
            calls.append(stub.Verify())
            await calls[-1].write(open_message())
            await calls[-1].write(round_message())
            await calls[-1].read()
        extra = stub.Verify()
        await extra.write(open_message())
        code, details = await status_of(extra)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-sessions" in details
        for call in calls:
            call.cancel()
        assert await drained(engine)


async def test_who_waits_for_a_slot_is_told_when_it_is_there_oldest_first(service, engine):
    async with service() as stub:

        async def opened(name, waited_ms):
            call = stub.Verify()
            message = open_message()
            message.open.waited_ms, message.open.orchestrator_id = waited_ms, name
            await call.write(message)
            return call

        async def seen(name):
            request = verify_pb2.VerifyServiceDescribeRequest(orchestrator_id=name)
            sessions = (await stub.Describe(request)).sessions
            return sessions.others, sessions.waiting, sessions.others_waiting

        calls = [await opened("a", 0) for _ in range(4)]
        for call in calls:
            assert (await call.read()).keep_length == HELD
        assert await seen("a") == (0, 0, 0)
        assert await seen("b") == (4, 0, 0)
        young = await opened("b", 10)
        await until(lambda: engine.sessions.waiting == 1)
        assert await seen("a") == (0, 1, 1)
        older = await opened("b", 60_000)
        code, details = await status_of(young)  # a quarter of four may wait
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-sessions" in details
        calls[0].cancel()
        assert (await older.read()).keep_length == HELD
        await older.write(round_message())
        assert (await older.read()).round_id == 1
        leaving = await opened("a", 0)
        await until(lambda: engine.sessions.waiting == 1)
        leaving.cancel()
        await until(lambda: engine.sessions.waiting == 0)
        for call in (*calls, older):
            call.cancel()
        assert await drained(engine)


async def test_a_silent_client_loses_its_session(service, engine):
    async with service(idle_timeout_s=0.05) as stub:
        call = stub.Verify()
        await call.write(open_message())
        code, details = await status_of(call)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "open another" in details
        assert await drained(engine)


async def test_describe_and_tokenizer(service, loaded):
    async with service() as stub:
        info = wire.decode(
            VerifyServiceInfo, await stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
        )
        assert info.model == loaded.info
        assert info.sessions.limit == 4
        assert "fly-reference" in info.rules
        messages = [m async for m in stub.GetTokenizer(verify_pb2.GetTokenizerRequest())]
        bundle = wire.tokenizer_of(messages)
        assert bundle == loaded.tokenizer
        assert bundle.eos_token_ids == (1,)
        assert set(bundle.control_token_ids) == {0, 1, 2}
        tokenizer = Tokenizer(bundle)
        text = "The cat sat 😀"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_chat(Chat.of_user("hi"))[0] == 0


SERVICE = f"/{SERVICE_NAME}/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
NO_MESSAGE = b"\xff\xff\xff"


@pytest.fixture
async def channel(engine, loaded):
    """A channel as other clients than flyspec's open it."""
    async with (
        serving(engine, loaded.tokenizer) as address,
        grpc.aio.insecure_channel(address) as opened,
    ):
        yield opened


async def test_hundreds_of_hostile_messages_change_nothing(target_dir, loaded, monkeypatch):
    monkeypatch.setattr(malformed, "REQUEST_TIMEOUT_S", 2.0)
    runner = ModelRunner(load_model(target_dir, "cpu", "float64"), num_slots=40)
    engine = VerifyEngine(runner, loaded.tokenizer, 256, lambda: torch.set_num_threads(1))
    info = engine.info
    head = ScriptedHead(lambda tokens: sum(tokens) % 400)
    engine.heads = Heads({"head": head}, info.vocab_size, info.context_length)
    engine.start()
    try:
        async with serving(engine, loaded.tokenizer, idle_timeout_s=6.0) as address:
            report = await fuzz("verify", {"verify": address}, 150)
        assert report.statuses["OK"] > 8
        assert report.statuses["INVALID_ARGUMENT"] > 16
        assert head.steps
        assert not engine.heads.failures["head"]
        # The engine's thread hears of the last ones a moment later.
        await until(lambda: runner.cache.num_free == runner.cache.num_slots)
    finally:
        engine.stop()


@pytest.mark.parametrize(
    "method", [SERVICE + "Describe", SERVICE + "GetTokenizer", SERVICE + "Verify", REFLECTION,
               "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"],
)  # fmt: skip
async def test_what_is_no_message_is_the_clients_fault(channel, method):
    with logged() as lines:
        call = channel.stream_stream(method)()
        await call.write(NO_MESSAGE)
        await call.done_writing()
        code, details = await status_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be parsed" in details
    assert not lines


@pytest.mark.parametrize("method", ["Describe", "GetTokenizer"])
async def test_a_call_without_its_request_is_told_so(channel, method, monkeypatch):
    closed = channel.stream_stream(SERVICE + method)()
    await closed.done_writing()
    code, details = await status_of(closed)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "without its request" in details
    monkeypatch.setattr(malformed, "REQUEST_TIMEOUT_S", 0.1)
    silent = channel.stream_stream(SERVICE + method)()
    assert (await status_of(silent))[0] is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("method", ["Describe", "GetTokenizer"])
async def test_a_call_with_two_requests_is_told_so(channel, method):
    """Left unread, the second would leak memory."""
    call = channel.stream_stream(SERVICE + method)()
    for _ in range(2):
        await call.write(b"")
    code, details = await status_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "more than one request" in details


async def test_a_method_that_grpc_does_not_implement_is_no_bug_of_the_server(channel):
    with logged() as lines:
        call = channel.unary_unary("/grpc.health.v1.Health/List")(b"")
        code, details = await call.code(), await call.details()
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "Health/List is not implemented" in details
    assert not lines


async def test_streams_that_say_nothing_keep_nobody_out_and_end(engine, loaded):
    """Nor does opening more of them than one connection allows."""
    async with (
        serving(engine, loaded.tokenizer, max_streams=300, idle_timeout_s=1.0) as address,
        grpc.aio.insecure_channel(address) as silent,
        rpc.connect(address) as channel,
    ):
        calls = [silent.stream_stream(SERVICE + "Verify")() for _ in range(400)]
        await asyncio.sleep(0.1)
        call = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
        await call.write(open_message())
        await call.write(round_message([7, 8]))
        assert wire.decode(Verdict, await call.read()).last
        assert engine.sessions.active == 1
        codes = Counter([(await status_of(c))[0].name for c in calls])
        # Those too many wait at the client, or are refused if it had not heard of the limit yet.
        assert set(codes) <= {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
        assert codes["DEADLINE_EXCEEDED"] >= 300


def numbered(round_id, **fields):
    return wire.encode(VerifyRound(round_id, HELD, [], [7], **fields))


@pytest.mark.parametrize("ids", [(5, 5), (2**64 - 1, 0)])
async def test_rounds_come_once_and_in_order(service, engine, ids):
    async with service() as stub:
        call = stub.Verify()
        await call.write(open_message())
        await call.write(numbered(ids[0]))
        await call.read()
        await call.write(numbered(ids[1]))
        code, details = await status_of(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "once and in order" in details
        assert await drained(engine)


async def test_a_client_that_does_not_read_loses_its_session(engine, loaded):
    async with serving(engine, loaded.tokenizer, idle_timeout_s=0.3) as address:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
            opening = open_message()
            opening.open.logprobs = 20
            await call.write(opening)
            for round_id in range(1, 200):
                round_ = VerifyRound(round_id, HELD, [], [], max_plain_tokens=64)
                await call.write(wire.encode(round_))
            assert await drained(engine)
            code, details = await status_of(call)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "client read nothing" in details

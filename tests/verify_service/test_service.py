"""The verify service over gRPC: statuses, messages, leaks."""

from __future__ import annotations

import grpc
import pytest

from flyspec import wire
from flyspec.rules import Rule
from flyspec.tokenizer import Tokenizer
from flyspec.v1 import verify_pb2
from flyspec.values.admin import VerifyServiceInfo
from flyspec.values.chat import Chat
from flyspec.values.rounds import RuleSegment, Verdict
from tests.verify_service.sessions import (
    HELD,
    drained,
    open_message,
    round_message,
    rules_message,
    status_of,
)
from tests.waiting import until


def owned_message(orchestrator_id):
    message = open_message()
    message.open.orchestrator_id = orchestrator_id
    return message


@pytest.mark.parametrize(
    ("messages", "code", "text"),
    [
        ([round_message()], "INVALID_ARGUMENT", "must be `open`"),
        ([open_message(), open_message()], "INVALID_ARGUMENT", "one session"),
        ([open_message([])], "INVALID_ARGUMENT", "empty"),
        ([owned_message("x" * 65)], "INVALID_ARGUMENT", "orchestrator_id"),
        ([open_message([400])], "INVALID_ARGUMENT", "ids 0 to 399"),
        ([open_message([5] * 257)], "INVALID_ARGUMENT", "context of 256"),
        ([open_message(rule="loose")], "INVALID_ARGUMENT", "exact, fly"),
        (
            [open_message(rule="fly", fly_entropy_threshold=-0.1)],
            "INVALID_ARGUMENT",
            "rule.fly_entropy_threshold",
        ),
        ([rules_message(*[Rule("exact")] * 17)], "INVALID_ARGUMENT", "open.other_rules: 17 rules"),
        ([rules_message(Rule("fly"), Rule("fyl"))], "INVALID_ARGUMENT", "open.other_rules[1].name"),
        (
            [rules_message(Rule("margin", guarded_token_ids=(5,) * 1025))],
            "INVALID_ARGUMENT",
            "open.other_rules[0].guarded_token_ids: 1025 tokens",
        ),
        (
            [rules_message(Rule("kl", divergence_top_k=3))],
            "INVALID_ARGUMENT",
            "need different draft distributions",
        ),
        (
            [open_message(), round_message([7], segments=[RuleSegment(HELD, 1)])],
            "INVALID_ARGUMENT",
            "rule_segments[0].rule_index must be between 0 and 0",
        ),
        ([open_message(), round_message([400])], "INVALID_ARGUMENT", "draft_token_ids"),
        ([open_message(), round_message([5] * 65)], "INVALID_ARGUMENT", "at most 64"),
        ([open_message(), round_message(plain=65)], "INVALID_ARGUMENT", "max_plain_tokens"),
        ([open_message(), round_message(keep=9)], "FAILED_PRECONDITION", "whole prefix"),
        ([verify_pb2.VerifyRequest()], "INVALID_ARGUMENT", "set one of"),
    ],
)
async def test_bad_messages_close_their_session_only(service, engine, messages, code, text):
    async with service() as stub:
        good = stub.Verify()
        await good.write(open_message())
        bad = stub.Verify()
        for message in messages:
            await bad.write(message)
        got, details = await status_of(bad)
        assert (got.name, text in details) == (code, True), (got, details)
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


async def test_a_cancelled_client_in_mid_decoding_frees_its_slot(service, engine):
    async with service() as stub:
        call = stub.Verify()
        await call.write(open_message())
        await call.write(round_message(plain=64))
        await call.read()
        call.cancel()
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

"""Generations in plain values over scripted services: no gRPC, no port, no model."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from flyspec.errors import (
    DeadlineExceededError,
    IncompatibleError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.security import ApiKey, Scope
from flyspec.values.chat import Chat
from flyspec.values.generation import (
    Chunk,
    Completion,
    FinishReason,
    RecoveryKind,
    RoundRecord,
    Started,
)
from flyspec.values.requests import GenerateOptions, GenerationRequest
from flyspec.values.tokens import Origin
from orchestrator.admission.clients import Caller
from tests.orchestrator.scripted import EOS, Target, script, scripted
from tests.orchestrator.tokenizer import BUNDLE, TOKENIZER

PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def no_ports(monkeypatch):
    """No port is opened and no connection is made."""

    def refuse(*args, **options):
        raise AssertionError("gRPC in a generation without it")

    for name in ("server", "insecure_channel", "secure_channel"):
        monkeypatch.setattr(grpc.aio, name, refuse)


def request(prompt=PROMPT, **options):
    return GenerationRequest(prompt, GenerateOptions(**options))


def expected(prompt, count, next_token=script):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


async def run(inside, asked, **caller):
    return [event async for event in inside.generations.run(asked, Caller(**caller))]


def tokens_of(events):
    return [token for e in events if isinstance(e, Chunk) for token in e.token_ids]


@pytest.mark.parametrize("k", [0, 1, 4, 15])
async def test_a_generation_is_the_script(k):
    async with scripted() as inside:
        asked = request(num_speculative_tokens=k, max_tokens=60, return_rounds=True)
        started, *between, completion = await run(inside, asked, request_id="r-1")
        assert isinstance(started, Started)
        assert (started.request_id, started.model) == ("r-1", "scripted")
        assert started.drafter == ("guess" if k else "")
        assert {type(e) for e in between} == {Chunk, RoundRecord}
        assert tokens_of(between) == expected(PROMPT, 60)
        chunks = [e for e in between if isinstance(e, Chunk)]
        rounds = [e for e in between if isinstance(e, RoundRecord)]
        assert "".join(c.text for c in chunks) == TOKENIZER.decode(tokens_of(between))
        assert [c.num_final_tokens for c in chunks][-1] == 60
        origins = {origin for c in chunks for origin in c.origins}
        assert origins == ({Origin.PLAIN} if not k else origins - {Origin.PLAIN})
        assert isinstance(completion, Completion)
        assert completion.finish_reason is FinishReason.LENGTH
        assert (completion.prompt_tokens, completion.completion_tokens) == (3, 60)
        counts = completion.speculation
        assert counts.num_rounds == len(rounds)
        assert counts.num_draft_tokens == sum(len(r.decisions) for r in rounds)
        assert counts.num_rollbacks == counts.num_loose_tokens == completion.num_recoveries == 0
        assert [d.drafter for d in completion.drafters] == (["guess"] if k else [])
        assert 0 < completion.timings.time_to_first_token_ns <= completion.timings.total_ns
        assert not any(inside.left)


async def test_text_and_chats_are_prompts_too():
    async with scripted() as inside:
        started, *rest = await run(inside, request("The cat sat", max_tokens=9))
        assert started.prompt_token_ids == TOKENIZER.encode("The cat sat")
        assert tokens_of(rest) == expected(started.prompt_token_ids, 9)
        with pytest.raises(InvalidArgumentError, match="chat: "):  # it has no template
            await run(inside, request(Chat.of_user("The cat sat")))


async def test_the_end_and_stop_strings_end_it():
    def ends(tokens):
        return EOS if len(tokens) >= 20 else script(tokens)

    async with scripted(next_token=ends) as inside:
        *events, completion = await run(inside, request())
        assert tokens_of(events) == expected(PROMPT, 18, ends)
        assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, None)
        text = "".join(e.text for e in events if isinstance(e, Chunk))
        stop = text[5:7]
        *events, completion = await run(inside, request(stop=[stop]))
        assert completion.stop_reason == stop
        assert "".join(e.text for e in events if isinstance(e, Chunk)) == text[: text.index(stop)]
        assert not any(inside.left)


async def test_generations_at_once_do_not_meet():
    async with scripted(pause_s=0.001) as inside:
        prompts = [[5, 6, n] for n in range(3, 15)]
        all_events = await asyncio.gather(
            *(run(inside, request(p, max_tokens=30), address=str(p)) for p in prompts)
        )
        for prompt, events in zip(prompts, all_events, strict=True):
            assert tokens_of(events) == expected(prompt, 30)
        assert not any(inside.left)


@pytest.mark.parametrize("rests", [False, True])
async def test_a_repeated_run_waits_for_its_drafter(rests):
    """Which times out without it, in this generation and, if it `rests`, in one before."""
    async with scripted() as inside:
        asked = request(max_tokens=30)
        *first, done = await run(inside, asked)
        ks = done.num_draft_tokens_per_round
        assert max(ks) == 4
        drafter = inside.drafters["drafter:1"]
        drafter.timeout_s, drafter.pause_s = 0.05, 0.1
        if rests:
            assert (await run(inside, asked))[-1].num_recoveries
        asked = request(max_tokens=30, num_draft_tokens_per_round=ks, num_speculative_tokens=4)
        *again, repeated = await run(inside, asked)
        origins = [[o for e in events if isinstance(e, Chunk) for o in e.origins]
                   for events in (first, again)]  # fmt: skip
        assert origins[0] == origins[1]
        assert repeated.num_draft_tokens_per_round == ks
        assert (repeated.num_recoveries, repeated.speculation.num_unrepeated_rounds) == (0, 0)


async def test_a_repeated_run_says_where_its_drafter_was_lost():
    async with scripted() as inside:
        *_, done = await run(inside, request(max_tokens=30))
        ks = done.num_draft_tokens_per_round
        inside.drafters["drafter:1"].lost = True
        asked = request(max_tokens=30, num_draft_tokens_per_round=ks, num_speculative_tokens=4)
        *_, repeated = await run(inside, asked)
        assert repeated.speculation.num_unrepeated_rounds > 0


async def test_a_tokenizer_that_cannot_be_read_is_named(monkeypatch):
    async def tokenizer(self):
        return replace(BUNDLE, tokenizer_json=BUNDLE.tokenizer_json[:-9])

    monkeypatch.setattr(Target, "tokenizer", tokenizer)
    with pytest.raises(IncompatibleError, match="tokenizer of the verify service at target:1"):
        async with scripted():
            pass


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_one_that_is_closed_leaves_nothing_behind():
    async with scripted(pause_s=0.001) as inside:
        async with aclosing(inside.generations.run(request())) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    assert inside.sessions == 2
                    break
        assert not any(inside.left)


async def test_one_that_is_cancelled_leaves_nothing_behind():
    async with scripted(pause_s=0.005, max_concurrent=1) as inside:
        running = asyncio.create_task(run(inside, request(max_tokens=200)))
        await until(lambda: inside.sessions == 2)
        waiting = asyncio.create_task(run(inside, request()))
        await until(lambda: inside.admission.waiting)
        for task in (waiting, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert inside.admission.waiting == 0
        assert not any(inside.left)


async def test_who_is_not_let_in_is_told_why():
    async with scripted(pause_s=0.01, max_concurrent=1, max_waiting=1) as inside:
        tasks = [asyncio.create_task(run(inside, request(max_tokens=8))) for _ in range(2)]
        await asyncio.sleep(0.005)
        with pytest.raises(ResourceExhaustedError, match="all slots are taken") as caught:
            await run(inside, request())
        assert caught.value.retry_after_s > 0
        assert all(
            tokens_of(events) == expected(PROMPT, 8) for events in await asyncio.gather(*tasks)
        )
        key = ApiKey("k", frozenset([Scope.GENERATE]), max_tokens_per_request=10)
        with pytest.raises(PermissionDeniedError, match="prompt and output may reach 23 tokens"):
            await run(inside, request(max_tokens=20), key=key)
        for asked, message in (
            (request([]), "prompt: no token ids"),
            (request([-1]), "prompt: token id -1 is out of range"),
            (request(max_tokens=-1), "max_tokens must be at least 1, got -1"),
            (request(num_speculative_tokens=-1), "num_speculative_tokens must be between 0 and 64"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                await run(inside, asked)
        inside.admission.drain()
        with pytest.raises(UnavailableError, match="the server is draining"):
            await run(inside, request())
        assert not any(inside.left)


async def test_a_deadline_ends_the_generation_and_not_what_its_reader_does():
    async with scripted(pause_s=0.005) as inside:
        loop = asyncio.get_running_loop()
        with pytest.raises(DeadlineExceededError, match="of up to 256 prompt and output"):
            await run(inside, request(ignore_eos=True), deadline=loop.time() + 0.05)
        naps = []

        async def nap_at_every_event():
            caller = Caller(deadline=loop.time() + 0.05)
            async with aclosing(inside.generations.run(request(), caller)) as events:
                async for _ in events:
                    began = time.monotonic()
                    await asyncio.sleep(0.1)
                    naps.append(time.monotonic() - began)

        with pytest.raises(DeadlineExceededError, match="allow more time"):
            await nap_at_every_event()
        assert len(naps) == 1
        assert naps[0] >= 0.09, "not cut short"
        assert not any(inside.left)


@pytest.mark.parametrize("targets", [1, 2])
async def test_a_target_lost_in_mid_stream_is_opened_again(targets):
    async with scripted(targets=targets, pause_s=0.001, probe_interval_s=0.02) as inside:
        events, hurt = [], None
        async for event in inside.generations.run(request(max_tokens=100)):
            events.append(event)
            if isinstance(event, Chunk) and hurt is None:
                (hurt,) = [t for t in inside.targets.values() if t.sessions]
                hurt.lost = True
                asyncio.get_running_loop().call_later(0.1, setattr, hurt, "lost", False)
        assert tokens_of(events) == expected(PROMPT, 100)
        (recovery,) = events[-1].recoveries
        assert recovery.kind is RecoveryKind.TARGET_REOPENED
        assert "is lost" in recovery.reason
        assert (recovery.successor == hurt.address) == (targets == 1)
        assert sum(t.opened for t in inside.targets.values()) >= 2
        assert not any(inside.left)


async def test_a_lost_drafter_costs_nothing_but_its_drafts():
    async with scripted(pause_s=0.001) as inside:
        (drafter,) = inside.drafters.values()
        events = []
        async for event in inside.generations.run(request(max_tokens=100)):
            events.append(event)
            drafter.lost = len(events) > 5
        assert tokens_of(events) == expected(PROMPT, 100)
        assert events[-1].recoveries[0].kind is RecoveryKind.DRAFTER_FALLBACK
        assert not any(inside.left)


async def test_what_ended_a_generation_is_counted():
    async with scripted() as inside:

        def count(status):
            requests = inside.observer.metrics.requests
            return sum(
                s.value
                for s in requests.collect()[0].samples
                if s.name.endswith("_total") and s.labels["status"] == status
            )

        await run(inside, request(max_tokens=3))
        assert count("OK") == 1
        with pytest.raises(InvalidArgumentError):
            await run(inside, request([]))
        with pytest.raises(InvalidArgumentError):
            inside.generations.refuse(InvalidArgumentError("not JSON"))
        assert count("INVALID_ARGUMENT") == 2
        events = inside.generations.run(request())
        await anext(events)
        await events.aclose()
        assert count("CANCELLED") == 1
        events = inside.generations.run(request())
        await anext(events)
        with pytest.raises(DeadlineExceededError):
            await events.athrow(DeadlineExceededError("the client read nothing"))
        assert count("DEADLINE_EXCEEDED") == 1
        assert not any(inside.left)

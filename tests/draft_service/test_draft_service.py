"""The draft service over gRPC: proposals, errors, limits, hostile messages, cancellation."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service import service as service_module
from draft_service.loading import AHEAD_SLOTS
from flyspec import wire
from flyspec.drafter_names import DRAFTER_KINDS, NEED_DATASTORE
from flyspec.engine import cache_size, loading
from flyspec.engine.device_memory import DeviceMemory
from flyspec.errors import ConfigError
from flyspec.rpc import malformed
from flyspec.v1 import draft_pb2, draft_pb2_grpc
from flyspec.values.admin import DraftServiceInfo
from flyspec.values.rounds import DistributionSpec, DraftAdvance, DraftOpen
from flyspec.values.tokens import Origin, SamplingParams
from tests.draft_service.draft_harness import GREEDY, tokens_of
from tests.hostile import fuzz
from tests.tiny import CONTEXT_LENGTH, VOCAB_SIZE
from tests.waiting import until

Code = grpc.StatusCode


def runner_of(service):
    assert service.engine is not None
    return service.engine.model


async def test_describe(service, loaded):
    response = await service.stub.Describe(draft_pb2.DraftServiceDescribeRequest())
    info = wire.decode(DraftServiceInfo, response)
    assert {d.name for d in info.drafters} == set(DRAFTER_KINDS) - NEED_DATASTORE
    assert info.drafters[0].name == "model"
    model = info.drafters[0].model
    assert model is not None
    assert (model.vocab_size, model.context_length) == (VOCAB_SIZE, CONTEXT_LENGTH)
    assert model.tokenizer_fingerprint == loaded.info.tokenizer_fingerprint
    assert info.drafters[2].model is None
    assert info.sessions.limit == 32
    assert info.max_speculative_tokens == 64
    assert info.protocol_version == 1


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [("multi_level", SamplingParams(1.0, top_p=0.95)), ("prompt_lookup", GREEDY)],
)
async def test_rounds_equal_fresh_sessions(service, prompt, drafter, sampling):
    client = await service.client().open(prompt, sampling, 9, drafter)
    tokens = list(prompt)
    for round_id, (accepted, append) in enumerate([(0, []), (4, [7]), (0, [8, 9]), (8, [3])], 1):
        keep = min(len(tokens), len(prompt) + accepted)
        chunks = await client.advance(keep, append, 8, round_id)
        tokens = tokens[:keep] + append
        assert chunks[-1].last
        assert not any(c.last for c in chunks[:-1])
        position = len(tokens)
        for chunk in chunks:
            assert (chunk.round_id, chunk.start_position) == (round_id, position)
            assert (chunk.keep_length, chunk.next_token_id) == (len(tokens) - 1, tokens[-1])
            position += len(chunk.token_ids)
        fresh = await service.client().open(tokens, sampling, 9, drafter)
        expected = await fresh.advance(len(tokens), [], 8)
        assert tokens_of(chunks) == tokens_of(expected)
        fresh.call.cancel()
        tokens += tokens_of(chunks)
    await client.call.done_writing()
    assert (await client.status())[0] is Code.OK
    await until(lambda: service.active == 0)


async def test_chunks_timings_and_origins(service_with, prompt):
    async with service_with(chunk_tokens=3) as service:
        client = await service.client().open(prompt)
        chunks = await client.advance(len(prompt), max_tokens=8, round_id=5)
        assert [len(c.token_ids) for c in chunks] == [3, 3, 2]
        assert {o for c in chunks for o in c.origins} == {Origin.EXACT_MODEL}
        times = chunks[-1].timings
        assert 0 < times.queue_ns < times.service_ns
        assert 0 < times.model_ns < times.service_ns
        assert chunks[0].timings.service_ns == 0


async def test_zero_tokens_only_moves(service, prompt):
    client = await service.client().open(prompt)
    (chunk,) = await client.advance(3, [9, 9], max_tokens=0)
    assert (chunk.token_ids, chunk.keep_length, chunk.next_token_id) == ([], 4, 9)
    with_more = await client.advance(5, [], max_tokens=2)
    assert len(tokens_of(with_more)) == 2
    client.call.cancel()
    await until(lambda: service.active == 0)


CODES = {"oracle": Code.NOT_FOUND, "keep_length is 4": Code.FAILED_PRECONDITION}
BAD_OPENINGS = [
    ("no drafter 'oracle'; this service has model, multi_level, prompt_", {"drafter": "oracle"}),
    ("at least one token", {"token_ids": []}),
    ("open.token_ids[1]: 400 is not below the draft model's voc", {"token_ids": [1, VOCAB_SIZE]}),
    ("257 tokens, but the drafter model holds at most 256; shorten", {"token_ids": [1] * 257}),
    ("sampling.temperature", {"sampling": SamplingParams(-1.0)}),
    ("sampling.temperature", {"sampling": SamplingParams(float("nan"))}),
    ("sampling.logit_bias[4]", {"sampling": SamplingParams(logit_bias=((4, float("nan")),))}),
    ("logit_bias: 400 is not below", {"sampling": SamplingParams(logit_bias=((400, 1.0),))}),
    ("open.prompt_length must be between 0 (all) and 3, the number of", {"prompt_length": 4}),
    ("top_k must be between 0 (the whole vocab", {"distribution": DistributionSpec(1025)}),
]
BAD_ADVANCES = [
    ("advance.keep_length is 4 but this session holds 3 tokens", {"keep_length": 4}),
    ("at least one token", {"keep_length": 0}),
    ("advance.append_token_ids[0]: 400", {"keep_length": 3, "append": [400]}),
    ("257 tokens kept and appended, but", {"keep_length": 3, "append": [1] * 254}),
    ("at most 64; request fewer or raise --max-spec", {"keep_length": 3, "max_tokens": 65}),
]


@pytest.mark.parametrize(
    ("message", "opened", "advance"),
    [(m, fields, None) for m, fields in BAD_OPENINGS] + [(m, {}, a) for m, a in BAD_ADVANCES],
)
async def test_errors_close_that_session_only(service, message, opened, advance):
    other = await service.client().open([1, 2])
    client = await service.client().open(**{"token_ids": [1, 2, 3], **opened})
    if advance is not None:
        await client.send(**advance)
    status, details = await client.status()
    (code,) = [code for part, code in CODES.items() if part in message] or [Code.INVALID_ARGUMENT]
    assert (status, message in details) == (code, True), details
    assert len(tokens_of(await other.advance(2))) == 8
    other.call.cancel()
    await until(lambda: service.active == 0)


async def test_open_must_come_first_and_once(service):
    client = service.client()
    await client.send(1)
    status, details = await client.status()
    assert status is Code.INVALID_ARGUMENT
    assert "first message must be open" in details

    client = await service.client().open([1])
    await client.open([1])
    status, details = await client.status()
    assert status is Code.INVALID_ARGUMENT
    assert "open is only allowed as the first message" in details

    client = service.client()
    await client.call.write(draft_pb2.DraftRequest())
    assert (await client.status())[0] is Code.INVALID_ARGUMENT
    client = service.client()
    await client.call.done_writing()
    assert (await client.status())[0] is Code.OK
    await until(lambda: service.active == 0)


async def test_limit_and_reuse_of_slots(service_with):
    async with service_with(max_sessions=2) as service:
        first, second = [await service.client().open([1, 2]) for _ in range(2)]
        await first.advance(2)
        await second.advance(2)
        third = await service.client().open([1, 2])
        status, details = await third.status()
        assert status is Code.RESOURCE_EXHAUSTED
        assert "all 2 sessions are in use; retry later or raise --max-sessions" in details
        first.call.cancel()
        await until(lambda: service.active == 1)
        again = await service.client().open([1, 2])
        assert len(tokens_of(await again.advance(2))) == 8
        assert service.sessions.describe().sessions.opened_total == 3


async def test_idle_session_is_closed(service_with):
    async with service_with(idle_timeout_s=1.0) as service:
        idle = await service.client().open([1, 2])
        busy = await service.client().open([1, 2])
        ended = asyncio.create_task(idle.status())
        while not ended.done():
            await busy.advance(2)
            await asyncio.sleep(0.02)
        status, details = ended.result()
        assert status is Code.DEADLINE_EXCEEDED
        assert "no message for 1 s" in details
        assert service.active == 1
        silent = service.client()
        assert (await silent.status())[0] is Code.DEADLINE_EXCEEDED
        await until(lambda: service.active == 0)
        await until(lambda: runner_of(service).cache.num_free == 32 + AHEAD_SLOTS)


class Gate:
    """Holds the engine before a step until the test lets it go."""

    def __init__(self, service, monkeypatch):
        runner = runner_of(service)
        self.steps = 0
        self.go, self.waiting = threading.Semaphore(0), threading.Event()
        forward = runner.forward

        def gated(steps):
            self.waiting.set()
            self.go.acquire()
            self.steps += 1
            return forward(steps)

        monkeypatch.setattr(runner, "forward", gated)


async def test_cancel_in_mid_proposal_frees_the_slot_within_a_step(service_with, monkeypatch):
    async with service_with(max_sessions=1) as service:
        gate = Gate(service, monkeypatch)
        client = await service.client().open([1, 2])
        await client.send(2, max_tokens=64)
        await until(gate.waiting.is_set)
        assert runner_of(service).cache.num_free == AHEAD_SLOTS
        client.call.cancel()
        await until(lambda: service.active == 0)
        gate.go.release()
        await until(lambda: runner_of(service).cache.num_free == 1 + AHEAD_SLOTS)
        assert gate.steps == 1
        # The next session gets the slot and is not disturbed by what was under way.
        gate.go.release(100)
        client = await service.client().open([1, 2])
        after = tokens_of(await client.advance(2))
        other = await service.client().open([1, 2], drafter="multi_level")
        assert (await other.status())[0] is Code.RESOURCE_EXHAUSTED
    async with service_with() as service:
        assert after == tokens_of(await (await service.client().open([1, 2])).advance(2))


@pytest.mark.parametrize("drafter", ["model", "multi_level"])
async def test_the_next_request_ends_a_proposal(service_with, monkeypatch, drafter):
    async with service_with() as service:
        fresh = await service.client().open([1, 2, 3], drafter=drafter)
        expected = tokens_of(await fresh.advance(3, max_tokens=6))
        gate = Gate(service, monkeypatch)
        client = await service.client().open([1, 2], drafter=drafter)
        await client.send(2, max_tokens=64)
        await until(gate.waiting.is_set)
        await client.send(2, [3], max_tokens=6)
        await asyncio.sleep(0.2)  # until it has been read
        gate.go.release(100)
        first = await client.answer()
        assert {chunk.round_id for chunk in first} == {1}
        assert len(tokens_of(first)) < 20
        second = await client.answer()
        assert {chunk.round_id for chunk in second} == {2}
        assert tokens_of(second) == expected


async def test_the_last_request_is_answered_in_full(service):
    """Whenever it arrives: while the previous one is being answered, or just after."""
    fresh = await service.client().open([1, 2, 3])
    expected = tokens_of(await fresh.advance(3, max_tokens=6))
    client = await service.client().open([1, 2])
    for number in range(40):
        await client.send(2, max_tokens=4)
        await asyncio.sleep(0.0001 * (number % 40))
        await client.send(2, [3], max_tokens=6)
        await client.answer()
        assert tokens_of(await client.answer()) == expected
    fresh.call.cancel()
    client.call.cancel()


async def test_drafts_of_logits_that_are_not_finite_are_not_sent(service_with):
    async with service_with(log_level="error") as service:
        weights = runner_of(service).model.model.norm.weight
        well = weights.detach().clone()
        weights.data.fill_(torch.nan)
        client = await service.client().open([1, 2])
        await client.send(2)
        status, details = await client.status()
        assert status is Code.UNAVAILABLE
        assert "the logits are not finite" in details
        assert service.engine is not None
        assert service.engine.failures.num_total == 1
        assert not service.engine.failures.lost.done()
        weights.data.copy_(well)
        client = await service.client().open([1, 2])
        assert len(tokens_of(await client.advance(2))) == 8


async def test_default_drafter(service_with, model_dir):
    async with service_with(drafter="prompt_lookup") as service:
        names = [d.name for d in service.sessions.describe().drafters]
        assert names[0] == "prompt_lookup"
        assert set(names) == set(DRAFTER_KINDS) - NEED_DATASTORE
        client = await service.client().open([1, 2, 3, 1, 2])
        (chunk,) = await client.advance(5, max_tokens=2)
        assert chunk.token_ids == [3, 1]
    with pytest.raises(ConfigError, match="--drafter model: needs a draft model"):
        async with service_with(model="", drafter="model"):
            pass
    with pytest.raises(ConfigError, match="--model /nowhere: no such directory"):
        async with service_with(model="/nowhere"):
            pass


async def test_max_model_len_bounds_sequences(service_with):
    async with service_with(max_model_len=10) as service:
        for drafter in ("model", "prompt_lookup"):
            client = await service.client().open([1] * 8, drafter=drafter)
            assert len(tokens_of(await client.advance(8))) == 2
            client = await service.client().open([1] * 11, drafter=drafter)
            assert "holds at most 10" in (await client.status())[1]


async def test_a_target_may_be_longer_than_its_drafter(service_with, loaded, caplog):
    """`flyspec serve --max-model-len` applies to both; the draft model's limit may be lower."""
    limit = loaded.info.context_length
    async with service_with(max_model_len=limit + 7) as service:
        for drafter, longest in (("model", limit), ("prompt_lookup", limit + 7)):
            client = await service.client().open([1] * (longest - 2), drafter=drafter)
            assert len(tokens_of(await client.advance(longest - 2))) == 2
    assert f"--max-model-len {limit + 7} exceeds the draft model's own limit" in caplog.text
    assert f"using {limit}" in caplog.text


async def test_a_draft_model_that_does_not_fit_is_refused_before_it_is_read(
    service_with, monkeypatch
):
    monkeypatch.setattr(cache_size, "device_memory", lambda _: DeviceMemory(10**6, 10**4))
    monkeypatch.setattr(loading, "AutoModelForCausalLM", None)
    with pytest.raises(ConfigError, match=r"not even one session fits on cpu: weights .* kB"):
        async with service_with():
            pass


async def test_hundreds_of_hostile_messages_change_nothing(service_with, monkeypatch):
    for module in (malformed, service_module):
        monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 2.0)
    async with service_with(max_sessions=40, idle_timeout_s=6.0) as service:
        report = await fuzz("draft", {"draft": f"127.0.0.1:{service.port}"}, 150)
        assert report.statuses["OK"] > 8
        assert report.statuses["INVALID_ARGUMENT"] > 16
        await until(lambda: service.active == 0)


@pytest.mark.parametrize("ids", [(5, 5), (2**64 - 1, 0)])
async def test_rounds_come_once_and_in_order(service, ids):
    client = await service.client().open([1, 2, 3])
    await client.advance(3, round_id=ids[0])
    await client.send(3, round_id=ids[1])
    code, details = await client.status()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "once and in order" in details
    await until(lambda: service.active == 0)


@pytest.mark.parametrize(
    "message",
    [
        draft_pb2.DraftRequest(advance={"append_token_ids": [5] * 2_000_000, "keep_length": 1}),
        draft_pb2.DraftRequest(open={"token_ids": [5] * 2_000_000}),
        draft_pb2.DraftRequest(
            open={"token_ids": [5], "sampling": {"logit_bias": dict.fromkeys(range(5000), 1.0)}}
        ),
    ],
    ids=["append", "open", "bias"],
)
async def test_absurd_lists_are_refused_unread(service, message, monkeypatch):
    def read(message):
        if message.ByteSize() > 10_000:
            raise AssertionError("read")

    original = wire.unwrap
    monkeypatch.setattr(wire, "unwrap", lambda m: read(m) or original(m))
    client = service.client()
    if message.HasField("advance"):
        await client.open([1, 2, 3])
    await client.call.write(message)
    code, _ = await client.status()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: service.active == 0)


async def test_long_sequences_without_a_model_hold_up_nobody(service):
    """They are indexed in a thread; meanwhile others are answered repeatedly."""
    period = list(range(1000, 1013))
    text = (period * 8000)[:100_000]
    long = await service.client().open(text, drafter="prompt_lookup")
    short = await service.client().open([1, 2, 3], drafter="prompt_lookup")
    await long.send(len(text), max_tokens=8)
    answers = 0
    reading = asyncio.ensure_future(long.read())
    while not reading.done():
        await short.advance(3)
        answers += 1
    assert answers > 3
    start = len(text) % len(period)
    assert reading.result().token_ids == (period * 2)[start : start + 8]
    # Back to the beginning, and as far forward again.
    chunks = await long.advance(5, text[5:], 8)
    assert chunks[0].token_ids == (period * 2)[start : start + 8]
    await long.send(100_500)
    assert (await long.status())[0] is grpc.StatusCode.FAILED_PRECONDITION
    await short.call.done_writing()
    await until(lambda: service.active == 0)


async def test_a_request_beyond_all_sizes_is_refused_by_grpc(service):
    client = service.client()
    await client.call.write(draft_pb2.DraftRequest(open={"token_ids": [1 << 31] * 3_000_000}))
    assert (await client.status())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


# Any attempt to import one of these fails as if it were not installed.
WITHOUT_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "numpy", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from draft_service.__main__ import main
main()
"""


@contextmanager
def process(*flags):
    """A draft service without torch, and the port that it announced."""
    read, write = os.pipe()
    command = [sys.executable, "-c", WITHOUT_TORCH, "--port", "0", "--ready-fd", str(write), *flags]
    with subprocess.Popen(command, pass_fds=[write], stderr=subprocess.PIPE, text=True) as running:
        os.close(write)
        try:
            with os.fdopen(read) as pipe:
                line = pipe.readline()
            yield running, json.loads(line)["port"] if line else 0
        finally:
            running.kill()


def test_prompt_lookup_without_torch_and_graceful_end():
    with process("--drain-grace-s", "1") as (running, port):
        assert port
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "flyspec.v1.DraftService"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            messages = [
                wire.encode(DraftOpen([1, 2, 3, 1, 2], GREEDY, 0)),
                wire.encode(DraftAdvance(1, 5, [], 4)),
            ]
            (response,) = draft_pb2_grpc.DraftServiceStub(channel).Draft(iter(messages))
            assert list(response.token_ids) == [3, 1, 2, 3]
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0


def test_a_model_without_torch_is_refused_in_one_line():
    with process("--model", "some/model", "--metrics-port", "-1") as (running, port):
        assert port == 0
        assert running.wait(60) == 2
        assert running.stderr is not None
        (line,) = running.stderr.read().splitlines()
        assert line.startswith("error: --model some/model: needs torch")

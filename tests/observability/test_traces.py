"""One trace per request across the three services, with the right tree and no text in it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from flyspec.client import AsyncClient, Chat, GenerateOptions
from flyspec.config import OrchestratorSettings
from flyspec.errors import ConfigError
from flyspec.metadata import REQUEST_ID_KEY
from flyspec.rules import Rule
from flyspec.telemetry import Telemetry
from flyspec.telemetry.traces import Traces, traceparent_of, wall_ns
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from flyspec.values.tokens import SamplingParams
from tests.observability.observed import SERVICES, Observed
from tests.waiting import until

PROMPT = "Mia has 12 stamps and buys 30 more."
TREE = {
    # name: (service, name of the parent)
    "queue": ("flyspec-orchestrator", "request"),
    "round": ("flyspec-orchestrator", "request"),
    "draft": ("flyspec-orchestrator", "round"),
    "verify": ("flyspec-orchestrator", "round"),
    "propose": ("flyspec-draft", "draft"),
    "check": ("flyspec-verify", "verify"),
}


def spans_with(observed: Observed, text: str) -> list[dict]:
    """What all services have written that has a text in it."""
    lines = [x for s in SERVICES for x in observed.traces[s].read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if text in line and line.endswith("\n")]


def spans_of(observed: Observed, trace_id: str) -> list[dict]:
    """What all services have written of a trace."""
    spans = spans_with(observed, trace_id)
    return [span for span in spans if span["context"]["trace_id"] == f"0x{trace_id}"]


async def written(observed: Observed) -> None:
    """Wait until the spans of all requests so far are in the files.

    Every service writes its own now and then, in order: so they are there once those of another
    request are, which came when the services were at rest.
    """
    await observed.at_rest()
    following = uuid.uuid4().hex
    await generate(observed, (("traceparent", traceparent_of(int(following, 16), 1)),))

    def is_written() -> bool:
        names = {span["name"].partition(" ")[0] for span in spans_of(observed, following)}
        return names >= {"text_completion", "propose", "check"}

    await until(is_written)


async def whole_trace(observed: Observed, trace_id: str) -> list[dict]:
    """All spans of a trace; none if it has none."""
    await written(observed)
    return spans_of(observed, trace_id)


async def generate(observed: Observed, metadata, **fields) -> list[generation_pb2.GenerateResponse]:
    """A generation over a plain stub: its messages."""
    fields.setdefault("speculation", {"rule": {"name": "fly"}, "num_speculative_tokens": 15})
    request = generation_pb2.GenerateRequest(text=PROMPT, max_tokens=24, **fields)
    async with grpc.aio.insecure_channel(observed.stack.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return [message async for message in stub.Generate(request, metadata=metadata)]


async def test_one_request_is_one_tree(observed):
    trace_id, caller = 0x1234ABCD, 0x77
    header = traceparent_of(trace_id, caller)
    messages = await generate(observed, (("traceparent", header), (REQUEST_ID_KEY, "trace-me")))
    completion = messages[-1].completion
    spans = await whole_trace(observed, f"{trace_id:032x}")
    by_id = {span["context"]["span_id"]: span for span in spans}
    (root,) = [span for span in spans if span["parent_id"] not in by_id]
    assert root["parent_id"] == f"0x{caller:016x}"
    assert root["name"].startswith("text_completion ")
    for span in spans:
        if span is root:
            continue
        service, parent = TREE[span["name"]]
        above = by_id[span["parent_id"]]
        assert span["resource"]["attributes"]["service.name"] == service
        assert above is root if parent == "request" else above["name"] == parent
        # Clocks of one machine: a span lies within its parent, but for what was abandoned.
        if "flyspec.abandoned" not in above["attributes"]:
            assert above["start_time"] <= span["start_time"]
            assert span["end_time"] <= above["end_time"] or span["name"] in ("propose", "check")
    rounds = [s for s in spans if s["name"] == "round"]
    finished = [s for s in rounds if "flyspec.abandoned" not in s["attributes"]]
    assert len(finished) == completion.speculation.num_rounds
    # Of the proposal requested with the prompt, and of the last one, requested in advance.
    assert len(rounds) - len(finished) in (1, 2)
    accepted = sum(s["attributes"]["flyspec.num_draft_tokens"] for s in finished)
    # The last round may verify drafts beyond the output's end, which do not count.
    assert accepted == sum(completion.num_draft_tokens_per_round)
    assert completion.speculation.num_draft_tokens <= accepted
    for name in ("verify", "check"):
        assert sum(s["name"] == name for s in spans) == len(finished)
    for name in ("draft", "propose"):
        assert sum(s["name"] == name for s in spans) in (len(finished), len(finished) + 1)


async def test_attributes_are_those_of_gen_ai_and_hold_no_text(observed):
    trace_id = 0x5EED
    messages = await generate(
        observed, (("traceparent", traceparent_of(trace_id, 1)), (REQUEST_ID_KEY, "attributes-1"))
    )
    completion, text = messages[-1].completion, "".join(m.chunk.text for m in messages)
    assert messages[0].started.request_id == "attributes-1"
    spans = await whole_trace(observed, f"{trace_id:032x}")
    root = next(span for span in spans if span["name"].startswith("text_completion"))
    found = root["attributes"]
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.provider.name"] == "flyspec"
    assert found["gen_ai.request.max_tokens"] == 24
    assert found["gen_ai.usage.input_tokens"] == completion.usage.prompt_tokens
    assert found["gen_ai.usage.output_tokens"] == completion.usage.completion_tokens
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["gen_ai.response.id"] == found["flyspec.request_id"] == "attributes-1"
    assert found["flyspec.rule"] == "fly"
    assert found["flyspec.num_rounds"] == completion.speculation.num_rounds
    everything = json.dumps(spans)
    assert "stamps" not in everything
    assert len(text) > 20
    assert json.dumps(text[:20])[1:-1] not in everything


async def test_a_request_that_fails_says_so(observed):
    trace_id = 0xBAD
    with pytest.raises(grpc.aio.AioRpcError):
        await generate(observed, (("traceparent", traceparent_of(trace_id, 1)),), logprobs=1000)
    (span,) = await whole_trace(observed, f"{trace_id:032x}")
    assert span["status"]["status_code"] == "ERROR"
    assert span["attributes"]["error.type"] == "INVALID_ARGUMENT"


async def test_a_client_that_samples_nothing_is_not_traced(observed):
    trace_id = f"{0xCAFE:032x}"
    await generate(observed, (("traceparent", f"00-{trace_id}-{1:016x}-00"),))
    assert await whole_trace(observed, trace_id) == []


async def test_plain_decoding_is_one_round_a_request_to_the_target(observed):
    trace_id = 0xF1A7
    header = (("traceparent", traceparent_of(trace_id, 1)),)
    await generate(observed, header, ignore_eos=True, speculation={"num_speculative_tokens": 0})
    spans = await whole_trace(observed, f"{trace_id:032x}")
    (round_,) = [s for s in spans if s["name"] == "round"]
    (check,) = [s for s in spans if s["name"] == "check"]
    # Several tokens are a verdict.
    assert 1 < round_["attributes"]["flyspec.num_verdicts"] <= 24
    told = check["attributes"]["flyspec.num_verdicts"]
    assert told == round_["attributes"]["flyspec.num_verdicts"]


@pytest.mark.parametrize(
    ("drafter", "traceparent"), [("", ""), ("eagle3", traceparent_of(0xC11E27, 0x5))]
)
async def test_many_rounds_of_windows_hang_together(observed, drafter, traceparent):
    """With windows across rounds, chat and temperature, no span is lost or orphaned.

    Nor with rounds that a head goes on with.
    """
    identifier = f"ticket:{drafter}"
    options = GenerateOptions(
        rule=Rule("margin", margin_threshold=3.0), drafter=drafter, num_speculative_tokens=15,
        max_tokens=64, sampling=SamplingParams(temperature=0.7), seed=3, request_id=identifier,
        traceparent=traceparent,
    )  # fmt: skip
    async with AsyncClient(observed.stack.address, max_retries=0) as client:
        done = await client.complete(Chat.of_user(PROMPT), options)
    await written(observed)
    assert done.started.request_id == identifier
    (root,) = spans_with(observed, f'"{identifier}"')
    assert root["name"].startswith("chat ")
    assert root["parent_id"] == (f"0x{0x5:016x}" if traceparent else None)
    spans = spans_of(observed, root["context"]["trace_id"][2:])
    known = {s["context"]["span_id"] for s in spans}
    assert [s for s in spans if s["parent_id"] not in known] == [root]
    rounds = [s for s in spans if s["name"] == "round"]
    checks = [s for s in spans if s["name"] == "check"]
    # The target may have begun a round that the text no longer needs.
    assert len(checks) >= done.completion.speculation.num_rounds <= len(rounds)


def test_sampling_keeps_its_share(tmp_path):
    file = tmp_path / "spans.jsonl"
    traces = Traces("test", file=str(file), sample_ratio=0.25)
    kept = [traces.begin("", time.perf_counter_ns()) for _ in range(400)]
    for span in kept:
        if span is not None:
            span.end()
    traces.close()
    assert 50 < sum(span is not None for span in kept) < 160
    assert len(file.read_text().splitlines()) == sum(span is not None for span in kept)


def test_times_keep_their_distances():
    before = time.time_ns()
    times = [time.perf_counter_ns() for _ in range(1000)]
    after = time.time_ns()
    walls = [wall_ns(t) for t in times]
    assert [w - walls[0] for w in walls] == [t - times[0] for t in times]
    assert before - 1e9 < walls[0] <= walls[-1] < after + 1e9


def test_a_traceparent_that_cannot_be_read_is_no_parent(tmp_path):
    traces = Traces("test", file=str(tmp_path / "spans.jsonl"))
    for hostile in ("", "00-xyz", "0" * 55, "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 10**6):
        assert traces.add("check", "SERVER", hostile, 1, 2, {}) == ""
        span = traces.begin(hostile, time.perf_counter_ns())
        assert span is not None
        assert span.parent is None
        span.end()
    traces.close()


def test_without_a_destination_nothing_of_opentelemetry_is_loaded():
    code = (
        "import orchestrator.server, sys; from flyspec.telemetry import Telemetry; "
        "Telemetry('orchestrator'); "
        "assert not [m for m in sys.modules if m.startswith(('opentelemetry', 'torch'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_written_is_said():
    settings = OrchestratorSettings(traces_file="/nowhere/spans.jsonl")
    with pytest.raises(ConfigError, match="--traces-file /nowhere"):
        Telemetry("orchestrator", settings)


def test_spans_reach_a_collector():
    """A real OTLP exporter against a minimal collector in a few lines of gRPC."""
    otlp = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

    received = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            received.append(request)
            return otlp.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        traces = Traces("test", endpoint=f"http://127.0.0.1:{port}")
        span = traces.begin("", time.perf_counter_ns())
        assert span is not None
        span.end()
        traces.close()
    finally:
        server.stop(0)
    (request,) = received
    (resource,) = request.resource_spans
    names = [s.name for scope in resource.scope_spans for s in scope.spans]
    assert names == ["request"]
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert attributes["service.name"] == "flyspec-test"

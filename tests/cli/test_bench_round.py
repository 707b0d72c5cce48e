"""`flyspec bench round`: a round's parts from spans, the chart, the command; not times."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flyspec.cli.main import app
from flyspec_lab.bench.timeline import (
    PARTS,
    RoundLine,
    TracedSpan,
    read_spans,
    report,
    round_ends,
    round_lines,
)
from flyspec_lab.bench.timeline_run import text_times_ns
from flyspec_lab.bench.transport import Leg, echoes, exchanges
from tests.tiny import make_model

TRACE = "ab" * 16
MICROSECOND = 1000


def span(
    name: str, span_id: str, parent: str, begin: int, end: int, **attributes: Any
) -> TracedSpan:
    """Times in microseconds."""
    named = {f"flyspec.{key}": value for key, value in attributes.items()}
    times = begin * MICROSECOND, end * MICROSECOND
    return TracedSpan(name, TRACE, span_id, parent, *times, named)


def round_spans(number: int, begin: int) -> list[TracedSpan]:
    """A round of 100 µs that begins 1 µs after the one before has ended."""
    i = f"{number}-"
    return [
        span("round", f"{i}r", "root", begin + 1, begin + 100, num_draft_tokens=15,
             num_final_tokens=9),
        span("draft", f"{i}d", f"{i}r", begin + 3, begin + 50),
        span("propose", f"{i}p", f"{i}d", begin + 10, begin + 49, queue_s=4e-6, model_s=20e-6,
             service_s=30e-6),
        span("verify", f"{i}v", f"{i}r", begin + 53, begin + 100),
        span("check", f"{i}c", f"{i}v", begin + 60, begin + 97, queue_s=5e-6, forward_s=17e-6,
             judge_s=8e-6),
    ]  # fmt: skip


EXPECTED = {
    "ask": 3, "to_draft": 7, "draft_queue": 4, "draft_model": 20, "draft_rest": 6,
    "from_draft": 10, "check": 3, "to_verify": 7, "verify_queue": 5, "forward": 17, "judge": 8,
    "from_verify": 10,
}  # fmt: skip


def test_a_round_is_cut_where_the_work_passes_on() -> None:
    spans = [*round_spans(0, 0), *round_spans(1, 100), *round_spans(2, 200)]
    lines = round_lines(reversed_(spans), [TRACE])
    assert len(lines) == 2, "the first reads the prompt"
    for line in lines:
        assert {p.name: line.of(p.name) // MICROSECOND for p in PARTS} == EXPECTED
        assert line.total_ns == 100 * MICROSECOND
        assert line.hops_ns == (100 - 20 - 17 - 8) * MICROSECOND
    assert round_lines(spans, ["00" * 16]) == []
    assert round_ends(spans, TRACE) == [100_000, 200_000, 300_000]


def reversed_(spans: list[TracedSpan]) -> list[TracedSpan]:
    """Services write in the order in which spans end; nothing relies on it."""
    return spans[::-1]


@pytest.mark.parametrize("missing", ["draft", "propose", "verify", "check"])
def test_a_round_that_lacks_a_span_is_left_out(missing: str) -> None:
    spans = [*round_spans(0, 0), *(s for s in round_spans(1, 100) if s.name != missing)]
    assert round_lines(spans, [TRACE]) == []


def test_rounds_without_drafts_are_left_out() -> None:
    plain = [s for s in round_spans(1, 100) if s.name != "round"]
    plain.append(span("round", "1-r", "root", 101, 200, num_draft_tokens=0))
    abandoned = [span("round", "2-r", "root", 201, 300, abandoned=True)]
    assert round_lines([*round_spans(0, 0), *plain, *abandoned], [TRACE]) == []


@given(st.lists(st.integers(0, 400), min_size=8, max_size=8), st.lists(st.floats(0, 3e-4)))
def test_whatever_the_clocks_say_the_parts_make_up_the_round(
    stamps: list[int], seconds: list[float]
) -> None:
    """Spans of several processes need not fit; no part is negative, none is counted twice."""
    given_ = (*seconds, *(0.0 for _ in range(6)))
    d, e, p, q, v, w, c, x = stamps
    spans = [
        *round_spans(0, 0),
        span("round", "r", "root", 101, 200, num_draft_tokens=15),
        span("draft", "d", "r", d, e),
        span("propose", "p", "d", p, q, queue_s=given_[0], model_s=given_[1], service_s=given_[2]),
        span("verify", "v", "r", v, w),
        span("check", "c", "v", c, x, queue_s=given_[3], forward_s=given_[4], judge_s=given_[5]),
    ]
    (line,) = round_lines(spans, [TRACE])
    assert min(line.parts_ns) >= 0
    assert line.total_ns == 100 * MICROSECOND


def test_spans_are_read_as_they_are_written(tmp_path: Path) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
    record = {
        "name": "round",
        "context": {"trace_id": f"0x{TRACE}", "span_id": "0x17"},
        "parent_id": None,
        "start_time": "2026-01-02T03:04:05.678901Z",
        "end_time": "2026-01-02T03:04:06.000001Z",
        "attributes": {"flyspec.num_draft_tokens": 3},
    }
    file = tmp_path / "spans.jsonl"
    file.write_text(json.dumps(record) + "\n")
    (found,) = read_spans([file])
    assert found.begin_ns == int(moment.timestamp()) * 10**9 + 678_901_000
    assert found.end_ns - found.begin_ns == 321_100_000
    assert (found.trace_id, found.parent_id) == (TRACE, "")


def line_of(ms: float) -> RoundLine:
    return RoundLine(TRACE, 15, tuple(int(ms * 1e6) for _ in PARTS))


def test_the_typical_round() -> None:
    lines = [line_of(ms) for ms in (1.0, 2.0, 9.0)]
    found = report(lines, [7_000_000, 8_000_000, 30_000_000], [2_000_000], [3_000_000], [500_000])
    assert found.round_ms == 2.0 * len(PARTS)
    assert set(found.parts.values()) == {2.0}
    assert found.hops_ms == 8.0 - 2.0  # judging apart
    assert found.traced_hops_ms == 2.0 * (len(PARTS) - 3)
    assert found.hops_over_echoes == 3.0
    assert found.exchanges_over_echoes == 1.5
    assert found.proposal_loop_ms == 4.0
    assert found.text_ms == 0.5
    with pytest.raises(ValueError, match="no round with drafts"):
        report([], [1], [1], [1])


def test_texts_are_told_apart_only_where_each_round_has_a_chunk() -> None:
    assert text_times_ns([15, 29], [10, 20]) == [5, 9]
    assert text_times_ns([15], [10, 20]) == []


async def test_echoes_answer_with_as_many_bytes_as_they_are_asked_for() -> None:
    async with echoes(2) as ways:
        legs = [Leg(200, 3000, 1000), Leg(16, 8, 1)]
        assert await ways.outside_ns(legs) > 0
        with pytest.raises(ValueError, match="zip"):
            await ways.outside_ns(legs[:1])


async def test_exchanges_take_time_outside_their_work() -> None:
    async with exchanges() as ways:
        assert await ways.outside_ns([Leg(work_ns=1000), Leg(work_ns=1)]) > 0


# --- the command ----------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["bench", "round", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_stack_of_its_own_is_traced(tmp_path: Path) -> None:
    seeds = count(3)
    models = [str(make_model(tmp_path / name, next(seeds))) for name in ("target", "draft")]
    output = tmp_path / "round.json"
    shown = run("--model", models[0], "--draft-model", models[1], "--problems", "1", "--repeats",
                "1", "--max-tokens", "12", "--num-speculative-tokens", "3", "--rule", "exact",
                "--output", str(output)).stdout  # fmt: skip
    assert "loop around a proposal" in shown
    document = json.loads(output.read_text())
    assert list(document["parts"]) == [part.name for part in PARTS]
    assert document["parts"]["draft_model"] > 0 < document["parts"]["forward"]
    assert document["rounds"] == len(document["lines_ns"]) > 2
    assert document["echoes_ms"] > 0 < document["exchanges_ms"]
    assert document["echo_bytes"][0] > 16
    assert len(document["echo_work_ms"]) == 2

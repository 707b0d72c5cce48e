"""Tables of the engine's benchmarks for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flyspec.tables import Column, FittedTable, make_table, record_table

if TYPE_CHECKING:
    from flyspec_lab.bench.engine.stall_report import StallReport
    from flyspec_lab.bench.engine.steps_report import EngineReport, EngineRun
    from flyspec_lab.bench.engine.throughput import LevelReport

_PREFILL: tuple[Column, ...] = (
    ("chunk", "{.chunk:,}"),
    ("tokens/s", "{.tokens_per_second:,.0f}"),
    ("first chunk", "{.first_chunk_ms:.1f} ms"),
    ("last chunk", "{.last_chunk_ms:.1f} ms"),
)
_THROUGHPUT: tuple[Column, ...] = (
    ("requests", "{.concurrency}"),
    ("tok/s", "{.tokens_per_second:,.0f}"),
    ("sequential", "{.sequential_tokens_per_second:,.0f}"),
    ("gain", "{.speedup:.2f}"),
    ("lowest", "{.lowest_speedup:.2f}"),
    ("ms/token", "{.time_per_output_token_p50_ms:.2f}"),
    ("p99", "{.time_per_output_token_p99_ms:.2f}"),
    ("sequential", "{.sequential_time_per_output_token_p50_ms:.2f}"),
    ("batch", "{.mean_target_batch:.1f}"),
    ("drafting", "{.mean_draft_batch:.1f}"),
)


def engine_shown(report: EngineReport) -> list[Any]:
    shown: list[Any] = []
    for run in report.runs:
        size = run.tensor_parallel_size
        ranks = "" if size == 1 else f", {size} ranks"
        shown.append(
            f"{report.model}, {report.dtype} on {report.device}{ranks}, {run.threads} CPU "
            f"threads{' per rank' if size > 1 else ''}; medians of {report.repeats} runs"
        )
        shown += [*engine_tables(run), engine_summary(run)]
    return shown


def engine_tables(run: EngineRun) -> list[FittedTable]:
    """Return step times for each context, parts of a step, and prefill."""

    def by_batch(title: str, form: str, columns: dict[str, tuple[int, int]]) -> FittedTable:
        """Make columns by heading, each of a K and a context."""
        rows = [
            [str(b), *(form.format(run.cell(b, *of)) for of in columns.values())]
            for b in run.batches
        ]
        return make_table(["batch", *columns], rows, title, left=0)

    tables = [
        by_batch(f"step, context {c:,}: ms, tokens verified/s",
                 "{0.step_ms:.2f} {0.tokens_per_second:7,.0f}",
                 {f"K = {k}": (k, c) for k in run.ks})
        for c in run.contexts
    ]  # fmt: skip
    k = run.middle_k
    tables.append(by_batch(
        f"attention with masks / matrix products, ms, and attention's share, K = {k}",
        "{0.attention_ms:.2f} / {0.matrix_products_ms:.2f} {0.attention_share:4.0%}",
        {f"context {c:,}": (k, c) for c in run.contexts},
    ))  # fmt: skip
    if run.prefill:
        title = f"prefill of {run.prefill[0].prompt_tokens:,} tokens, alone"
        tables.append(record_table(_PREFILL, run.prefill, title, left=0))
    return tables


def engine_summary(run: EngineRun) -> str:
    """Describe the memory, and whether attention takes less time than the matrix products."""
    m = run.memory
    more = [s for s in run.steps if s.attention_to_products > 1]
    worst = max(run.steps, key=lambda s: s.attention_to_products)
    where = f"batch {worst.batch}, K = {worst.num_speculative_tokens}, context {worst.context:,}"
    return (
        f"memory{' of rank 0' if run.tensor_parallel_size > 1 else ''}: "
        f"{m.bytes_per_slot / 2**20:.1f} MiB per slot of {m.slot_tokens:,} tokens "
        f"({m.bytes_per_token:,} bytes per token), {m.cache_bytes / 2**20:,.0f} MiB for "
        f"{m.num_slots} slots; weights {m.weights / 2**20:,.1f} of "
        f"{m.total_weights / 2**20:,.1f} MiB\n"
        f"attention with masks takes longer than the matrix products in {len(more)} of "
        f"{len(run.steps)} kinds of step; at most {worst.attention_to_products:.2f} times as "
        f"long ({where})"
    )


def throughput_table(reports: Sequence[LevelReport]) -> FittedTable:
    return record_table(_THROUGHPUT, reports, "concurrent and sequential requests", left=0)


THROUGHPUT_NOTES = (
    "tok/s: over all requests, median of the repeats; gain: ratio of the rates, median and "
    "minimum; ms/token: of a request after its first piece, median; batch, drafting: requests per "
    "step of the target or the draft model, mean over time. No prompt is cached"
)


def stall_table(report: StallReport) -> FittedTable:
    o = report.options
    rows = []
    for chunk in report.chunks:
        name = chunk.name
        for phase, steps in chunk.steps.items():
            times = [f"{ms:.1f}" for t in (steps, chunk.rounds[phase])
                     for ms in (t.p50_ms, t.p99_ms, t.max_ms)]  # fmt: skip
            rows.append([name, phase, str(steps.count), *times])
            name = ""
    return make_table(
        ["", "", "steps", *("step p50", "p99", "max"), *("round p50", "p99", "max")], rows,
        f"a prompt of {o.prompt_tokens:,} tokens meets {o.sessions} sessions, "
        f"K = {o.num_speculative_tokens}, context {o.context:,}; times in ms", left=2,
    )  # fmt: skip


def stall_summary(report: StallReport) -> str:
    """Compare the growth of the steps with the time of a chunk alone."""
    return "\n".join(
        f"{c.name}: the p99 step grows by {c.added_p99_ms:.1f} ms, "
        f"{'within' if c.bounded else 'more than'} the {c.chunk_ms:.1f} ms that the chunk takes "
        f"alone; the prompt is answered after {c.prompt_ms:.0f} ms; {c.mean_sequences:.1f} "
        "sequences per step"
        for c in report.chunks
    )

"""Reports of the engine's benchmarks as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:  # imports torch
    from flyspec.bench.engine.stall_report import StallReport
    from flyspec.bench.engine.steps_report import EngineRun
    from flyspec.bench.engine.throughput import LevelReport


def engine_tables(run: EngineRun) -> list[Table]:
    """Step times for each context, where the time goes, and prefill."""
    ks = list(dict.fromkeys(s.num_speculative_tokens for s in run.steps))
    batches = list(dict.fromkeys(s.batch for s in run.steps))
    contexts = list(dict.fromkeys(s.context for s in run.steps))
    cells = {(s.context, s.num_speculative_tokens, s.batch): s for s in run.steps}
    tables = []
    for context in contexts:
        table = _table(f"step, context {context:,}: ms, tokens verified/s", "batch",
                       [f"K = {k}" for k in ks])  # fmt: skip
        for batch in batches:
            row = [cells[context, k, batch] for k in ks]
            table.add_row(
                str(batch), *(f"{s.step_ms:.2f} {s.tokens_per_second:7,.0f}" for s in row)
            )
        tables.append(table)
    k = 8 if 8 in ks else ks[len(ks) // 2]
    table = _table(f"attention with masks / matrix products, ms, and attention's share, K = {k}",
                   "batch", [f"context {context:,}" for context in contexts])  # fmt: skip
    for batch in batches:
        row = [cells[context, k, batch] for context in contexts]
        table.add_row(
            str(batch),
            *(f"{s.attention_ms:.2f} / {s.matrix_products_ms:.2f} {s.attention_share:4.0%}"
              for s in row),
        )  # fmt: skip
    tables.append(table)
    if run.prefill:
        table = _table(f"prefill of {run.prefill[0].prompt_tokens:,} tokens, alone", "chunk",
                       ["tokens/s", "first chunk", "last chunk"])  # fmt: skip
        for p in run.prefill:
            table.add_row(f"{p.chunk:,}", f"{p.tokens_per_second:,.0f}",
                          f"{p.first_chunk_ms:.1f} ms", f"{p.last_chunk_ms:.1f} ms")  # fmt: skip
        tables.append(table)
    return tables


def engine_summary(run: EngineRun) -> str:
    """Memory, and whether attention stays below the matrix products."""
    m = run.memory
    more = [s for s in run.steps if s.attention_to_products > 1]
    worst = max(run.steps, key=lambda s: s.attention_to_products)
    where = f"batch {worst.batch}, K = {worst.num_speculative_tokens}, context {worst.context:,}"
    return (
        f"memory{' of rank 0' if run.tensor_parallel_size > 1 else ''}: "
        f"{m.bytes_per_slot / 2**20:.1f} MiB a slot of {m.slot_tokens:,} tokens "
        f"({m.bytes_per_token:,} bytes a token), {m.cache_bytes / 2**20:,.0f} MiB for "
        f"{m.num_slots} slots; weights {m.weights / 2**20:,.1f} of "
        f"{m.total_weights / 2**20:,.1f} MiB\n"
        f"attention with masks takes longer than the matrix products in {len(more)} of "
        f"{len(run.steps)} kinds of step; at most {worst.attention_to_products:.2f} times as "
        f"long ({where})"
    )


def throughput_table(reports: Sequence[LevelReport]) -> Table:
    """A row for each number of requests."""
    table = _table("requests at once, and the same one after another", "requests", [
        "tok/s", "in turn", "gain", "least", "ms a token", "p99", "in turn", "batch", "drafting",
    ])  # fmt: skip
    for r in reports:
        table.add_row(
            str(r.concurrency),
            f"{r.tokens_per_second:,.0f}",
            f"{r.sequential_tokens_per_second:,.0f}",
            f"{r.speedup:.2f}",
            f"{r.lowest_speedup:.2f}",
            f"{r.time_per_output_token_p50_ms:.2f}",
            f"{r.time_per_output_token_p99_ms:.2f}",
            f"{r.sequential_time_per_output_token_p50_ms:.2f}",
            f"{r.mean_target_batch:.1f}",
            f"{r.mean_draft_batch:.1f}",
        )
    return table


THROUGHPUT_NOTES = (
    "tok/s: of all requests together, median of the repeats; gain: of a pair's rates, median and "
    "least; ms a token: of a request behind its first piece, median; batch, drafting: requests in "
    "a step of the target or of the draft model, mean over time. Prompts are in no cache"
)


def stall_table(report: StallReport) -> Table:
    """Rows of phases for each size of chunk."""
    o = report.options
    table = _table(
        f"a prompt of {o.prompt_tokens:,} tokens meets {o.sessions} sessions, "
        f"K = {o.num_speculative_tokens}, context {o.context:,}",
        "chunk",
        ["", "steps", "step p50", "p99", "max", "round p50", "p99", "max"],
    )
    for chunk in report.chunks:
        for index, (phase, steps) in enumerate(chunk.steps.items()):
            rounds = chunk.rounds[phase]
            name = f"{chunk.chunk:,}" if chunk.cut else "not cut"
            times = (steps.p50_ms, steps.p99_ms, steps.max_ms,
                     rounds.p50_ms, rounds.p99_ms, rounds.max_ms)  # fmt: skip
            table.add_row(
                name if index == 0 else "",
                phase,
                str(steps.count),
                *(f"{ms:.1f}" for ms in times),
                end_section=index == len(chunk.steps) - 1,
            )
    return table


def stall_summary(report: StallReport) -> str:
    """How much longer steps got, against what a chunk costs alone."""
    lines = []
    for chunk in report.chunks:
        name = f"chunks of {chunk.chunk:,}" if chunk.cut else "not cut"
        verdict = "within" if chunk.bounded else "more than"
        lines.append(
            f"{name}: the p99 step grows by {chunk.added_p99_ms:.1f} ms, {verdict} the "
            f"{chunk.chunk_ms:.1f} ms that the chunk takes alone; the prompt is answered after "
            f"{chunk.prompt_ms:.0f} ms; {chunk.mean_sequences:.1f} sequences a step"
        )
    return "\n".join(lines)


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, justify="right")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table

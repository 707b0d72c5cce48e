"""`flyspec bench round`: the timeline of a round, compared with bare gRPC echoes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.options.stack import to_flags
from flyspec.cli.stack_options import StackOptions
from flyspec.concurrency import whatever_reached
from flyspec.errors import ConfigError
from flyspec_lab.bench.options import RoundOptions
from flyspec_lab.report import Report, Results

if TYPE_CHECKING:
    from flyspec_lab.bench.timeline import TracedSpan
    from flyspec_lab.bench.timeline_run import TracedRun


@with_flags
def bench_round(models: ModelFlags, options: RoundOptions, results: Results) -> None:
    """Show where a round's time goes in all three processes: work and waiting."""
    results.of(lambda: _measure(models, options))


def _measure(models: ModelFlags, options: RoundOptions) -> Report:
    from flyspec.cli.runtime import run_async, with_server
    from flyspec_lab.bench.timeline import read_spans
    from flyspec_lab.bench.timeline_run import run

    with tempfile.TemporaryDirectory(prefix="flyspec-round-") as folder:
        files = {s: Path(folder) / f"{s}.jsonl" for s in ("orchestrator", "draft", "verify")}
        flags = {service: to_flags(traces_file=file) for service, file in files.items()}
        stack = StackOptions(**vars(models), log_level="warning", last_flags=flags)
        return whatever_reached(
            lambda: run_async(with_server(stack, None, lambda client, _: run(client, options))),
            lambda done: _report(done, read_spans(files.values()), options),
        )


def _report(done: TracedRun, spans: Sequence[TracedSpan], options: RoundOptions) -> Report:
    from flyspec_lab.bench import timeline_tables
    from flyspec_lab.bench.timeline import report, round_ends, round_lines
    from flyspec_lab.bench.timeline_run import text_times_ns

    lines = round_lines(spans, done.chunks_ns)
    if not lines:
        raise ConfigError("no round had drafts; raise --max-tokens or choose another --drafter")
    texts = [
        ns
        for trace_id, chunks in done.chunks_ns.items()
        for ns in text_times_ns(chunks, round_ends(spans, trace_id))
    ]
    found = report(lines, done.overheads_ns, done.echoes_ns, done.exchanges_ns, texts)
    return Report(
        {
            **vars(options),
            "rule": options.rule.name,
            "echo_bytes": [leg.request_bytes for leg in done.legs],
            "echo_work_ms": [leg.work_ns / 1e6 for leg in done.legs],
            **vars(found),
        },
        [
            timeline_tables.timeline_table(found),
            timeline_tables.timeline_summary(found),
            timeline_tables.TIMELINE_NOTES,
        ],
        {
            "lines_ns": [line.parts_ns for line in lines],
            "overheads_ns": done.overheads_ns,
            "echoes_ns": done.echoes_ns,
            "exchanges_ns": done.exchanges_ns,
        },
    )

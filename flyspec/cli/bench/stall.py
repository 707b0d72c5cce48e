"""`flyspec bench prefill-stall`: how much a long prompt delays other sessions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flyspec.bench.options import StallOptions
from flyspec.cli.bench.common import PlottedResults, default_model, silence_loading
from flyspec.cli.options import with_flags

if TYPE_CHECKING:
    from flyspec.bench.results import Report


@with_flags
def bench_stall(options: StallOptions, results: PlottedResults) -> None:
    """Time decoding steps while a long prompt arrives, with and without chunked prefill."""
    results.of(lambda: _measure(replace(options, model=default_model(options.model))))


def _measure(options: StallOptions) -> Report:
    from flyspec.bench.engine.plots import plot_stall
    from flyspec.bench.engine.stall import measure
    from flyspec.bench.engine.tables import stall_summary, stall_table
    from flyspec.bench.results import Report
    from flyspec.cli.runtime import run_async

    silence_loading()
    report = run_async(measure(options))
    return Report(
        vars(report),
        [stall_table(report), stall_summary(report)],
        plot=lambda path: plot_stall(report, path),
    )

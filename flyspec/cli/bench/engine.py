"""`flyspec bench engine`: the cost of a step of the verify engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flyspec.bench.options import EngineOptions
from flyspec.cli.bench.common import PlottedResults, default_model, silence_loading
from flyspec.cli.options import with_flags

if TYPE_CHECKING:
    from flyspec.bench.results import Report


@with_flags
def bench_engine(options: EngineOptions, results: PlottedResults) -> None:
    """Time steps by batch, K and context, prefill and attention; report the memory of a slot."""
    results.of(lambda: _measure(replace(options, model=default_model(options.model))))


def _measure(options: EngineOptions) -> Report:
    from flyspec.bench.engine.plots import plot_engine
    from flyspec.bench.engine.steps import measure
    from flyspec.bench.engine.tables import engine_shown
    from flyspec.bench.results import Report

    silence_loading()
    report = measure(options)
    return Report(vars(report), engine_shown(report), plot=lambda path: plot_engine(report, path))

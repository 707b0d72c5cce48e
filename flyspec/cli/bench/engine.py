"""`flyspec bench engine`: the cost of a step of the verify engine."""

from __future__ import annotations

import json as json_library
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flyspec.cli.bench.common import default_model, numbers, result_console, silence_loading
from flyspec.cli.options import measuring, with_flags
from flyspec.cli.options.stack import to_flags
from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.bench.engine.steps_report import EngineOptions, EngineReport


@with_flags
def bench_engine(
    model: measuring.Model = None,
    device: measuring.Device = "auto",
    dtype: measuring.ModelDtype = "auto",
    threads: measuring.Threads = 0,
    batch: Annotated[str, Flag("Sequences per step, comma-separated.")] = "1,2,4,8,16,32",
    k: Annotated[str, Flag("Drafted tokens (K; 0: plain decoding), comma-separated.")] = "0,4,8,16",
    context: Annotated[str, Flag("Cached tokens per sequence, comma-separated.")] = "128,512,2048",
    chunk: Annotated[
        str, Flag("Prompt tokens per prefill step, comma-separated.")
    ] = "128,256,512,1024",
    tensor_parallel_size: Annotated[
        str, Flag("Processes that share the model, comma-separated to compare.")
    ] = "1",
    repeats: measuring.Repeats = 7,
    json: measuring.Json = False,
    output: measuring.Output = None,
    plot: measuring.Plot = None,
) -> None:
    """Time steps by batch, K and context, prefill and attention; report the memory of a slot."""
    from flyspec.bench.engine.plots import plot_engine
    from flyspec.bench.engine.steps import check
    from flyspec.bench.engine.steps_report import EngineOptions
    from flyspec.cli.runtime import check_output, print_json, write_json

    check_output(output, plot)
    sizes = numbers("--tensor-parallel-size", tensor_parallel_size, 1)
    options = EngineOptions(
        model=default_model(model),
        device=device,
        dtype=dtype,
        threads=threads,
        batches=numbers("--batch", batch, 1),
        num_speculative_tokens=numbers("--k", k, 0),
        contexts=numbers("--context", context, 1),
        chunks=numbers("--chunk", chunk, 1),
        repeats=repeats,
        tensor_parallel_size=sizes[0],
    )
    check(options)
    silence_loading()
    report = _measure(options) if len(sizes) == 1 else _measure_apart(options, sizes)
    document = report.to_document()
    write_json(output, document)
    if plot is not None:
        plot_engine(report, plot)
    if json:
        print_json(document)
    else:
        _print(report)


def _measure(options: EngineOptions) -> EngineReport:
    """Measure in this process, as rank 0."""
    from flyspec.bench.engine.steps import count, measure
    from flyspec.cli.progress import progress_bar
    from flyspec.cli.runtime import error_console

    size = options.tensor_parallel_size
    with progress_bar(error_console()) as progress:
        what = "measuring" if size == 1 else f"measuring {size} ranks"
        bar = progress.add_task(what, total=count(options))
        return measure(options, lambda: progress.advance(bar))


def _measure_apart(options: EngineOptions, sizes: tuple[int, ...]) -> EngineReport:
    """Measure each size in a separate process, since a process can join its ranks only once."""
    from flyspec.bench.engine.steps_report import EngineReport

    def joined(values: Sequence[int]) -> str:
        return ",".join(map(str, values))

    flags = to_flags(
        model=options.model, device=options.device, dtype=options.dtype, threads=options.threads,
        batch=joined(options.batches), k=joined(options.num_speculative_tokens),
        context=joined(options.contexts), chunk=joined(options.chunks), repeats=options.repeats,
    )  # fmt: skip
    command = [sys.executable, "-m", "flyspec.cli", "bench", "engine", "--json", *flags]
    documents = []
    for size in sizes:
        done = subprocess.run(
            [*command, "--tensor-parallel-size", str(size)], stdout=subprocess.PIPE, check=False
        )
        if done.returncode:  # it has printed why
            raise typer.Exit(done.returncode)
        documents.append(json_library.loads(done.stdout))
    return EngineReport.from_documents(documents)


def _print(report: EngineReport) -> None:
    from flyspec.bench.engine.tables import engine_summary, engine_tables

    console = result_console()
    for run in report.runs:
        size = run.tensor_parallel_size
        ranks = "" if size == 1 else f", {size} ranks"
        console.print(
            f"{report.model}, {report.dtype} on {report.device}{ranks}, {run.threads} CPU "
            f"threads{' per rank' if size > 1 else ''}; medians of {report.repeats} runs",
            markup=False,
        )
        for table in engine_tables(run):
            console.print(table)
        console.print(engine_summary(run), markup=False)

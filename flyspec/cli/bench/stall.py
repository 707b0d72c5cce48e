"""`flyspec bench prefill-stall`: how much a long prompt delays other sessions."""

from __future__ import annotations

from typing import Annotated

from flyspec.cli.bench.common import default_model, numbers, result_console, silence_loading
from flyspec.cli.options import measuring, with_flags
from flyspec.flags import Flag


@with_flags
def bench_stall(
    model: measuring.Model = None,
    device: measuring.Device = "auto",
    dtype: measuring.ModelDtype = "auto",
    threads: measuring.Threads = 0,
    sessions: Annotated[int, Flag("Number of decoding sessions.", min=1)] = 32,
    num_speculative_tokens: measuring.PlainOrK = 8,
    context: Annotated[int, Flag("Tokens per decoding session.", min=1)] = 128,
    prompt_tokens: Annotated[int, Flag("Tokens of the arriving prompt.", min=2)] = 1500,
    prefill_chunk: Annotated[
        str, Flag("Maximum prompt tokens per step, comma-separated; compared with no limit.")
    ] = "512",
    max_num_batched_tokens: Annotated[int, Flag("Maximum tokens per step.", min=128)] = 2048,
    steps: Annotated[int, Flag("Timed steps before and after an arrival.", min=1)] = 60,
    repeats: Annotated[int, Flag("Arrivals per chunk size.", min=1)] = 5,
    json: measuring.Json = False,
    output: measuring.Output = None,
    plot: measuring.Plot = None,
) -> None:
    """Time decoding steps while a long prompt arrives, with and without chunked prefill."""
    import torch

    from flyspec.bench.engine.plots import plot_stall
    from flyspec.bench.engine.stall import check, count, measure
    from flyspec.bench.engine.stall_report import StallOptions
    from flyspec.bench.engine.tables import stall_summary, stall_table
    from flyspec.cli.progress import progress_bar
    from flyspec.cli.runtime import check_output, error_console, print_json, run_async, write_json
    from flyspec.engine.loading import load_model

    check_output(output, plot)
    options = StallOptions(
        sessions=sessions,
        num_speculative_tokens=num_speculative_tokens,
        context=context,
        prompt_tokens=prompt_tokens,
        chunks=numbers("--prefill-chunk", prefill_chunk, 16),
        max_num_batched_tokens=max_num_batched_tokens,
        repeats=repeats,
        steps=steps,
    )
    silence_loading()
    if threads:
        torch.set_num_threads(threads)
    name = default_model(model)
    check(name, options)
    loaded = load_model(name, device, dtype, options.max_model_len)
    with progress_bar(error_console()) as progress:
        bar = progress.add_task("measuring", total=count(options))
        report = run_async(measure(loaded, options, lambda: progress.advance(bar)))
    document = report.to_document()
    write_json(output, document)
    if plot is not None:
        plot_stall(report, plot)
    if json:
        print_json(document)
        return
    console = result_console()
    console.print(stall_table(report))
    console.print(stall_summary(report), markup=False)

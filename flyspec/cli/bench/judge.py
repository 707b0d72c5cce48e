"""`flyspec bench judge`: the cost of judging drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from flyspec.cli.bench.common import result_console
from flyspec.cli.options import measuring, with_flags
from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.bench.judging import JudgeReport


@with_flags
def bench_judge(
    vocab_size: Annotated[int, Flag("Vocabulary size (V).", min=64)] = 128_256,
    hidden_size: Annotated[int, Flag("Hidden size of the output layer.", min=1)] = 4096,
    num_speculative_tokens: Annotated[
        Sequence[int], Flag("Drafted tokens (K); repeatable.", min=1, default="15 and 25")
    ] = (),
    rules: Annotated[
        str | None,
        Flag("Rules: comma-separated, with parameters as in `flyspec eval --rules`.",
             default="every preset"),
    ] = None,
    repeats: measuring.Repeats = 9,
    device: measuring.Device = "auto",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], Flag("Data type of layer and logits.")
    ] = "bfloat16",
    threads: measuring.Threads = 0,
    json: measuring.Json = False,
    output: measuring.Output = None,
) -> None:  # fmt: skip
    """Compare the time to judge a round with the forward pass of the target's output layer."""
    import torch

    from flyspec.bench import judging
    from flyspec.bench.conditions import parse_rules
    from flyspec.cli.progress import progress_bar
    from flyspec.cli.runtime import check_output, error_console, print_json, write_json
    from flyspec.engine.loading import resolve_device

    check_output(output)
    if threads:
        torch.set_num_threads(threads)
    options = judging.JudgeOptions(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_speculative_tokens=tuple(dict.fromkeys(num_speculative_tokens or (15, 25))),
        rules=judging.DEFAULT_RULES if rules is None else parse_rules(rules),
        dtype=getattr(torch, dtype),
        device=resolve_device(device),
        repeats=repeats,
    )
    console = error_console()
    with progress_bar(console) as progress:
        bar = progress.add_task("judging", total=judging.count(options))
        report = judging.measure(options, lambda: progress.advance(bar))
    document = report.to_document()
    write_json(output, document)
    if json:
        print_json(document)
    else:
        _print_judging(report)


def _print_judging(report: JudgeReport) -> None:
    from flyspec.bench.judging import TARGET_SHARE
    from flyspec.bench.tables import judge_tables

    console = result_console()
    for layer in report.layers:
        console.print(
            f"output layer {report.hidden_size} -> {report.vocab_size:,}, {layer.rows} rows, "
            f"{report.dtype} on {report.device}: {layer.median_ns / 1e6:.2f} ms"
        )
    for table in judge_tables(report):
        console.print(table)
    worst = report.worst_share
    if worst is not None:
        verdict = "met" if worst <= TARGET_SHARE else "missed"
        console.print(
            f"goal for greedy exact and fly: at most {TARGET_SHARE:.0%} of the layer's time; "
            f"{verdict}, maximum {worst:.1%}",
        )
    console.print(
        f"Medians of {report.repeats} runs, {report.threads} CPU threads; shares are relative to "
        "the layer's time measured just before. After a mismatch: what became of the draft.",
        style="dim",
    )

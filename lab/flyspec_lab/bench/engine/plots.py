"""Plots of the engine's benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flyspec_lab.drawing import BLUE, GREY, ORANGE, ORDERED, powers_of_two
from flyspec_lab.report import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flyspec_lab.bench.engine.stall_report import StallReport
    from flyspec_lab.bench.engine.steps_report import EngineReport, EngineRun
    from flyspec_lab.bench.engine.throughput import LevelReport


def plot_engine(report: EngineReport) -> Plot:
    """Return a plot of step times, attention against matrix products, prefill, and ranks."""
    run = report.runs[0]
    contexts = _thinned(run.contexts, 3)
    top = max(s.step_ms for s in run.steps if s.context in contexts)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(2, 3)
        for ax, context in zip(axes[0], contexts, strict=False):
            _step_times(ax, run, context, top)
            if ax is not axes[0][0]:
                ax.set_ylabel("")
                ax.tick_params(labelleft=False)
        for ax in axes[0][len(contexts) :]:
            ax.set_axis_off()
        axes[0][0].legend(title="K", loc="upper left")
        _attention(axes[1][0], run)
        _prefill(axes[1][1], report.runs)
        _ranks(axes[1][2], report.runs)

    return Plot("engine", "Step times, and what they consist of.", draw, (9.6, 5.8))


def plot_throughput(reports: Sequence[LevelReport]) -> Plot:
    """Return a plot of N requests, concurrent and sequential: tokens per second, and latency."""
    numbers = [r.concurrency for r in reports]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for ax, values, form, colour, label in (
            (left, [r.tokens_per_second for r in reports], "o-", BLUE, "concurrent"),
            (left, [r.sequential_tokens_per_second for r in reports], "s--", ORANGE, "sequential"),
            (right, [r.time_per_output_token_p50_ms for r in reports], "o-", BLUE,
             "concurrent, median"),
            (right, [r.time_per_output_token_p99_ms for r in reports], "^:", BLUE,
             "concurrent, p99"),
            (right, [r.sequential_time_per_output_token_p50_ms for r in reports], "s--", ORANGE,
             "sequential, median"),
        ):  # fmt: skip
            ax.plot(numbers, values, form, color=colour, label=label)
        for r in reports:
            left.annotate(f"{r.speedup:.1f}×", (r.concurrency, r.tokens_per_second),
                          xytext=(0, 5), textcoords="offset points", ha="center",
                          fontsize=8, color=BLUE)  # fmt: skip
        left.set(ylabel="tokens/s, all requests", title="Throughput")
        right.set(ylabel="ms per output token", title="Latency of a request")
        for ax in (left, right):
            ax.legend(loc="upper left")
            powers_of_two(ax, numbers, "requests")
            _from_zero(ax, 1.3)

    return Plot("throughput", "Throughput and latency by the number of requests.", draw, (9.0, 3.4))


def plot_stall(report: StallReport) -> Plot:
    """Return a plot of step time around the arrival of the prompt, one line per chunk size."""

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        cut = [c for c in report.chunks if c.cut]
        colours = dict(zip([c.chunk for c in cut], reversed(ORDERED[1:]), strict=False))
        first = last = 0.0
        for chunk in report.chunks:
            steps = chunk.timeline
            xs = [x for s in steps for x in (s.begin_ms, s.begin_ms + s.duration_ms)]
            ys = [s.duration_ms for s in steps for _ in (0, 1)]
            colour = colours.get(chunk.chunk, BLUE) if chunk.cut else ORANGE
            ax.plot(xs, ys, color=colour, label=chunk.name)
            # Show about as much before and after the prompt as the prompt itself takes.
            first = min(first, max(xs[0], -0.8 * chunk.prompt_ms))
            last = max(last, min(xs[-1], 2 * chunk.prompt_ms))
        ax.axvline(0, color=GREY, linewidth=1, linestyle=":")
        o = report.options
        ax.set(xlim=(first, last), ylabel="step time, ms",
               xlabel=f"time since a prompt of {o.prompt_tokens:,} tokens arrived, ms",
               title=f"{o.sessions} sessions decoding, K = {o.num_speculative_tokens}")  # fmt: skip
        ax.legend(loc="upper right")
        _from_zero(ax, 1.1)

    return Plot(
        "prefill-stall", "Step times around the arrival of a long prompt.", draw, (8.0, 3.4)
    )


def _step_times(ax: Axes, run: EngineRun, context: int, top: float) -> None:
    batches = run.batches
    for k, colour in zip(run.ks, _shades(len(run.ks)), strict=True):
        times = [run.cell(b, k, context).step_ms for b in batches]
        ax.plot(batches, times, "o-", color=colour, label=str(k))
    ax.set(title=f"context {context:,}", ylabel="step time, ms", ylim=(0, 1.05 * top))
    powers_of_two(ax, batches, "batch, sequences")


def _attention(ax: Axes, run: EngineRun) -> None:
    """Plot times at the largest batch and a middle K by context."""
    batch, k, contexts = run.batches[-1], run.middle_k, run.contexts
    of = [run.cell(batch, k, context) for context in contexts]
    ax.plot(contexts, [s.attention_ms for s in of], "o-", color=ORANGE, label="attention, masks")
    ax.plot(contexts, [s.matrix_products_ms for s in of], "s-", color=BLUE,
            label="matrix products")  # fmt: skip
    ax.set(title=f"batch {batch}, K = {k}", ylabel="ms per step")
    powers_of_two(ax, contexts, "context, tokens")
    ax.legend(loc="best")
    _from_zero(ax, 1.1)


def _prefill(ax: Axes, runs: Sequence[EngineRun]) -> None:
    for run, colour in zip(runs, _shades(len(runs)), strict=True):
        chunks = [p.chunk for p in run.prefill]
        rates = [p.tokens_per_second for p in run.prefill]
        ax.plot(chunks, rates, "o-", color=colour, label=_ranks_label(run))
    ax.set(title="prefill of a single prompt", ylabel="tokens/s")
    powers_of_two(ax, [p.chunk for p in runs[0].prefill], "chunk, tokens")
    _from_zero(ax, 1.1)
    if len(runs) > 1:
        ax.legend(loc="best")


def _ranks(ax: Axes, runs: Sequence[EngineRun]) -> None:
    """Plot verified tokens per second by tensor-parallel size, or if there is one, by context."""
    k, contexts, batches = runs[0].middle_k, runs[0].contexts, runs[0].batches
    if len(runs) > 1:
        middle = contexts[len(contexts) // 2]
        lines = [(run, middle, _ranks_label(run)) for run in runs]
        title = f"K = {k}, context {middle:,}"
    else:
        lines = [(runs[0], c, f"context {c:,}") for c in _thinned(contexts, 3)]
        title = f"K = {k}"
    for (run, context, label), colour in zip(lines, _shades(len(lines)), strict=True):
        rates = [run.cell(b, k, context).tokens_per_second for b in batches]
        ax.plot(batches, rates, "o-", color=colour, label=label)
    ax.set(title=title, ylabel="tokens verified/s")
    powers_of_two(ax, batches, "batch, sequences")
    ax.legend(loc="best")
    _from_zero(ax, 1.1)


def _ranks_label(run: EngineRun) -> str:
    size = run.tensor_parallel_size
    return "1 rank" if size == 1 else f"{size} ranks"


def _shades(number: int) -> Sequence[str]:
    """Return shades of one hue, from light to dark."""
    if number == 1:
        return [BLUE]
    last = len(ORDERED) - 1
    if number > len(ORDERED):
        return [ORDERED[i * last // (number - 1)] for i in range(number)]
    return ORDERED[len(ORDERED) - number :]


def _thinned(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of them, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[i * (len(values) - 1) // (most - 1)] for i in range(most)]


def _from_zero(ax: Axes, room: float) -> None:
    ax.set_ylim(0, max(1e-9, ax.get_ylim()[1] * room))

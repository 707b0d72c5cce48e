"""Plots of a load test's document. Each function draws one on a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flyspec_lab.drawing import BLUE, GREY, ORANGE, SERVICES
from loadtest.measures import knee
from loadtest.report.base import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Document = dict[str, Any]
SERIES = (BLUE, ORANGE, "#4a8f3c", GREY)
RED = "#b2182b"
NAMES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end to end"}
OUTCOMES = {
    "complete": ("completed", BLUE),
    "cancelled": ("given up", GREY),
    "refused": ("refused", ORANGE),
    "failed": ("failed", RED),
}
MOST_LABELS = 14
NARROW = 0.09
"""Share of the width that a name of a phase may take."""


def plots(document: Document) -> list[Plot]:
    """What to show, the scenario's main plot first."""
    found = []
    if any(p["series"] for p in document["phases"]):
        found.append(_curves(document))
    if len(_variants(document)) > 1:
        found.append(_by_variant(document))
    over_time = _over_time(document)
    if found:
        found += [_distributions(document), over_time]
    else:
        found += [over_time, _distributions(document)]
    return found


# --- throughput against latency ---------------------------------------------------------------


def _curves(document: Document) -> Plot:
    series: dict[str, list[dict[str, Any]]] = {}
    for phase in document["phases"]:
        if phase["series"] and phase["complete"]:
            series.setdefault(phase["series"], []).append(phase)

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for (name, phases), colour in zip(series.items(), SERIES, strict=False):
            rates = [p["tokens_per_s"] for p in phases]
            left.plot(rates, _ms(phases, "p50"), "o-", color=colour, label=f"{name}, p50")
            left.plot(rates, _ms(phases, "p99"), "^:", color=colour, linewidth=1.2,
                      label=f"{name}, p99")  # fmt: skip
            at = knee([(p["tokens_per_s"], p["e2e_ms"]["mean"]) for p in phases])
            if at is not None:
                left.plot(rates[at], _ms(phases, "p50")[at], "o", markersize=11, color=colour,
                          fillstyle="none", markeredgewidth=1.6)  # fmt: skip
                left.annotate("knee", (rates[at], _ms(phases, "p50")[at]), xytext=(8, -11),
                              textcoords="offset points", fontsize=9, color=colour)  # fmt: skip
            right.plot([_load(p) for p in phases], rates, "o-", color=colour, label=name)
        left.set(xlabel="tokens/s, all requests together", ylabel="end to end, s",
                 title="Latency against throughput")  # fmt: skip
        left.set_yscale("log")
        _plain_numbers(left.yaxis)
        # Room for the legend above the curves, and for the knee's name beside them.
        low, high = left.get_ylim()
        left.set_ylim(low, high * (high / low) ** 0.45)
        left.set_xlim(0, 1.1 * left.get_xlim()[1])
        closed = all(p["users"] for phases in series.values() for p in phases)
        right.set(ylabel="tokens/s, all requests together", title="Throughput", ylim=(0, None),
                  xlabel="users, each one request after the other" if closed
                  else "requests/s, Poisson arrivals")  # fmt: skip
        if closed:
            loads = sorted({_load(p) for phases in series.values() for p in phases})
            right.set_xscale("log", base=2)
            right.set_xticks(loads, [f"{load:g}" for load in loads])
            right.minorticks_off()
        left.legend(loc="upper left")
        right.legend(loc="best")

    return Plot(
        "Throughput and latency", (9.2, 3.8),
        "Every point is a step of load. The ring marks the knee: the step with the most "
        "throughput for its mean latency. Below it more load brings more than it costs, beyond "
        "it latency grows faster than throughput. Without a ring it was not reached.", draw,
    )  # fmt: skip


def _load(phase: dict[str, Any]) -> float:
    return float(phase["users"] or phase["offered_requests_per_s"])


def _ms(phases: Sequence[dict[str, Any]], which: str) -> list[float]:
    return [(p["e2e_ms"][which] or 0.0) / 1e3 for p in phases]


def _plain_numbers(axis: Axis) -> None:
    """On a logarithmic axis 1, 2, 5, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


# --- ways of asking ---------------------------------------------------------------------------


def _variants(document: Document) -> dict[str, dict[str, Any]]:
    judged = [p for p in document["phases"] if p["judged"] and len(p["by_variant"]) > 1]
    return {n: v for n, v in judged[-1]["by_variant"].items() if v["complete"]} if judged else {}


def _by_variant(document: Document) -> Plot:
    variants = _variants(document)

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        names = list(variants)[::-1]
        at = range(len(names))
        for which, marker, colour in (("p50", "o", BLUE), ("p99", "^", ORANGE)):
            values = [variants[n]["tpot_ms"][which] for n in names]
            left.plot(values, at, marker, color=colour, markersize=7, label=which)
        low, high = ([variants[n]["tpot_ms"][p] for n in names] for p in ("p50", "p99"))
        left.hlines(at, low, high, color=GREY, linewidth=1)
        left.set(xlabel="time per output token, ms", xlim=(0, None))
        left.set_yticks(at, names)
        left.legend(loc="best")
        right.barh(at, [variants[n]["tokens_per_round"] for n in names], color=BLUE, height=0.6)
        right.set(xlabel="tokens a round of the target")

    return Plot(
        "Ways of asking, side by side", (9.2, 0.9 + 0.42 * len(variants)),
        "All of them at the same time on the same installation.", draw,
    )  # fmt: skip


# --- over time --------------------------------------------------------------------------------


def _over_time(document: Document) -> Plot:
    line, memory, status = document["timeline"], document["memory"], document["status"]
    panels: list[Callable[[Axes], None]] = [
        lambda ax: _latency(ax, line), lambda ax: _outcomes(ax, line),
        lambda ax: _open(ax, line, status), *([lambda ax: _memory(ax, memory)] if memory else []),
    ]  # fmt: skip

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for ax, panel in zip(axes, panels, strict=True):
            panel(ax)
            ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
            _moments(ax, document)
        _phase_names(axes[0], document)
        _event_names(axes[-1], document)
        axes[-1].set_xlabel("seconds since the test began")
        axes[-1].set_xlim(0, document["seconds"])

    return Plot(
        "Over time", (9.2, 0.7 + 1.75 * len(panels)),
        f"Stretches of {line['width_s']:g} s; latencies by when a request was due. Grey lines "
        "part phases, dashed ones mark what the operator did.", draw,
    )  # fmt: skip


def _latency(ax: Axes, line: dict[str, Any]) -> None:
    for which, colour in (("p50", BLUE), ("p99", ORANGE)):
        points = [(begin + line["width_s"] / 2, ms / 1e3)
                  for begin, ms in zip(line["begin_s"], line[f"e2e_{which}_ms"], strict=True)
                  if ms is not None]  # fmt: skip
        ax.plot([x for x, _ in points], [y for _, y in points], marker=".", color=colour,
                label=which, linewidth=1.2)  # fmt: skip
    ax.set(ylabel="end to end, s", ylim=(0, None))


def _outcomes(ax: Axes, line: dict[str, Any]) -> None:
    width, base = line["width_s"], [0.0] * len(line["begin_s"])
    for name, (label, colour) in OUTCOMES.items():
        rates = [count / width for count in line[name]]
        if not any(rates):
            continue
        ax.bar(line["begin_s"], rates, width, base, align="edge", color=colour, label=label)
        base = [b + r for b, r in zip(base, rates, strict=True)]
    ax.set(ylabel="requests/s", ylim=(0, None))


def _open(ax: Axes, line: dict[str, Any], status: dict[str, Any]) -> None:
    """As the orchestrator tells, or else as the generator sees it."""
    seconds = status["seconds"]
    if seconds:
        for name, label, colour in (("active", "running", BLUE), ("waiting", "waiting", ORANGE)):
            ax.plot(seconds, status[name], color=colour, linewidth=1.2, label=label,
                    drawstyle="steps-post")  # fmt: skip
    else:
        ax.plot(line["begin_s"], line["under_way"], color=BLUE, linewidth=1.2,
                drawstyle="steps-post", label="under way")  # fmt: skip
    ax.set(ylabel="generations", ylim=(0, None))


def _memory(ax: Axes, memory: dict[str, dict[str, list[float]]]) -> None:
    for service, samples in memory.items():
        ax.plot(samples["seconds"], samples["mib"], linewidth=1.2, label=service,
                color=SERVICES.get(service))  # fmt: skip
    ax.set(ylabel="memory, MiB", ylim=(0, None))


def _moments(ax: Axes, document: Document) -> None:
    for phase in document["phases"][1:]:
        ax.axvline(phase["began_s"], color=GREY, linewidth=0.8)
    for event in document["events"]:
        ax.axvline(event["seconds"], color=GREY, linewidth=0.8, linestyle="--")


def _phase_names(ax: Axes, document: Document) -> None:
    """Above the plot, where they fit."""
    phases = document["phases"]
    if len(phases) > 6:
        return
    ends = [*(phase["began_s"] for phase in phases[1:]), document["seconds"]]
    for phase, end in zip(phases, ends, strict=True):
        narrow = end - phase["began_s"] < NARROW * document["seconds"]
        ax.annotate(phase["name"], (end if narrow else phase["began_s"], 1.0),
                    xycoords=("data", "axes fraction"), xytext=(-3 if narrow else 3, 3),
                    textcoords="offset points", ha="right" if narrow else "left",
                    fontsize=8, color=GREY)  # fmt: skip


def _event_names(ax: Axes, document: Document) -> None:
    events = document["events"]
    if len(events) > MOST_LABELS:
        return
    for event in events:
        ax.annotate(event["text"], (event["seconds"], 0.04), xycoords=("data", "axes fraction"),
                    rotation=90, fontsize=7, color="#444444", ha="right", va="bottom",
                    bbox={"color": "white", "pad": 0.5})  # fmt: skip


# --- distributions ----------------------------------------------------------------------------


def _distributions(document: Document) -> Plot:
    phases = [p for p in document["phases"] if p["quantiles_ms"]["e2e"]]
    judged = [p for p in phases if p["judged"]] or phases

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 3, sharey=True)
        colours = _colours(len(judged))
        series = list(dict.fromkeys(p["series"] for p in judged))
        for ax, metric in zip(axes, NAMES, strict=True):
            for phase, colour in zip(judged, colours, strict=True):
                values = phase["quantiles_ms"][metric]
                shares = [i / max(1, len(values) - 1) for i in range(len(values))]
                style = ("-", "--", ":")[series.index(phase["series"]) % 3]
                ax.plot(values, shares, style, color=colour, linewidth=1.3, label=phase["name"])
            ax.set(xlabel=f"{NAMES[metric]}, ms", ylim=(0, 1.02))
            if any(v > 0 for p in judged for v in p["quantiles_ms"][metric]):
                ax.set_xscale("log")
                _plain_numbers(ax.xaxis)
                ax.tick_params(axis="x", labelsize=8)
        axes[0].set_ylabel("share of requests")
        if len(judged) > 1:
            axes[2].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)

    return Plot(
        "How long requests take", (9.2, 3.3),
        "Share of the completed requests that took at most so long, a line a phase.", draw,
    )  # fmt: skip


def _colours(number: int) -> Sequence[str]:
    if number <= 3:
        return SERIES[:number]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = colormaps["viridis"]
    return [to_hex(shades(0.92 * i / (number - 1))) for i in range(number)]

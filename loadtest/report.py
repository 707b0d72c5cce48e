"""Reports of load tests: checks, tables of phases, throughput over latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyspec.tables import FittedTable, make_table
from flyspec_lab.drawing import COLORS
from flyspec_lab.report import Part, Plot, Report
from loadtest.figures import Check, Figures, PhaseResult, knee, number
from loadtest.load import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "phase", "load", "sent", "done", "refused", "given up", "failed", "requests/s", "tokens/s",
    "tokens/round", "TTFT p50", "p99", "TPOT p50", "p99", "end to end p50", "p99", "goodput",
)  # fmt: skip
NOTES = (
    "Times in ms; TTFT: from when a request was due to its first tokens; TPOT: from there to its "
    "end, divided by the tokens minus one; done: completed, only these have times; refused: the "
    "server had no room and said when to retry; given up: cancelled by its client on purpose; "
    "requests/s and tokens/s: of completed requests, each counted for the share of its time within"
    " the phase, excluding the phase's first tenth; tokens/round: output tokens per forward pass "
    "of the target; goodput: share of requests, excluding those given up, within the latency "
    "goals."
)


def checked(checks: Sequence[Check], parts: Sequence[Part], document: Mapping[str, Any]) -> Report:
    """Return the report of a run from its checks, its tables and lines, and further JSON."""
    passed = all(check.passed for check in checks)
    said = [f"{'ok    ' if c.passed else 'BROKEN'} {c.name}: {c.said}" for c in checks]
    document = {"passed": passed, "checks": checks, **document}
    return Report(document, [*parts, *said, "PASSED" if passed else "FAILED"], passed=passed)


def phase_table(results: Sequence[PhaseResult]) -> FittedTable:
    """Return the figures of phases."""
    return make_table(COLUMNS, [_row(r.name, r.load, r.figures) for r in results], left=2)


def _row(name: str, load: str, f: Figures) -> list[str]:
    counts = (f"{count:,}" for count in (f.sent, f.complete, f.refused, f.cancelled, f.failed))
    spreads = (getattr(f, metric) for metric in METRICS)
    delays = (ms for spread in spreads for ms in (spread.p50, spread.p99))
    rates = f.requests_per_s, f.tokens_per_s, f.tokens_per_round
    goodput = "–" if f.goodput is None else f"{f.goodput:.1%}"
    return [name, load, *counts, *map(number, (*rates, *delays)), goodput]


def curves(results: Sequence[PhaseResult]) -> list[Plot]:
    """Return throughput against latency and load, if there are steps of a series."""
    series: dict[str, list[PhaseResult]] = {}
    for result in results:
        if result.series and result.figures.complete:
            series.setdefault(result.series, []).append(result)

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for (name, steps), color in zip(series.items(), COLORS, strict=False):
            rates = [s.figures.tokens_per_s for s in steps]
            p50, p99 = ([getattr(s.figures.e2e, p) / 1e3 for s in steps] for p in ("p50", "p99"))
            left.plot(rates, p50, "o-", color=color, label=f"{name}, p50")
            left.plot(rates, p99, "^:", color=color, label=f"{name}, p99")
            at = knee(steps)
            if at is not None:
                left.annotate("knee", (rates[at], p50[at]), xytext=(8, -11), color=color,
                              textcoords="offset points", fontsize=9)  # fmt: skip
            right.plot([float(s.load.split()[0]) for s in steps], rates, "o-", color=color,
                       label=name)  # fmt: skip
        left.set(xlabel="tokens/s, all requests together", ylabel="end to end, s", yscale="log")
        right.set(xlabel="users, or requests/s", ylabel="tokens/s, all requests together")
        left.legend()
        right.legend()

    caption = (
        "Throughput and latency: every point is a step of load. Up to the knee, the step with the "
        "most throughput for its mean latency, more load brings more than it costs."
    )
    return [Plot("curves", caption, draw, (9.2, 3.8))] if series else []

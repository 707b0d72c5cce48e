"""What came of a run: faults, streams, recoveries and what they added; in words and as a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.chaos.faults import KINDS, Fault
from bench.chaos.work import Request
from bench.command import print_table
from flyspec.bench.engine.stall_report import Distribution
from flyspec.drawing import BLUE, save

MAX_GROWTH, MAX_GROWTH_MIB = 1.5, 64.0
"""The orchestrator may end with so many times its memory, and so much more."""


@dataclass(slots=True)
class ChaosReport:
    """A run. `violations` is empty if all went well; times are in seconds since the run began."""

    seed: int
    streams: int
    dtype: str
    seconds: float = 0.0
    requests: int = 0
    completed_exact: int = 0
    completed_lossy: int = 0
    replayed_rounds: int = 0
    tokens: int = 0
    faults: list[Fault] = field(default_factory=list)
    recoveries: dict[str, Distribution] = field(default_factory=dict)
    undisturbed: int = 0
    silences: Distribution | None = None
    sessions_left: dict[str, int] = field(default_factory=dict)
    orchestrator_mib: tuple[float, float] = (0.0, 0.0)
    tokens_each_second: list[int] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every stream went on as promised."""
        return not self.violations


def count(report: ChaosReport, requests: Sequence[Request]) -> None:
    """Fill in what the requests say; problems become violations."""
    delays: dict[str, list[float]] = {}
    silences = []
    for request in requests:
        if problem := request.problem:
            report.violations.append(
                f"{request}, {request.begun_s:.1f} to {request.ended_s:.1f} s: {problem}"
            )
        generation = request.generation
        if generation is None:
            continue
        if request.lossy:
            report.completed_lossy += 1
        else:
            report.completed_exact += 1
        report.tokens += len(generation.token_ids)
        for recovery in generation.completion.recoveries:
            delays.setdefault(recovery.kind.name, []).append(recovery.delay_ns / 1e6)
        report.undisturbed += not generation.completion.num_recoveries
        times = [request.begun_s, *(at for at, _ in request.arrivals), request.ended_s]
        silences.append(1e3 * max(b - a for a, b in pairwise(times)))
    report.requests = len(requests)
    report.recoveries = {kind: Distribution.of(of) for kind, of in sorted(delays.items())}
    report.silences = Distribution.of(silences) if silences else None
    report.tokens_each_second = _each_second(requests)


def _each_second(requests: Sequence[Request]) -> list[int]:
    arrivals = [arrival for request in requests for arrival in request.arrivals]
    counts = [0] * (int(max((at for at, _ in arrivals), default=0.0)) + 1)
    for at, number in arrivals:
        counts[int(at)] += number
    return counts


def check_memory(report: ChaosReport) -> None:
    """The orchestrator must not have grown wildly."""
    warm, end = report.orchestrator_mib
    if end > MAX_GROWTH * warm + MAX_GROWTH_MIB:
        report.violations.append(f"the orchestrator grew from {warm:.0f} to {end:.0f} MiB")


def show(report: ChaosReport) -> None:
    """The report for people, its tables in Markdown."""
    print(
        f"{report.streams} streams for {report.seconds:.0f} s, {report.dtype}, seed {report.seed}: "
        f"{report.requests} requests, {report.completed_exact} completed with exact, "
        f"{report.completed_lossy} with lossy rules ({report.replayed_rounds} rounds replayed); "
        f"{report.tokens} tokens, {report.tokens / max(1.0, report.seconds):.0f} a second"
    )
    services = list(dict.fromkeys(sorted(f.service for f in report.faults)))
    counts = Counter((f.kind, f.service) for f in report.faults)
    rows = []
    for kind in KINDS:
        numbers = [counts[kind, service] for service in services]
        rows.append([kind, *map(str, numbers), str(sum(numbers))])
    print_table(["fault", *services, "all"], rows)
    rows = [[kind.lower().replace("_", " "), *_cells(d)] for kind, d in report.recoveries.items()]
    if report.silences is not None:
        rows.append(["longest silence of a request", *_cells(report.silences)])
    print_table(["recovery", "number", "p50, ms", "p99, ms", "max, ms"], rows)
    print(
        f"{report.undisturbed} requests without any recovery; sessions left: "
        f"{', '.join(f'{n} at {name}' for name, n in report.sessions_left.items()) or 'unknown'}; "
        f"orchestrator {report.orchestrator_mib[0]:.0f} MiB before, "
        f"{report.orchestrator_mib[1]:.0f} MiB after"
    )
    for violation in report.violations[:20]:
        print(f"VIOLATION: {violation}")
    print("PASSED" if report.passed else f"FAILED: {len(report.violations)} violations, "
          f"repeat with --seed {report.seed}")  # fmt: skip


def _cells(delays: Distribution) -> list[str]:
    times = (delays.p50_ms, delays.p99_ms, delays.max_ms)
    return [str(delays.count), *(f"{time:,.0f}" for time in times)]


def plot(report: ChaosReport, path: Path) -> None:
    """Tokens of all streams each second, and under it what was done to which service when."""

    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        seconds = range(len(report.tokens_each_second))
        top.plot(seconds, report.tokens_each_second, color=BLUE, linewidth=1)
        top.set(ylabel="tokens in a second", ylim=(0, None),
                title=f"{report.streams} streams, {len(report.faults)} faults")  # fmt: skip
        colours = dict(zip(KINDS, (
            "#08306b", "#4a98c9", "#d95f02", "#9ecae1", "#fdae6b", "#777777", "#252525", "#e7298a",
            "#1b7837", "#5aae61", "#a6dba0", "#762a83", "#c51b7d", "#b8860b",
        ), strict=True))  # fmt: skip
        services = sorted({f.service for f in report.faults}, reverse=True)
        drawn: set[str] = set()
        for f in report.faults:
            bottom.barh(services.index(f.service), max(0.6, f.ended_s - f.begun_s), left=f.begun_s,
                        color=colours[f.kind], height=0.8,
                        label="" if f.kind in drawn else f.kind)  # fmt: skip
            drawn.add(f.kind)
        bottom.set_yticks(range(len(services)), services)
        bottom.set(xlabel="seconds")
        bottom.grid(visible=False, axis="y")
        bottom.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=(len(KINDS) + 1) // 2)

    save(path, (8.0, 4.6), draw)

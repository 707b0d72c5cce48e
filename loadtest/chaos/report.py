"""The results of chaos: faults, streams, recoveries and the time these added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from flyspec.tables import FittedTable, make_table
from flyspec_lab.drawing import BLUE
from flyspec_lab.report import Plot, Report
from loadtest.chaos.faults import KINDS, Fault
from loadtest.chaos.work import Request
from loadtest.report import VERSION, checked_report
from loadtest.summary import Spread

MAX_GROWTH, MAX_GROWTH_MIB = 1.5, 64.0
"""Maximum memory of the orchestrator at the end: this many times that before, plus this much."""
MAX_SHOWN = 20
COLOURS = dict(zip(KINDS, (
    "#08306b", "#4a98c9", "#d95f02", "#9ecae1", "#fdae6b", "#777777", "#252525", "#e7298a",
    "#1b7837", "#5aae61", "#a6dba0", "#762a83", "#c51b7d", "#b8860b",
), strict=True))  # fmt: skip


@dataclass(slots=True)
class ChaosResult:
    """A run. `violations` is empty if all went well; times are seconds since the run began."""

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
    recoveries: dict[str, Spread] = field(default_factory=dict)
    undisturbed: int = 0
    silences: Spread | None = None
    sessions_left: dict[str, int] = field(default_factory=dict)
    orchestrator_mib: tuple[float, float] = (0.0, 0.0)
    tokens_each_second: list[int] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def count(self, requests: Sequence[Request]) -> None:
        """Fill in the results of the requests; problems become violations."""
        delays: dict[str, list[float]] = {}
        silences = []
        arrivals = [arrival for request in requests for arrival in request.arrivals]
        for request in requests:
            if problem := request.problem:
                self.violations.append(
                    f"{request}, {request.begun_s:.1f} to {request.ended_s:.1f} s: {problem}"
                )
            generation = request.generation
            if generation is None:
                continue
            self.completed_lossy += request.lossy
            self.completed_exact += not request.lossy
            self.tokens += len(generation.token_ids)
            for recovery in generation.completion.recoveries:
                delays.setdefault(recovery.kind.name, []).append(recovery.delay_ns / 1e6)
            self.undisturbed += not generation.completion.num_recoveries
            times = [request.begun_s, *(at for at, _ in request.arrivals), request.ended_s]
            silences.append(1e3 * max(b - a for a, b in pairwise(times)))
        self.requests = len(requests)
        self.recoveries = {kind: Spread.of(of) for kind, of in sorted(delays.items())}
        self.silences = Spread.of(silences) if silences else None
        self.tokens_each_second = [0] * (int(max((at for at, _ in arrivals), default=0.0)) + 1)
        for at, number in arrivals:
            self.tokens_each_second[int(at)] += number

    def check_memory(self) -> None:
        warm, end = self.orchestrator_mib
        if end > MAX_GROWTH * warm + MAX_GROWTH_MIB:
            self.violations.append(f"the orchestrator grew from {warm:.0f} to {end:.0f} MiB")

    def report(self) -> Report:
        """Return the run in tables, sentences and a plot."""
        violations = self.violations or [""]
        document = {
            "version": VERSION,
            "passed": not self.violations,
            **asdict(self),
            "checks": [
                {"name": "violations", "passed": not said, "said": said or "none"}
                for said in violations[:MAX_SHOWN]
            ],
            "warnings": [f"{len(violations)} violations in all"] * (len(violations) > MAX_SHOWN),
            "options": {"seed": self.seed, "streams": self.streams, "dtype": self.dtype},
        }
        return checked_report(
            document,
            "flyspec chaos",
            [*self._tables(document), *self._lines(document), _plot(document)],
        )

    def _tables(self, document: dict[str, Any]) -> list[FittedTable]:
        faults = document["faults"]
        services = sorted({f["service"] for f in faults})
        counts = Counter((f["kind"], f["service"]) for f in faults)
        by_kind = []
        for kind in KINDS:
            numbers = [counts[kind, service] for service in services]
            by_kind.append([kind, *map(str, numbers), str(sum(numbers))])
        spreads = {kind.lower().replace("_", " "): s for kind, s in document["recoveries"].items()}
        if document["silences"] is not None:
            spreads["longest silence of a request"] = document["silences"]
        return [
            make_table(["fault", *services, "all"], by_kind, "faults"),
            make_table(["recovery", "number", "p50, ms", "p99, ms", "max, ms"], [
                [kind, str(s["count"]), *(f"{s[part]:,.0f}" for part in ("p50", "p99", "max"))]
                for kind, s in spreads.items()
            ], "recoveries"),
        ]  # fmt: skip

    def _lines(self, d: dict[str, Any]) -> list[str]:
        left = ", ".join(f"{n} at {name}" for name, n in d["sessions_left"].items())
        return [
            f"{d['streams']} streams for {d['seconds']:.0f} s, {d['dtype']}, seed {d['seed']}: "
            f"{d['requests']} requests, {d['completed_exact']} completed with exact, "
            f"{d['completed_lossy']} with lossy rules ({d['replayed_rounds']} rounds replayed); "
            f"{d['tokens']} tokens, {d['tokens'] / max(1.0, d['seconds']):.0f} per second",
            f"{d['undisturbed']} requests without any recovery; sessions left: "
            f"{left or 'unknown'}; orchestrator {d['orchestrator_mib'][0]:.0f} MiB before, "
            f"{d['orchestrator_mib'][1]:.0f} MiB after",
        ]


def _plot(document: dict[str, Any]) -> Plot:
    """Return a plot of the tokens of all streams per second, and of the faults below."""
    faults, tokens = document["faults"], document["tokens_each_second"]

    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        top.plot(range(len(tokens)), tokens, color=BLUE, linewidth=1)
        top.set(ylabel="tokens per second", ylim=(0, None),
                title=f"{document['streams']} streams, {len(faults)} faults")  # fmt: skip
        services = sorted({f["service"] for f in faults}, reverse=True)
        drawn: set[str] = set()
        for f in faults:
            kind, begun = f["kind"], f["begun_s"]
            bottom.barh(services.index(f["service"]), max(0.6, f["ended_s"] - begun),
                        left=begun, color=COLOURS[kind], height=0.8,
                        label="" if kind in drawn else kind)  # fmt: skip
            drawn.add(kind)
        bottom.set_yticks(range(len(services)), services)
        bottom.set(xlabel="seconds")
        bottom.grid(visible=False, axis="y")
        columns = (len(KINDS) + 1) // 2
        bottom.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=columns)

    caption = "Tokens per second; bars: what was done to which service."
    return Plot("over-time", caption, draw, (8.0, 4.6))

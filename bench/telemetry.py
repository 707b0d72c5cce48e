"""What telling of a round costs, without the models: `python -m bench.telemetry`.

A round of 15 drafts, 9 of them accepted, with metrics alone and with a trace. Figures are
microseconds of CPU, the median of `--repeats` runs of `--rounds` rounds each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from bench import command
from flyspec.telemetry.metrics import EngineMetrics
from flyspec.telemetry.traces import Traces
from flyspec.values.rounds import (
    Decision,
    DraftChunk,
    DraftTimings,
    Outcome,
    Verdict,
    VerifyTimings,
)
from flyspec.values.tokens import Origin
from orchestrator.generation.ledger import Ledger, RoundOutcome
from orchestrator.generation.window import Commit, Token
from orchestrator.telemetry.metrics import GenerationMetrics, RoundCounter
from orchestrator.telemetry.tracing import GenerationTrace

NUM_ACCEPTED = 9
DECISIONS = [
    *[Decision(Outcome.EXACT)] * NUM_ACCEPTED,
    Decision(Outcome.REJECTED, 5, 0.2, 0.3),
    *[Decision(Outcome.NOT_REACHED)] * 5,
]
FINAL = [*[Token(5, Origin.EXACT_MODEL)] * NUM_ACCEPTED, Token(6, Origin.CORRECTION)]


def make_round(index: int) -> RoundOutcome:
    """The `index`-th round of a generation."""
    start = 10 * index
    keep = start + NUM_ACCEPTED
    timings = VerifyTimings(100_000, 9_000_000, 200_000, 9_500_000)
    verdict = Verdict(
        keep, 6, tuple(DECISIONS), start_length=start, round_id=index, timings=timings
    )
    drafted = DraftTimings(50_000, 4_000_000, 4_300_000)
    proposal = DraftChunk(timings=drafted, drafter="model", arrived_ns=time.perf_counter_ns())
    return RoundOutcome(
        [Commit(FINAL)], verdict, start, keep + 1, 16_000_000, None, proposal, index,
        time.perf_counter_ns(),
    )  # fmt: skip


def microseconds(work: Callable[[], None], rounds: int) -> float:
    """CPU time of one of so many rounds."""
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / rounds / 1e3


def metrics_of_rounds(num_rounds: int) -> float:
    """Counting them in the orchestrator."""
    ledger = Ledger()
    counter = RoundCounter(GenerationMetrics(CollectorRegistry()), "fly", ledger)
    rounds = [make_round(index) for index in range(num_rounds)]
    for round_ in rounds:
        ledger.record(round_, FINAL)

    def count() -> None:
        for round_ in rounds:
            counter.count(round_, FINAL)

    return microseconds(count, num_rounds)


def metrics_of_steps(num_steps: int) -> float:
    """Counting an engine's steps."""
    engine = EngineMetrics(CollectorRegistry(), "verify")

    def count() -> None:
        for _ in range(num_steps):
            engine.step(9_000_000, 8, 128)

    return microseconds(count, num_steps)


def trace_of_rounds(num_rounds: int, file: Path) -> float:
    """Making the orchestrator's three spans of each, with their export."""
    traces = Traces("bench", file=str(file))
    span = traces.begin("", time.perf_counter_ns())
    assert span is not None
    trace = GenerationTrace(traces, span, "bench")
    rounds = [make_round(index) for index in range(num_rounds)]

    def run() -> None:
        for round_ in rounds:
            trace.waits_for("draft", round_.round_id)
            trace.waits_for("verify", round_.round_id)
            trace.round(round_, len(FINAL))
        trace.end("bench", time.perf_counter_ns())
        traces.close()

    return microseconds(run, num_rounds)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """The median of each figure."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spans.jsonl"
        works: dict[str, Callable[[], float]] = {
            "metrics_us_per_round": lambda: metrics_of_rounds(options.rounds),
            "metrics_us_per_step": lambda: metrics_of_steps(options.rounds),
            "trace_us_per_round": lambda: trace_of_rounds(options.rounds, file),
        }
        return {
            name: round(statistics.median(work() for _ in range(options.repeats)), 2)
            for name, work in works.items()
        }


def show(medians: dict[str, float]) -> None:
    """A line a figure."""
    print(f"metrics, orchestrator: {medians['metrics_us_per_round']} us a round")
    print(f"metrics, engine:       {medians['metrics_us_per_step']} us a step")
    print(f"trace, if sampled:     {medians['trace_us_per_round']} us a round, export included")


def main() -> int:
    """Measure and print."""
    parser = command.parser("telemetry", __doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    return command.run(options, lambda: measure(options), dict, show)


if __name__ == "__main__":
    raise SystemExit(main())

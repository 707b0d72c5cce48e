"""Thread or process: how late is the event loop when the engine runs in a thread beside it?

    python -m bench.loop_lag

Timers of the event loop, a few milliseconds each, and how late each comes: with nothing else to
do, with the verify engine under load in a thread of the same process, and with the same engine
under the same load in a process of its own, which is the best that could be had by moving it there.
The engine's sessions send their rounds from the event loop that they share with the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import time
from multiprocessing.synchronize import Event
from typing import NamedTuple

import torch
import uvloop

from bench import command
from flyspec.bench.engine.stall import Crowd, RecordingEngine, RecordingRunner
from flyspec.cli.stack import DEMO_MODELS
from flyspec.engine.loading import load_model
from flyspec.engine.scheduler import StepBudget

PAUSE_S = 0.003
CONTEXT = 128


class Lag(NamedTuple):
    """How late the timers of one situation came, ms; rounds a second that the engine answered."""

    engine: str
    p50_ms: float
    p99_ms: float
    max_ms: float
    rounds_per_s: float


async def timers(seconds: float) -> list[float]:
    """How late timers come, ms."""
    late, until = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < until:
        await asyncio.sleep(PAUSE_S)
        late.append((time.perf_counter() - begin - PAUSE_S) * 1e3)
    return late


class EngineLoad:
    """An engine with sessions that send a round as soon as the one before is answered."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        loaded = load_model(str(DEMO_MODELS / "target"), "cpu", "bfloat16", 1024)
        runner = RecordingRunner(loaded, args.sessions, batch_invariant=None)
        runner.warm_up()
        self._engine = RecordingEngine(runner, loaded, StepBudget())
        self._crowd = Crowd(self._engine, args.sessions, CONTEXT, args.k)

    @property
    def rounds(self) -> int:
        """Answered so far."""
        return len(self._crowd.rounds)

    async def start(self) -> None:
        """Open the sessions; returns when each had its first round."""
        self._engine.start()
        await self._crowd.start(random.Random(0))

    async def stop(self) -> None:
        """Close the sessions and end the engine."""
        await self._crowd.end()
        self._engine.stop()


async def in_a_thread(args: argparse.Namespace, name: str) -> Lag:
    """The engine beside the event loop that is measured."""
    load = EngineLoad(args)
    await load.start()
    before = load.rounds
    late = await timers(args.seconds)
    rate = (load.rounds - before) / args.seconds
    await load.stop()
    return _lag(name, late, rate)


def _child(args: argparse.Namespace, ready: Event, end: Event) -> None:
    async def run() -> None:
        load = EngineLoad(args)
        await load.start()
        ready.set()
        while not end.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await load.stop()

    uvloop.run(run())


async def in_a_process(args: argparse.Namespace, name: str) -> Lag:
    """The engine in another process, with an event loop of its own."""
    spawn = multiprocessing.get_context("spawn")
    ready, end = spawn.Event(), spawn.Event()
    child = spawn.Process(target=_child, args=(args, ready, end), daemon=True)
    child.start()
    try:
        if not await asyncio.to_thread(ready.wait, 120):
            raise RuntimeError("the engine's process did not start")
        return _lag(name, await timers(args.seconds), 0.0)
    finally:
        end.set()
        await asyncio.to_thread(child.join)


async def idle(args: argparse.Namespace, name: str) -> Lag:
    """No engine."""
    return _lag(name, await timers(args.seconds), 0.0)


def _lag(name: str, late: list[float], rate: float) -> Lag:
    late = sorted(late)
    return Lag(name, statistics.median(late), late[int(0.99 * len(late))], late[-1], rate)


async def measure(args: argparse.Namespace) -> list[Lag]:
    """Every situation in turn, so many times; the median of each figure."""
    ways = {"none": idle, "thread": in_a_thread, "process": in_a_process}
    samples: dict[str, list[Lag]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, way in ways.items():
            samples[name].append(await way(args, name))
    figures = Lag._fields[1:]
    return [
        Lag(name, *(statistics.median(getattr(lag, f) for lag in lags) for f in figures))
        for name, lags in samples.items()
    ]


def show(lags: list[Lag]) -> None:
    """The table."""
    print(f"{'engine':10s} {'p50':>8s} {'p99':>8s} {'max':>8s}   late, ms; rounds/s")
    for lag in lags:
        rate = f"{lag.rounds_per_s:.0f}" if lag.rounds_per_s else "-"
        print(f"{lag.engine:10s} {lag.p50_ms:8.2f} {lag.p99_ms:8.2f} {lag.max_ms:8.2f}   {rate}")


def main() -> int:
    """Parse flags, measure, print."""
    parser = command.parser("loop_lag", __doc__)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--k", type=int, default=8, help="drafts a round")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the engine")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    return command.run(
        args, lambda: uvloop.run(measure(args)), lambda lags: [lag._asdict() for lag in lags], show
    )


if __name__ == "__main__":
    raise SystemExit(main())

"""Does the stack stay as it is? `python -m bench.soak --sessions 1000 --plot FILE`.

Clients come and go: each thinks for a random time, asks for a text of random length by a random
rule, drafter and K, and leaves a share of them in mid-stream. Meanwhile services are killed and
started again. At the end no session may be left in any service, and the memory of each process must
not have grown since it was warm: the slope of its resident memory over the sessions served, the
first third of each process's life left out.

Exits with 1 if sessions are left, memory has grown, or a request failed although all services ran.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from contextlib import aclosing
from dataclasses import asdict

from bench import command
from bench.admin import left_open, settled
from bench.chaos.work import prompt_of
from bench.restartable import free_port
from bench.soak_report import Kill, ProcessMemory, SoakReport, growth, plot, show
from demo.corpus import problems
from flyspec.cli.stack import Stack, StackOptions
from flyspec.client import AdminClient, Client, Completion, GenerateOptions
from flyspec.errors import FlyspecError, ResourceExhaustedError
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from loadtest.sampler import resident_mib

RULES = ("exact", "fly", "fly-paper", "margin", "fuzzy", "typical", "rejection", "random")
DRAFTERS = ("", "model", "prompt_lookup", "multi_level")
CANCELLED = 0.25
SETTLE_S = 5.0
"""So long after a service is back, a request may still begin that fails for its absence."""


class SoakRun:
    """A run: the stack, its clients, what disturbs them, and what is seen of it."""

    def __init__(self, args: argparse.Namespace, stack: Stack) -> None:
        self._args, self._stack = args, stack
        self._rng = random.Random(args.seed)
        self.report = SoakReport()
        self._begun = 0
        self._start = time.monotonic()
        self._down: set[str] = set()
        self._calm_since = self._start
        self._questions = [p.question for p in problems("soak", 50)]

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def run(self) -> SoakReport:
        """All of it."""
        report, client_tasks = self.report, []
        watch = asyncio.create_task(self._watch())
        disturb = asyncio.create_task(self._disturb())
        try:
            async with Client(self._stack.address) as client:
                for _ in range(self._args.concurrent):
                    client_tasks.append(asyncio.create_task(self._client(client)))
                await asyncio.gather(*client_tasks)
            report.seconds = self._now()
            await disturb
            await self._end()
        finally:
            for task in (watch, disturb, *client_tasks):
                task.cancel()
            await asyncio.gather(watch, disturb, *client_tasks, return_exceptions=True)
        self._measure()
        report.growth = growth(report.memory)
        return report

    async def _client(self, client: Client) -> None:
        """One request after the other, with pauses."""
        while self._begun < self._args.sessions:
            self._begun += 1
            rng = random.Random(self._rng.random())
            await asyncio.sleep(rng.expovariate(1 / self._args.pause))
            while "verify" in self._down:  # nothing but errors is to be had  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            began = time.monotonic()
            try:
                await self._request_with_patience(client, rng)
            except FlyspecError as error:
                message = f"{type(error).__name__}: {error}"
                self.report.failed[message] = self.report.failed.get(message, 0) + 1
                # In flight, or begun, while something was down or hardly back.
                if not self._down and began > self._calm_since + SETTLE_S:
                    self.report.unexpected.append(message)
            self.report.sessions += 1

    async def _request_with_patience(self, client: Client, rng: random.Random) -> None:
        """A request, made again when it was refused for want of room, as the refusal says."""
        while True:
            try:
                return await self._request(client, rng)
            except ResourceExhaustedError as error:
                if error.retry_after_s is None:
                    raise
                self.report.refused += 1
                await asyncio.sleep(error.retry_after_s)

    async def _request(self, client: Client, rng: random.Random) -> None:
        leaves = rng.random() < CANCELLED
        events_left = rng.randint(0, 6) if leaves else None
        options = self._options(rng)
        generation = client.generate(prompt_of(rng, self._questions), options)
        async with aclosing(generation) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Completion):
                    self.report.completed += 1
                    self.report.tokens += event.completion_tokens
                    return
                if events_left is not None:
                    if events_left == 0:
                        break
                    events_left -= 1
        self.report.cancelled += 1

    def _options(self, rng: random.Random) -> GenerateOptions:
        return GenerateOptions(
            sampling=SamplingParams(rng.choice([0.0, 0.0, 0.8]), rng.choice([1.0, 0.9])),
            seed=rng.randrange(1 << 30),
            max_tokens=rng.randint(1, self._args.max_tokens),
            ignore_eos=rng.random() < 0.5,
            drafter=rng.choice(DRAFTERS),
            rule=Rule(rng.choice(RULES)),
            num_speculative_tokens=rng.choice([0, 2, 4, 8, 15]),
            logprobs=rng.choice([None, None, 2]),
        )

    async def _disturb(self) -> None:
        """Kill services so many times each, at even distances."""
        args, plan = self._args, []
        for name, times in (("draft", args.draft_kills), ("verify", args.verify_kills)):
            plan += [(args.sessions * (i + 1) // (times + 1), name) for i in range(times)]
        for at, name in sorted(plan):
            while self.report.sessions < at:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            killed, served = self._now(), self.report.sessions
            self._down.add(name)
            self._stack.services[name].send(signal.SIGKILL)
            await self._stack.restart(name)
            self._down.discard(name)
            self._calm_since = time.monotonic()
            self.report.faults.append(Kill(name, served, killed, self._now()))
            print(f"{name} killed and back in {self._now() - killed:.1f} s", file=sys.stderr)

    async def _watch(self) -> None:
        while True:
            self._measure()
            await asyncio.sleep(self._args.every)

    def _measure(self) -> None:
        for name, service in self._stack.services.items():
            if name not in self._down and (mib := resident_mib(service.pid)) is not None:
                lives = sum(fault.service == name for fault in self.report.faults)
                entry = ProcessMemory(self._now(), self.report.sessions, name, lives, mib)
                self.report.memory.append(entry)

    async def _end(self) -> None:
        """Wait for every session to be gone, and note what is left if they are not."""
        async with AdminClient(self._stack.admin_address) as admin:
            status = await settled(admin, 30.0)
        self.report.left = left_open(status)
        sessions = status.verify.sessions
        hits, queries = sessions.prefix_cache_hits, sessions.prefix_cache_queries
        self.report.prefix_cache_hit_rate = hits / max(1, queries)


async def _main(args: argparse.Namespace) -> SoakReport:
    options = StackOptions(
        log_level="error", max_sessions=args.max_sessions, dtype=args.dtype,
        draft_port=free_port(), verify_port=free_port(),
    )  # fmt: skip
    async with Stack(options) as stack:
        return await SoakRun(args, stack).run()


def main() -> int:
    """Run it; the exit code."""
    parser = command.parser("soak", __doc__, plots=True)
    parser.add_argument("--sessions", type=int, default=1000, help="requests in all")
    parser.add_argument("--concurrent", type=int, default=24, help="clients at once")
    parser.add_argument("--max-sessions", type=int, default=16, help="slots of each service")
    parser.add_argument("--max-tokens", type=int, default=24, help="longest text, in tokens")
    parser.add_argument("--pause", type=float, default=0.3, help="a client's mean pause, seconds")
    parser.add_argument("--draft-kills", type=int, default=4, help="kills of the draft service")
    parser.add_argument("--verify-kills", type=int, default=1, help="kills of the verify service")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between measurements")
    parser.add_argument("--dtype", default="auto", help="the target's numbers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return command.run(
        args, lambda: asyncio.run(_main(args)), lambda r: {**asdict(r), "passed": r.passed}, show,
        lambda r: r.passed, plot,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

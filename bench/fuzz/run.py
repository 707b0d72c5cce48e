"""A run: batches of calls, many at once, and after each a look at the server from beside."""

from __future__ import annotations

import asyncio
import sys
import time
from random import Random

import grpc

from bench.fuzz.report import Complaint, FuzzReport
from bench.fuzz.script import LEFT, Action, CallOutcome, Do, Script, finish, play
from bench.fuzz.services import IDLE_TIMEOUT_S, FuzzTarget, WrongAnswerError
from bench.fuzz.system import attack_port
from flyspec.errors import FlyspecError
from flyspec.rpc.malformed import REQUEST_TIMEOUT_S
from loadtest.sampler import ProcessMemory, resident_mib

BATCH_MESSAGES = 500
CONCURRENT = 24
MAX_LEFT = 8
CONNECTIONS = 3
CHANNELS = 3
SETTLE_S = 10.0
MAX_SHRINKS = 3
MAX_COMPLAINTS = 20
LOG_ALARMS = ("Traceback (most recent call last)", "internal error", " ERROR ", "Exception")


class FuzzRun:
    """Calls of one seed against a started target."""

    def __init__(self, server: str, target: FuzzTarget, seed: int, log: list[str]) -> None:
        self.report = FuzzReport(server, seed)
        self._target, self._log = target, log
        self._next = 0
        self._left: list[CallOutcome] = []
        self._processes: list[str] | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._patient = grpc.aio.insecure_channel(target.address)
        self._rng = Random(f"connections {seed}")

    def script(self, index: int) -> Script:
        """The script of this number."""
        rng = Random(f"{self.report.server} {self.report.seed} {index}")
        return self._target.source.script(rng)

    async def run(self, messages: int) -> None:
        """So many messages, or until something has failed too often."""
        began = said = time.monotonic()
        report = self.report
        await self._look()
        ended = asyncio.Event()
        canary = asyncio.create_task(self._sing(ended))
        try:
            while report.messages < messages and len(report.complaints) < MAX_COMPLAINTS:
                await self._batch(min(BATCH_MESSAGES, messages - report.messages))
                report.seconds = time.monotonic() - began
                if time.monotonic() - said > 30:
                    said = time.monotonic()
                    wrong = len(report.complaints)
                    print(
                        f"{report.server}: {report.messages:,} messages, {wrong} complaints",
                        file=sys.stderr,
                    )
            await self._close_left()
        finally:
            ended.set()
            await canary
        await self._end()
        report.seconds = time.monotonic() - began

    async def only(self, index: int) -> CallOutcome:
        """One script alone."""
        outcome = await play(self._patient, self.script(index))
        if outcome.status == LEFT:
            outcome.call.cancel()
            await finish(outcome)
        return outcome

    async def _batch(self, messages: int) -> None:
        goal = self.report.messages + messages
        failed: list[tuple[int, CallOutcome]] = []
        played: list[int] = []

        async def work(number: int) -> None:
            passing = self._channels[number % CHANNELS]
            while self.report.messages < goal:
                index, self._next = self._next, self._next + 1
                script = self.script(index)
                if script.num_messages == 0 and self._rng.random() < 0.5:
                    continue
                leaves = script.steps and script.steps[-1].do is Do.LEAVE
                outcome = await play(self._patient if leaves else passing, script)
                played.append(index)
                if outcome.status == LEFT:
                    await self._keep(outcome)
                self.report.count(outcome)
                if outcome.complaint:
                    failed.append((index, outcome))

        # New connections: on an old one remain the streams whose end a write met (`WRITE_RACE`).
        await self._close_channels()
        self._channels = [
            grpc.aio.insecure_channel(self._target.address, options=[("flyspec.fuzz", i)])
            for i in range(CHANNELS)
        ]
        said = len(self._log)
        port = int(self._target.address.rpartition(":")[2])
        await asyncio.gather(
            *(work(number) for number in range(CONCURRENT)),
            *(attack_port(port, self._rng) for _ in range(CONNECTIONS)),
        )
        self.report.connections += CONNECTIONS
        for index, outcome in failed:
            await self._complain(index, outcome)
        if alarms := self._alarms(said):
            text = "the log says:\n    " + "\n    ".join(alarms[:40])
            self.report.complaints.append(
                Complaint(f"{text}\n    (scripts {min(played)} to {max(played)})")
            )
        await self._look()

    async def _keep(self, outcome: CallOutcome) -> None:
        """Leave a call open; the oldest of too many is cancelled."""
        self._left.append(outcome)
        if len(self._left) > MAX_LEFT:
            oldest = self._left.pop(0)
            oldest.call.cancel()
            await finish(oldest)

    def _alarms(self, start: int) -> list[str]:
        lines = self._log[start:]
        if any(alarm in line for line in lines for alarm in LOG_ALARMS):
            return lines
        return []

    async def _complain(self, index: int, outcome: CallOutcome) -> None:
        complaint = Complaint(outcome.complaint, index, outcome.script)
        self.report.complaints.append(complaint)
        if len(self.report.complaints) <= MAX_SHRINKS:
            complaint.smallest = await self._shrink(outcome)

    async def _shrink(self, outcome: CallOutcome) -> Script | None:
        """The fewest steps that still end with the same status; None if none do when alone."""

        async def fails(steps: list[Action]) -> bool:
            again = await play(self._patient, outcome.script.only(steps))
            if again.status == LEFT:
                again.call.cancel()
            return again.status == outcome.status

        steps = list(outcome.script.steps)
        if not outcome.script.only(steps).expects.isdisjoint({outcome.status}):
            return None  # the status is only wrong for what was sent
        if not await fails(steps):
            return None
        size = max(1, len(steps) // 2)
        while size:
            at = 0
            while at < len(steps):
                fewer = steps[:at] + steps[at + size :]
                if fewer and await fails(fewer):
                    steps = fewer
                else:
                    at += size
            size //= 2
        return outcome.script.only(steps)

    # --- what is seen from beside -------------------------------------------------------------

    async def _sing(self, ended: asyncio.Event) -> None:
        """The canary, all the time."""
        while not ended.is_set():
            await self._canary()
            await asyncio.sleep(0.4)

    async def _canary(self) -> None:
        try:
            async with asyncio.timeout(60):
                await self._target.check()
            self.report.canaries += 1
        except (WrongAnswerError, FlyspecError, grpc.aio.AioRpcError, TimeoutError) as error:
            if isinstance(error, grpc.aio.AioRpcError):
                text = f"{error.code().name}: {error.details()}"
            else:
                text = f"{type(error).__name__}: {error}"
            self.report.complaints.append(
                Complaint(f"the canary: {text} (about script {self._next})")
            )
            self._target.renew()
            await asyncio.sleep(1)

    async def _look(self, canary: int = 2) -> None:
        """Processes, sessions and memory; `canary` sessions may be open besides those left."""
        for service in self._target.services:
            if service.process.returncode is not None:
                raise SystemExit(
                    f"{self.report}\n\nFAILED: {await service.failure()}\n"
                    f"(about script {self._next})"
                )
            if (mib := resident_mib(service.pid)) is not None:
                entry = ProcessMemory(time.monotonic(), self.report.messages, service.name, 0, mib)
                self.report.memory.append(entry)
        deadline = time.monotonic() + SETTLE_S + IDLE_TIMEOUT_S
        while True:
            sessions, processes = await self._target.state()
            over = {k: n for k, n in sessions.items() if n > canary + len(self._left)}
            if not over or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        if over:
            self.report.complaints.append(Complaint(f"sessions left: {over}"))
        ids = [p.instance_id for p in processes]
        if self._processes not in (None, ids):
            self.report.complaints.append(Complaint(f"other processes than before: {ids}"))
        self._processes = ids

    async def _close_left(self) -> None:
        """Wait until the server has closed what was left open."""
        for outcome in self._left:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S + 2 * IDLE_TIMEOUT_S):
                    while await outcome.call.read() is not grpc.aio.EOF:
                        pass
            except grpc.aio.AioRpcError:
                pass
            except TimeoutError:
                self.report.complaints.append(
                    Complaint("a call left open was not closed", None, outcome.script)
                )
                outcome.call.cancel()
            await finish(outcome)
            if outcome.complaint:
                self.report.complaints.append(
                    Complaint(f"left open: {outcome.complaint}", None, outcome.script)
                )
            self.report.kinds["left open, its end"][outcome.status] += 1
        self._left = []

    async def _end(self) -> None:
        """Let the canary go, and count what is held."""
        await self._canary()
        await self._target.leave()
        await self._look(canary=0)
        self.report.left, _ = await self._target.state()
        await self._close_channels()
        await self._patient.close()

    async def _close_channels(self) -> None:
        for channel in self._channels:
            await channel.close()

"""A run: batches of calls, many at once, and after each batch a look at the server from outside."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import grpc

from flyspec.errors import FlyspecError
from loadtest.fuzz.calls import (
    NO_ANSWER,
    WRITE_RACE,
    CallOutcome,
    Do,
    Script,
    beginnings,
    play,
    shrunk,
)
from loadtest.fuzz.port import attack_port
from loadtest.fuzz.report import FuzzResult
from loadtest.fuzz.servers import Server, WrongAnswerError
from loadtest.proxy import Proxy
from loadtest.sampler import Sampler

BATCH, CONCURRENT, MAX_LEFT, CONNECTIONS, CHANNELS = 500, 24, 8, 3, 3
RACE_TRIES = 6
"""Times that a call is repeated whose status was lost, since its end met a message on its way; with
ever longer pauses between its messages, up to so many, and then with ever fewer messages."""
PATIENCE_S, ANSWER_S, SETTLE_S, SHRINK_S, PROGRESS_S = 60.0, 10.0, 30.0, 60.0, 10.0
"""Time limits: a call, one that must be quick, sessions of calls that have ended, shrinking."""
ALARMS = ("Traceback (most recent call last)", "internal error", " ERROR ", "Exception")
"""What a server's log must not hold."""

Start = Callable[[Callable[[str], None]], AbstractAsyncContextManager[Server]]
"""Starts a server; it is given what takes lines of its log."""


async def fuzz(
    start: Start, messages: int, seed: int, say: Callable[[str], None], only: int | None = None
) -> FuzzResult:
    """Start a server and fuzz it, or play `only` one script.

    If the server dies or hangs, search for the call that did it.
    """
    log: list[str] = []
    async with start(log.append) as server:
        run = FuzzRun(server, seed, log, say)
        result = await (run.run(messages) if only is None else run.play_alone(only))
    for index, script in run.suspects:
        if smallest := await shrunk(script, partial(_kills, start), 2 * SHRINK_S):
            result.found("a call that kills it", index, smallest)
            break
    return result


async def _kills(start: Start, script: Script) -> bool:
    async with start(lambda _: None) as server:
        run = FuzzRun(server, 0, [])
        for pauses in (0, RACE_TRIES):  # it may end before the server has read what kills it
            await run.alone(_with_pauses(script, pauses))
            if await server.ending(ANSWER_S):
                return True
        return False


def _with_pauses(script: Script, number: int) -> Script:
    steps = [each for step in script.steps for each in (*[Do.PAUSE] * number, step)]
    return replace(script, steps=tuple(steps))


def _unraced(script: Script) -> Iterator[Script]:
    """The script in ways that let its end be heard before the next message is written."""
    for pauses in range(RACE_TRIES):
        yield _with_pauses(script, pauses)
    yield from beginnings(script)  # gRPC tells the end only behind all answers, read at the end


@dataclass
class FuzzRun:
    """Calls of one seed against a server that runs; its `log` grows meanwhile."""

    server: Server
    seed: int
    log: list[str]
    say: Callable[[str], None] = print
    suspects: list[tuple[int, Script]] = field(default_factory=list)
    """What was sent when the server died, or just before."""

    def __post_init__(self) -> None:
        self._began = self._said = time.monotonic()
        pids = {name: child.pid for name, child in self.server.services.items()}
        memory = Sampler(pids, None, self._now, lambda: self.result.messages, self.say)
        self.result = FuzzResult(self.server.name, self.seed, memory)
        host, _, port = self.server.address.rpartition(":")
        self._host, self._port = host, int(port)
        self._next = 0
        self._bad: list[tuple[int, CallOutcome]] = []
        # Calls that ended before the server may have read all of them: one may have killed it.
        self._unread: deque[tuple[int, Script]] = deque(maxlen=CONCURRENT)
        self._left: set[asyncio.Task[CallOutcome]] = set()
        self._canaries: list[asyncio.Task[None]] = []
        self._rng = Random(f"connections {self.seed}")

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def run(self, messages: int) -> FuzzResult:
        """Send so many messages; fewer if enough is found, or the server dies."""
        result = self.result
        await self._look()
        async with self._channel() as patient:
            self._canaries = [asyncio.create_task(self._sing(slow)) for slow in (False, True)]
            while result.messages < messages and not result.enough and not self.server.gone:
                await self._batch(patient, min(result.messages + BATCH, messages))
                if time.monotonic() > self._said + PROGRESS_S:
                    self._said = time.monotonic()
                    self.say(f"{result.server}: {result.messages:,} messages, {self._now():.0f} s")
            await asyncio.gather(*self._left)
            await self._judge()
            for canary in self._canaries:
                canary.cancel()
            await asyncio.gather(*self._canaries, return_exceptions=True)
        self._canaries = []
        if not self.server.gone:
            await self._canary()
            await self._look()
        result.seconds = self._now()
        return result

    # --- calls --------------------------------------------------------------------------------

    def _channel(self, address: str = "") -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        return grpc.aio.insecure_channel(address or self.server.address, options=options)

    @asynccontextmanager
    async def _channels(self) -> AsyncIterator[list[grpc.aio.Channel]]:
        """Channels whose connections end with them, which a proxy sees to.

        grpc.aio keeps a closed channel's connection for a stream that a write found ended
        (`WRITE_RACE`), and with it 70 KB or more of the server.
        """
        proxy = Proxy(self._host, self._port)
        await proxy.start()
        try:
            async with AsyncExitStack() as open_:
                yield [await open_.enter_async_context(self._channel(proxy.address))
                       for _ in range(CHANNELS)]  # fmt: skip
        finally:
            await proxy.close()

    def _script(self, index: int) -> Script:
        return self.server.source.script(Random(f"{self.server.name} {self.seed} {index}"))

    async def alone(self, script: Script) -> CallOutcome:
        """Play a script by itself."""
        async with self._channel() as channel:
            return await play(channel, script, PATIENCE_S)

    async def play_alone(self, index: int) -> FuzzResult:
        """Play the script of this number by itself, and say what comes of it."""
        async with self._channel() as channel:
            outcome = await self._play(channel, index, self._script(index))
        self.say(f"{outcome.script}\n{outcome.status}: {outcome.details}")
        await self._judge()
        self._check_log(0, index)
        self.result.seconds = self._now()
        return self.result

    async def _batch(self, patient: grpc.aio.Channel, goal: int) -> None:
        said, first = len(self.log), self._next
        async with self._channels() as channels:
            await asyncio.gather(
                *(self._work(channels[n % CHANNELS], patient, goal) for n in range(CONCURRENT)),
                *(attack_port(self._port, self._rng) for _ in range(CONNECTIONS)),
            )
        self._check_log(said, first)
        await self._judge()
        await self._look()

    async def _work(self, channel: grpc.aio.Channel, patient: grpc.aio.Channel, goal: int) -> None:
        while self.result.messages < goal and not self.server.gone:
            index, self._next = self._next, self._next + 1
            script = self._script(index)
            if Do.LEAVE not in script.steps:
                await self._play(channel, index, script)
            elif len(self._left) < MAX_LEFT:
                task = asyncio.create_task(self._play(patient, index, script))
                self._left.add(task)
                task.add_done_callback(self._left.discard)

    async def _play(self, channel: grpc.aio.Channel, index: int, script: Script) -> CallOutcome:
        outcome = await play(channel, script, PATIENCE_S)
        self.result.count(outcome)
        if outcome.complaint:
            self._bad.append((index, outcome))
        elif outcome.status != "OK":
            self._unread.append((index, script))
        return outcome

    async def _judge(self) -> None:
        """Make findings of the calls that went wrong, as small as they get."""
        bad, self._bad = self._bad, []
        lost = [(index, o.script) for index, o in bad if o.status in ("UNAVAILABLE", NO_ANSWER)]
        if lost and (ending := await self.server.ending(ANSWER_S)):
            self.suspects = [*lost[: 2 * CONCURRENT], *reversed(self._unread)]
            self.result.found(f"{ending}\n(about script {lost[0][0]})")
            return
        for index, outcome in bad:
            finding = self.result.found(outcome.complaint, index, outcome.script)
            if finding.number == 1:
                shows = partial(self._shows, outcome.status)
                finding.script = await shrunk(outcome.script, shows, SHRINK_S) or outcome.script

    async def _shows(self, status: str, script: Script) -> bool:
        for unraced in _unraced(script):
            again = await self.alone(unraced)
            if again.status != WRITE_RACE:
                return bool(again.complaint) and again.status == status
        return False

    # --- what is seen from outside ------------------------------------------------------------

    def _check_log(self, since: int, first: int) -> None:
        lines = self.log[since:]
        if any(alarm in line for line in lines for alarm in ALARMS):
            text = "\n    ".join(("the log says:", *lines[:40]))
            self.result.found(f"{text}\n    (scripts {first} to {self._next - 1})")

    async def _sing(self, slow: bool) -> None:
        """The canary, all the time."""
        while True:
            await self._canary(slow)
            await asyncio.sleep(0.4)

    async def _canary(self, slow: bool = False) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.server.canary(slow)
            self.result.canaries += 1
        except (WrongAnswerError, TimeoutError) as error:
            if not await self.server.ending(ANSWER_S):
                text = f"the canary: {error or 'no answer'}"
                self.result.found(f"{text} (about script {self._next})")

    async def _look(self) -> None:
        """Memory and sessions."""
        deadline = time.monotonic() + SETTLE_S
        self.result.memory.look()
        try:
            while over := await self._over():
                if time.monotonic() > deadline:
                    self.result.found(f"sessions left: {over}")
                    break
                await asyncio.sleep(0.05)
        except (TimeoutError, FlyspecError, grpc.aio.AioRpcError) as error:
            if not await self.server.ending(ANSWER_S):
                self.result.found(f"it does not tell its sessions: {error!r}")

    async def _over(self) -> dict[str, int]:
        """Sessions beyond those of canaries and calls left open, by kind."""
        if self.server.gone:
            return {}
        async with asyncio.timeout(PATIENCE_S):
            sessions = await self.server.sessions()
        most = len(self._canaries) + len(self._left)
        return {kind: number for kind, number in sessions.items() if number > most}

"""A run: batches of calls, many at once, and after each batch a look at the server from outside."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from flyspec import rpc
from flyspec.cli.service import Child
from flyspec.client import AdminClient
from flyspec.errors import FlyspecError
from flyspec.rules.presets import RULE_PRESETS
from flyspec.v1 import common_pb2, generation_pb2, verify_pb2
from loadtest.figures import Check
from loadtest.fuzz.scripts import REFUSED, WRITE_RACE, Script, ScriptSource, methods_of
from loadtest.fuzz.sessions import COUNT, FILES, Facts, canary
from loadtest.proxy import Proxy
from loadtest.sampler import Sampler, left_open

BATCH, CONCURRENT, MAX_DRAFTS = 500, 24, 64
PATIENCE_S, ANSWER_S, SETTLE_S = 60.0, 10.0, 30.0
"""Time limits: a call, one that must be quick, sessions of calls that have ended."""
ALARMS = ("Traceback (most recent call last)", "internal error", " ERROR ", "Exception")
"""Words that a server's log must not hold."""
MAX_GROWTH_MIB, MIN_SAMPLES = 32.0, 30
"""Growth of a warm process over the whole run that still counts as none."""
MAX_FINDINGS, MAX_FOUND = 20, 200
"""A run ends early with so many different findings, or so many of all together."""
NO_ANSWER = "no answer"
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|[-+\d.,e]*\d[-+\d.,e]*|\b(?:nan|inf)\b")


@dataclass
class CallOutcome:
    """The end of a call, and the messages sent until then."""

    script: Script
    status: str = NO_ANSWER
    details: str = ""
    sent: int = 0
    answers: list[bytes] = field(default_factory=list)

    @property
    def complaint(self) -> str:
        """The fault of it; empty if there is none."""
        # A session may name the target that it is for, and is sent away by another one.
        elsewhere = self.status == "UNAVAILABLE" and self.details.startswith("open.")
        if self.status not in self.script.expects and not elsewhere:
            return f"status {self.status}: {self.details}"
        ours = self.script.method.path.startswith("/flyspec.")
        if self.status in REFUSED and ours and not self.details:
            return f"status {self.status} without a message"
        return ""


async def play(channel: grpc.aio.Channel, script: Script, patience_s: float) -> CallOutcome:
    """Do what the script says; never raises for what the server does."""
    call = channel.stream_stream(script.method.path)(timeout=script.deadline_s)
    outcome = CallOutcome(script)
    try:
        async with asyncio.timeout(patience_s):
            with suppress(grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                await _play(call, outcome)
            code, outcome.details = await call.code(), await call.details() or ""
            raced = code is grpc.StatusCode.INTERNAL and outcome.details == rpc.WRITE_FAILED
            outcome.status = WRITE_RACE if raced else code.name
    except TimeoutError:
        pass
    finally:
        call.cancel()
    return outcome


async def _play(call: Any, outcome: CallOutcome) -> None:
    script = outcome.script
    try:
        for message in script.messages:
            if call.done():
                return
            outcome.sent += 1
            await call.write(message)
            await asyncio.sleep(script.pause_s)
        if script.cancelled:
            call.cancel()
        await call.done_writing()
        while (answer := await call.read()) is not grpc.aio.EOF:
            outcome.answers.append(answer)
    except asyncio.CancelledError:
        # The call was cancelled, by its deadline for example; or this task was.
        task = asyncio.current_task()
        if not call.done() or task is None or task.cancelling():
            raise


class FuzzRun:
    """Calls of one seed against a server with a canary: `async with FuzzRun(...) as run`.

    The canary's tokens must be the same whatever others send. The server `name` is at one of the
    `addresses`; `services` are its processes, if they are known; its `log` grows meanwhile.
    `findings` have the first text, and how often it was like that.
    """

    def __init__(
        self,
        name: str,
        addresses: Mapping[str, str],
        services: Mapping[str, Child] | None = None,
        seed: int = 0,
        log: list[str] | None = None,
    ) -> None:
        self.name, self.seed, self.log = name, seed, [] if log is None else log
        self.calls = self.messages = self.canaries = 0
        self.statuses = Counter[str]()
        self.findings: dict[str, tuple[str, int]] = {}
        self._addresses, self._services = addresses, services or {}
        self._canary_at = "generation" if name == "admin" else name
        self._dead = ""
        self._began = time.monotonic()
        pids = {service: child.pid for service, child in self._services.items()}
        self.memory = Sampler(pids, lambda: self.seconds, lambda: self.messages)

    async def __aenter__(self) -> FuzzRun:
        self._channel = grpc.aio.insecure_channel(self._addresses[self._canary_at])
        self._methods = methods_of(FILES[self._canary_at])
        session = canary(self._canary_at)
        (method,) = (m for m in self._methods if isinstance(session[0], m.request))
        data = [message.SerializeToString() for message in session]
        self._canary = Script(method, "canary", data)
        self._tokens = await self._ask(self._canary)
        info = await self._describe()
        models = (part for part in _parts(info) if isinstance(part, common_pb2.ModelInfo))
        model = next(models, common_pb2.ModelInfo())  # a draft service may have none
        self.source = ScriptSource(self.name, Facts(
            model.vocab_size or 1 << 16, model.context_length or 256, MAX_DRAFTS,
            [getattr(drafter, "name", drafter) for drafter in getattr(info, "drafters", ())],
            self._tokens[-COUNT:], self._addresses.get("draft", ""),
            tuple(getattr(info, "rules", ())) or tuple(RULE_PRESETS),
            [head.name for head in getattr(info, "heads", ())],
        ))  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def script(self, index: int) -> Script:
        """Return the script of this number."""
        return self.source.script(Random(f"{self.name} {self.seed} {index}"))

    async def run(self, calls: int) -> None:
        """Make so many calls; fewer if enough is found, or the server dies."""
        await self._look(0)
        canaries = asyncio.create_task(self._sing())
        try:
            while self.calls < calls and not self._dead and not self._enough:
                await self._batch(min(self.calls + BATCH, calls))
        finally:
            canaries.cancel()
            await asyncio.gather(canaries, return_exceptions=True)
        if not self._dead:
            await self._check_canary()
            await self._look(0)

    async def play(self, channel: grpc.aio.Channel, index: int) -> None:
        """Play the script of this number."""
        script = self.script(index)
        outcome = await play(channel, script, PATIENCE_S)
        self.messages += outcome.sent
        self.statuses[outcome.status] += 1
        if outcome.complaint:
            lost = outcome.status in ("UNAVAILABLE", NO_ANSWER) and await self._ending()
            again = f"again with: --server {self.name} --seed {self.seed} --only {index}"
            self.found(lost or f"{outcome.complaint}\n{again}\n{script}", script.method.path)

    def found(self, text: str, about: str = "") -> None:
        """Note a finding, unless there is one like it."""
        key = f"{about} {_VALUES.sub('#', text.splitlines()[0])}"
        first, number = self.findings.get(key, (text, 0))
        self.findings[key] = first, number + 1

    def checks(self) -> list[Check]:
        """Return a check for each finding, and one for the memory of each process."""
        checks = [Check(self.name, False, f"({n:,}x) {text}") for text, n in self.findings.values()]
        if not checks:
            checks = [Check(self.name, True, f"nothing found in {self.calls:,} calls")]
        for service, mib in self.memory.growth(0, self.seconds).items():
            samples = self.memory.memory[service]
            if len(samples) >= MIN_SAMPLES:
                end = samples[-1].mib
                said = f"{end:,.0f} MiB at the end; once warm, {mib:+.1f} MiB over the run"
                name = f"{self.name}, memory of {service}"
                checks.append(Check(name, mib <= MAX_GROWTH_MIB, said))
        return checks

    # --- calls --------------------------------------------------------------------------------

    @property
    def _enough(self) -> bool:
        numbers = [number for _, number in self.findings.values()]
        return len(numbers) >= MAX_FINDINGS or sum(numbers) >= MAX_FOUND

    async def _batch(self, goal: int) -> None:
        """Play scripts on a channel whose connection ends with it, which a proxy sees to.

        grpc.aio keeps a closed channel's connection for a stream that a write found ended
        (`WRITE_RACE`), and with it 70 KB or more of the server.
        """
        said, first = len(self.log), self.calls
        host, _, port = self._addresses[self.name].rpartition(":")
        proxy = Proxy(host, int(port))
        await proxy.start()
        try:
            async with grpc.aio.insecure_channel(proxy.address) as channel:
                await asyncio.gather(*(self._work(channel, goal) for _ in range(CONCURRENT)))
        finally:
            await proxy.close()
        lines = self.log[said:]
        if any(alarm in line for line in lines for alarm in ALARMS):
            text = "\n    ".join(("the log says:", *lines[:40]))
            self.found(f"{text}\n    (scripts {first} to {self.calls - 1})")
        await self._look(1)

    async def _work(self, channel: grpc.aio.Channel, goal: int) -> None:
        while self.calls < goal and not self._dead:
            index, self.calls = self.calls, self.calls + 1
            await self.play(channel, index)

    # --- the server, seen from outside ----------------------------------------------------------

    async def _ending(self) -> str:
        """Return the end of a process, known a moment later, or that it hangs; empty if neither."""
        for _ in range(10):
            for child in self._services.values():
                if child.process.returncode is not None:
                    self._dead = f"{await child.failure()}\n(about script {self.calls})"
                    return self._dead
            await asyncio.sleep(0.05)
        with suppress(FlyspecError, grpc.aio.AioRpcError):
            try:
                await asyncio.wait_for(self._sessions(), ANSWER_S)
            except TimeoutError:
                self._dead = f"the server hangs (about script {self.calls})"
        return self._dead

    async def _sing(self) -> None:
        """Ask for the canary's tokens all the time."""
        while True:
            await self._check_canary()
            await asyncio.sleep(0.4)

    async def _check_canary(self) -> None:
        try:
            got = await self._ask(self._canary)
        except FlyspecError as error:
            ending = await self._ending()
            self.found(ending or f"the canary: {error} (about script {self.calls})")
            return
        if got != self._tokens:
            self.found(f"the canary: got {got} instead of {self._tokens}")
        self.canaries += 1

    async def _ask(self, script: Script) -> list[int]:
        outcome = await play(self._channel, script, PATIENCE_S)
        if outcome.status != "OK":
            raise FlyspecError(f"{outcome.status}: {outcome.details}")
        return [
            token
            for answer in map(script.method.response.FromString, outcome.answers)
            for token in _tokens(answer)
        ]

    async def _describe(self) -> Any:
        """Return what the server says of its model and itself."""
        method = next(m for m in self._methods if m.path.endswith(("/Describe", "/ListModels")))
        ask = self._channel.unary_unary(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        return await ask(method.request())

    async def _sessions(self) -> dict[str, int]:
        """Return open sessions by kind."""
        if self._canary_at == "generation":
            async with AdminClient(self._addresses["admin"]) as admin:
                return left_open(await admin.status())
        return {"sessions": (await self._describe()).sessions.active}

    async def _look(self, canaries: int) -> None:
        """Look at memory and sessions, of which no more may be open than the canary's."""
        deadline = time.monotonic() + SETTLE_S
        self.memory.look()
        try:
            while not self._dead:
                sessions = await asyncio.wait_for(self._sessions(), PATIENCE_S)
                over = {kind: number for kind, number in sessions.items() if number > canaries}
                if not over:
                    break
                if time.monotonic() > deadline:
                    self.found(f"sessions left: {over}")
                    break
                await asyncio.sleep(0.05)
        except (TimeoutError, FlyspecError, grpc.aio.AioRpcError) as error:
            self.found(await self._ending() or f"it does not tell its sessions: {error!r}")


def _parts(message: Any) -> Iterator[Any]:
    """Yield a message and those in it; of a list, the first."""
    yield message
    for about, value in message.ListFields():
        if about.message_type is not None:
            yield from _parts(value[0] if about.is_repeated else value)


def _tokens(answer: Any) -> list[int]:
    """Return what must not change of an answer."""
    match answer:
        case generation_pb2.GenerateResponse():
            return list(answer.chunk.token_ids)
        case verify_pb2.VerifyResponse():
            outcomes = [decision.outcome for decision in answer.decisions]
            return [*outcomes, *answer.plain_token_ids, answer.next_token_id]
    return list(answer.token_ids)

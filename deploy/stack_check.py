"""What a stack of containers does when its services are paused, killed and told to end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from deploy.containers import CommandError, Containers
from deploy.findings import Log
from flyspec.client import AdminClient, Chunk, Client, Completion, Credentials, GenerateOptions
from flyspec.config import ADMIN_PORT, DRAFT_PORT, GENERATION_PORT, VERIFY_PORT
from flyspec.errors import FlyspecError
from flyspec.rules import Rule

PORTS = {"orchestrator": GENERATION_PORT, "draft": DRAFT_PORT, "verify": VERIFY_PORT}
"""Of each service, where it is asked for its health."""
ADDRESS = f"127.0.0.1:{GENERATION_PORT}"
ADMIN = f"127.0.0.1:{ADMIN_PORT}"
PROMPTS = (
    "def fibonacci(n):",
    "Mia has 12 stamps and buys 30 more. How many has she now?",
    "class Stack:\n    def __init__(self):",
    "import os\n\ndef list_files(path):",
)
OPTIONS = GenerateOptions(
    rule=Rule("exact"), num_speculative_tokens=8, max_tokens=240, ignore_eos=True, timeout_s=400
)
PAUSE_S = 6.0
STATUS = """
import pathlib
lines = pathlib.Path("/proc/1/status").read_text().splitlines()
status = dict(line.split(":", 1) for line in lines)
print(*(status[k].split()[0] for k in ("Uid", "CapEff", "NoNewPrivs", "Seccomp")))
try:
    open("/.check", "w")
except OSError as error:
    print(error.strerror)
"""


def container(service: str) -> str:
    """The container of a service's only pod."""
    return f"{service}-pod-0-{service}"


def cpu_seconds(pid: str) -> float:
    """Time that a process has spent on a core, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_until_ready(
    client: Credentials | None = None, operator: Credentials | None = None, timeout_s: float = 900
) -> None:
    """Wait until the orchestrator serves and finds both services well."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            async with (
                Client(ADDRESS, credentials=client) as user,
                AdminClient(ADMIN, operator) as admin,
            ):
                serving = await user.check_health(timeout_s=5) == "SERVING"
                status = await admin.status(5)
            if serving and status.verify.ready and status.draft.ready:
                return
        except FlyspecError:
            pass
        await asyncio.sleep(0.5)
    raise CommandError(f"the stack is not ready after {timeout_s:.0f} s")


async def check_inside(containers: Containers, log: Log) -> None:
    """As who the services run, and what they may do; the probe that mutual TLS needs."""
    for service, port in PORTS.items():
        name = container(service)
        found = await asyncio.to_thread(containers.podman, "exec", name, "python", "-c", STATUS)
        expected = ["10001", "0000000000000000", "1", "2", "Read-only", "file", "system"]
        log.check(f"{service}: uid 10001, no capabilities, no new privileges, seccomp, "
                  "read-only root", found.split() == expected)  # fmt: skip
        began = time.monotonic()
        said = await asyncio.to_thread(
            containers.podman, "exec", name, "flyspec", "healthcheck", "--address",
            f"localhost:{port}",
        )  # fmt: skip
        log.check(f"{service}: healthcheck inside", said.endswith("SERVING"),
                  f"{time.monotonic() - began:.1f} s")  # fmt: skip


class StackCheck:
    """The checks of a running stack, in order."""

    def __init__(self, containers: Containers, log: Log) -> None:
        self._containers, self._log = containers, log
        self._texts: list[str] = []

    async def run(self) -> None:
        """Everything."""
        began = time.monotonic()
        await wait_until_ready()
        took = f"{time.monotonic() - began:.0f} s until the models were loaded and warm"
        self._log.check("the stack answers over its published port", True, took)
        await check_inside(self._containers, self._log)
        await self._starts_quickly()
        await self._reference()
        await self._survives("draft paused", "draft", self._pause)
        await self._survives("draft killed", "draft", self._kill)
        await self._survives("verify paused", "verify", self._pause)
        await self._survives("verify killed", "verify", self._kill)
        await self._survives("draft told to end", "draft", self._terminate)
        await self._told_to_end_while_loading()
        await self._orchestrator_told_to_end()

    async def _podman(self, *arguments: str) -> str:
        return await asyncio.to_thread(self._containers.podman, *arguments)

    async def _starts_quickly(self) -> None:
        """From the start of the orchestrator's process until it serves, its services there."""
        name, times, cpu_s = container("orchestrator"), [], 0.0
        for _ in range(3):
            await self._podman("stop", "-t", "60", name)
            await self._podman("start", name)
            began = float(await self._podman(
                "container", "inspect", "--format", "{{.State.StartedAt.UnixMilli}}", name
            )) / 1000  # fmt: skip
            while not await self._serves():  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.02)
            times.append(time.time() - began)
            cpu_s = cpu_seconds(str((await self._state("orchestrator"))["Pid"]))
        await wait_until_ready()
        self._log.check("orchestrator: serves in less than 2 s", min(times) < 2,
                        ", ".join(f"{t:.2f} s" for t in times)
                        + f"; {cpu_s:.2f} s of it on a core")  # fmt: skip

    async def _serves(self) -> bool:
        """Whether the orchestrator serves now, over a new connection.

        One that began while the container had no network is not answered for many seconds.
        """
        try:
            async with Client(ADDRESS) as client:
                return await client.check_health(timeout_s=1) == "SERVING"
        except FlyspecError:
            return False

    async def _stream(self, prompt: str, begun: asyncio.Event) -> tuple[str, float, list[str]]:
        """Text, longest time between two chunks, and the recoveries of one generation."""
        text, longest, recoveries = "", 0.0, []
        last = time.monotonic()
        async with Client(ADDRESS) as client:
            events = client.generate(prompt, OPTIONS)
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, Chunk):
                        text += event.text
                        longest = max(longest, time.monotonic() - last)
                        last = time.monotonic()
                        begun.set()
                    elif isinstance(event, Completion):
                        recoveries = [r.kind.name for r in event.recoveries]
        return text, longest, recoveries

    async def _streams(
        self, meanwhile: Callable[[], Awaitable[None]]
    ) -> list[tuple[str, float, list[str]] | BaseException]:
        """One generation a prompt, and something that happens once all have begun."""
        begun = [asyncio.Event() for _ in PROMPTS]
        tasks = [
            asyncio.create_task(self._stream(prompt, event))
            for prompt, event in zip(PROMPTS, begun, strict=True)
        ]
        finished = asyncio.gather(*tasks, return_exceptions=True)
        all_begun = asyncio.gather(*(event.wait() for event in begun))
        both: list[asyncio.Future[Any]] = [all_begun, finished]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await meanwhile()
        return await finished

    async def _reference(self) -> None:
        """The texts that nothing has happened to."""
        found = await self._streams(lambda: asyncio.sleep(0))
        if failed := [f for f in found if isinstance(f, BaseException)]:
            raise CommandError(f"undisturbed streams failed: {failed[0]!r}")
        self._texts = [f[0] for f in found if not isinstance(f, BaseException)]
        self._log.check(f"{len(PROMPTS)} streams with the rule exact", all(self._texts))

    async def _survives(self, what: str, service: str, do: Callable[[str], Awaitable[str]]) -> None:
        """Whether streams go on to the same texts while something happens to a service."""
        said = ""

        async def meanwhile() -> None:
            nonlocal said
            said = await do(service)

        found = await self._streams(meanwhile)
        self._compare(what, found, said)
        await wait_until_ready()

    def _compare(
        self,
        what: str,
        found: list[tuple[str, float, list[str]] | BaseException],
        said: str,
    ) -> None:
        failed = [f for f in found if isinstance(f, BaseException)]
        well = [f for f in found if not isinstance(f, BaseException)]
        kinds = Counter(kind for f in well for kind in f[2])
        details = ", ".join(
            [said] * bool(said)
            + [f"longest wait for a chunk {max((f[1] for f in well), default=0):.1f} s"]
            + [f"{n} x {kind}" for kind, n in kinds.items()]
            + [repr(f) for f in failed]
        )
        self._log.check(f"{what}: every stream ends with the same text",
                        [f[0] for f in well] == self._texts, details)  # fmt: skip

    async def _pause(self, service: str) -> str:
        """Hold every process of a service for some seconds."""
        await self._podman("pause", container(service))
        await asyncio.sleep(PAUSE_S)
        await self._podman("unpause", container(service))
        return f"{PAUSE_S:.0f} s"

    async def _kill(self, service: str) -> str:
        """Kill a service's process; its restart policy brings it back, as a kubelet would."""
        state = await self._state(service)
        before = state["StartedAt"]
        os.kill(int(str(state["Pid"])), signal.SIGKILL)
        for _ in range(100):
            state = await self._state(service)
            if state["Status"] == "running" and state["StartedAt"] != before:
                return "restarted by its policy"
            await asyncio.sleep(0.2)
        await self._podman("start", container(service))
        return "not restarted by its policy"

    async def _state(self, service: str) -> dict[str, object]:
        return await asyncio.to_thread(self._containers.state, container(service))

    async def _stop(self, service: str) -> tuple[object, float]:
        """Stop a service as a kubelet does; its exit code, and how long it took, s."""
        began = time.monotonic()
        await self._podman("stop", "-t", "150", container(service))
        took = time.monotonic() - began
        return (await self._state(service))["ExitCode"], took

    async def _terminate(self, service: str) -> str:
        """Stop a service as a kubelet does, and start it again."""
        code, took = await self._stop(service)
        self._log.check(f"{service}: SIGTERM ends it in order", code == 0,
                        f"code {code}, {took:.1f} s")  # fmt: skip
        await self._podman("start", container(service))
        return ""

    async def _told_to_end_while_loading(self) -> None:
        """pid 1 takes SIGTERM before it serves, too."""
        for service in ("verify", "draft"):
            await self._stop(service)
            await self._podman("start", container(service))
            await asyncio.sleep(3.0)
            code, took = await self._stop(service)
            self._log.check(f"{service}: SIGTERM while it loads ends it", code != 137 and took < 30,
                            f"code {code}, {took:.1f} s")  # fmt: skip
            await self._podman("start", container(service))
        await wait_until_ready()

    async def _orchestrator_told_to_end(self) -> None:
        """Its streams end as they should, and new ones are refused meanwhile."""
        refused = ""

        async def stop() -> None:
            nonlocal refused
            stopping = asyncio.create_task(
                self._podman("stop", "-t", "150", container("orchestrator"))
            )
            await asyncio.sleep(1.0)
            try:
                async with Client(ADDRESS) as client:
                    await client.complete("x", GenerateOptions(max_tokens=1, timeout_s=20))
            except FlyspecError as error:
                refused = type(error).__name__
            await stopping

        found = await self._streams(stop)
        self._compare("orchestrator told to end", found, "")
        self._log.check("orchestrator: refuses new requests while it drains",
                        refused == "UnavailableError", refused)  # fmt: skip
        code = (await self._state("orchestrator"))["ExitCode"]
        self._log.check("orchestrator: SIGTERM ends it in order", code == 0, f"code {code}")

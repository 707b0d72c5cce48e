"""What containers may do, and what happens when they are paused, killed and stopped (--podman).

What the services take from faults in processes is in test_chaos.py; this is about pid 1, signals,
restart policies and networks, which only containers have.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from flyspec.client import Chunk, Completion, GenerateOptions
from flyspec.config import DRAFT_PORT, GENERATION_PORT, VERIFY_PORT
from flyspec.errors import UnavailableError
from flyspec.rules import Rule
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)

PORTS = {"orchestrator": GENERATION_PORT, "draft": DRAFT_PORT, "verify": VERIFY_PORT}
PROMPTS = (
    "def fibonacci(n):",
    "Mia has 12 stamps and buys 30 more. How many has she now?",
    "class Stack:\n    def __init__(self):",
    "import os\n\ndef list_files(path):",
)
OPTIONS = GenerateOptions(
    rule=Rule("exact"), num_speculative_tokens=8, max_tokens=480, ignore_eos=True, timeout_s=400
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


class Pods:
    """The pods of `podman play kube`, one for each service."""

    async def podman(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            "podman", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        assert process.returncode == 0, f"podman {' '.join(arguments)}: {err.decode()}"
        return out.decode().strip()

    async def on(self, service: str, *command: str) -> str:
        """Run a command of podman on a service's container, its last argument."""
        return await self.podman(*command, container(service))

    async def state(self, service: str) -> dict:
        return json.loads(await self.on(service, "container", "inspect"))[0]["State"]

    async def pause(self, service: str) -> None:
        await self.on(service, "pause")
        await asyncio.sleep(PAUSE_S)
        await self.on(service, "unpause")

    async def kill(self, service: str) -> None:
        """Kill a service's process; its restart policy brings it back, as a kubelet would."""
        before = await self.state(service)
        os.kill(before["Pid"], signal.SIGKILL)

        async def restarted() -> bool:
            now = await self.state(service)
            return now["Status"] == "running" and now["StartedAt"] != before["StartedAt"]

        await until(restarted)

    async def stop(self, service: str) -> int:
        """Stop a service as a kubelet does; its exit code."""
        began = time.monotonic()
        await self.on(service, "stop", "-t", "150")
        code = (await self.state(service))["ExitCode"]
        print(f"{service} stopped with code {code} in {time.monotonic() - began:.1f} s")
        return code

    async def start(self, service: str) -> None:
        await self.on(service, "start")


def container(service: str) -> str:
    return f"{service}-pod-0-{service}"


@pytest.fixture(scope="module")
def pods(pytestconfig, stack):
    if not pytestconfig.getoption("--podman", False):
        pytest.skip("--podman is not given")
    return Pods()


async def stream(stack, prompt, begun):
    """Text of a generation; the longest wait for a chunk, s; the kinds of its recoveries."""
    text, longest, recoveries = "", 0.0, []
    last = time.monotonic()
    async with stack.client() as client:
        async for event in client.generate(prompt, OPTIONS):
            if isinstance(event, Chunk):
                text += event.text
                longest = max(longest, time.monotonic() - last)
                last = time.monotonic()
                begun.set()
            elif isinstance(event, Completion):
                recoveries = [recovery.kind.name for recovery in event.recoveries]
    return text, longest, recoveries


async def streams(stack, meanwhile=None):
    """Texts of concurrent generations; `meanwhile` is awaited once all have begun."""
    begun = [asyncio.Event() for _ in PROMPTS]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(stream(stack, prompt, event))
            for prompt, event in zip(PROMPTS, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        if meanwhile:
            await meanwhile
    texts, waits, recoveries = zip(*(task.result() for task in tasks), strict=True)
    kinds = Counter(kind for kinds in recoveries for kind in kinds)
    print(f"longest wait for a chunk {max(waits):.1f} s; recoveries: {dict(kinds)}")
    return texts


@pytest.fixture(scope="module")
async def texts(stack, pods):
    """What nothing happens to."""
    return await streams(stack)


@pytest.mark.parametrize("service", PORTS)
async def test_a_container_has_no_rights_and_answers_its_probe(pods, service):
    """The probe of mutual TLS; the kubelet itself asks where connections are unencrypted."""
    found = await pods.podman("exec", container(service), "python", "-c", STATUS)
    assert found.split() == ["10001", "0000000000000000", "1", "2", "Read-only", "file", "system"]
    probe = ("flyspec", "healthcheck", "--address", f"localhost:{PORTS[service]}")
    assert (await pods.podman("exec", container(service), *probe)).endswith("SERVING")


async def test_the_orchestrator_serves_in_less_than_two_seconds(stack, pods):
    """From the start of its process, with its services there; the best of three."""
    times = []
    for _ in range(3):
        await pods.stop("orchestrator")
        await pods.start("orchestrator")
        started = "{{.State.StartedAt.UnixMilli}}"
        began = int(await pods.on("orchestrator", "container", "inspect", "--format", started))
        await until(stack.is_serving, seconds=120.0)  # its new network may lose packets at first
        times.append(time.time() - began / 1000)
    await stack.ready()
    print(", ".join(f"{seconds:.2f} s" for seconds in times))
    assert min(times) < 2


@pytest.mark.parametrize("service", ["draft", "verify"])
@pytest.mark.parametrize("fault", ["pause", "kill"])
async def test_streams_end_with_the_same_text(stack, pods, texts, fault, service):
    assert await streams(stack, getattr(pods, fault)(service)) == texts
    await stack.ready()


async def test_streams_outlive_a_drafter_that_is_stopped(stack, pods, texts):
    codes = []

    async def replace() -> None:
        codes.append(await pods.stop("draft"))
        await pods.start("draft")

    assert await streams(stack, replace()) == texts
    assert codes == [0]
    await stack.ready()


@pytest.mark.parametrize("service", ["verify", "draft"])
async def test_sigterm_ends_a_service_that_loads(stack, pods, service):
    """As soon as it handles the signal, which is before it imports torch."""
    await pods.stop(service)
    await pods.start(service)
    status = Path(f"/proc/{(await pods.state(service))['Pid']}/status")

    def handles_sigterm() -> bool:
        (mask,) = re.findall(r"^SigCgt:\s*(\w+)", status.read_text(), re.MULTILINE)
        return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)

    await until(handles_sigterm)
    began = time.monotonic()
    assert await pods.stop(service) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 30
    await pods.start(service)
    await stack.ready()


async def test_an_orchestrator_that_is_stopped_finishes_its_streams(stack, pods, texts):
    codes = []

    async def stop() -> None:
        stopping = asyncio.create_task(pods.stop("orchestrator"))
        await asyncio.sleep(1.0)
        async with stack.client() as client:
            with pytest.raises(UnavailableError):
                await client.complete("x", GenerateOptions(max_tokens=1, timeout_s=20))
        codes.append(await stopping)

    assert await streams(stack, stop()) == texts
    assert codes == [0]
    await pods.start("orchestrator")
    await stack.ready()

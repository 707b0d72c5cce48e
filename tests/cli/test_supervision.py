"""`flyspec serve` restarts what dies, and generations continue meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from flyspec.cli.serve import MOST_FAILED_STARTS, supervise
from flyspec.client import AsyncClient, Chunk, Completion, GenerateOptions, Started
from flyspec.errors import FlyspecError, UnavailableError
from flyspec.rules import Rule
from flyspec.values.generation import RecoveryKind
from flyspec.values.tokens import SamplingParams
from tests.cli.processes import FREE_PORTS, all_gone, start

EXACT = GenerateOptions(
    max_tokens=200, ignore_eos=True, rule=Rule("exact"), num_speculative_tokens=3
)


class Serving:
    """A stack of `flyspec serve`, and its standard error."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, Any]) -> None:
        self.process, self.facts = process, facts

    def kill(self, service: str) -> None:
        os.kill(self.facts["pids"][service], signal.SIGKILL)

    async def says(self, text: str) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while text not in (line := (await self.process.stderr.readline()).decode()):
                assert line, f"it ended and did not say {text!r}"


@pytest.fixture
async def serving(models: list[str]) -> Any:
    process = await start("serve", *models, *FREE_PORTS, "--json")
    assert process.stdout is not None
    serving = Serving(process, json.loads(await process.stdout.readline()))
    yield serving
    pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(pids) >= 3
    process.send_signal(signal.SIGINT)
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"")
    assert await all_gone(pids)


async def stream(
    client: AsyncClient, serving: Serving, killed: str = ""
) -> tuple[list[int], Completion]:
    """Return the tokens of a long generation during which a service is killed."""
    token_ids: list[int] = []
    async for event in client.generate("the cat sat on", EXACT):
        if isinstance(event, Chunk):
            token_ids += event.token_ids
            if killed:
                serving.kill(killed)
                killed = ""
    assert isinstance(event, Completion)
    return token_ids, event


async def cut_off(
    client: AsyncClient, options: GenerateOptions, serving: Serving, begun: asyncio.Barrier
) -> tuple[Started, list[int]]:
    """What a client has when the orchestrator is killed, once all streams have begun."""
    received: list[int] = []
    try:
        async for event in client.generate("the cat sat on", options):
            if isinstance(event, Started):
                started = event
            elif isinstance(event, Chunk):
                if not received and await begun.wait() == 0:
                    serving.kill("orchestrator")
                received += event.token_ids
    except UnavailableError as error:
        if "lost the server at 127" not in str(error):
            raise
        return started, received
    raise AssertionError("the stream was not cut off")


@pytest.mark.slow
async def test_each_service_is_killed_in_turn_and_generations_are_whole(serving: Serving) -> None:
    assert set(serving.facts) == {
        "address", "admin_address", "http_url", "draft_address", "verify_address", "metrics_ports",
        "missing_drafters", "pids",
    }  # fmt: skip
    async with AsyncClient(serving.facts["address"], max_retries=0) as client:
        assert (await client.list_models()).drafters[0] == "model"
        whole, _ = await stream(client, serving)
        for killed, kind in (
            ("verify", RecoveryKind.TARGET_REOPENED),
            ("draft", RecoveryKind.DRAFTER_FALLBACK),
        ):
            token_ids, done = await stream(client, serving, killed)
            assert token_ids == whole
            assert kind in [recovery.kind for recovery in done.recoveries]
            await serving.says(f"the {killed} service ended with signal SIGKILL (out of")
            await serving.says(f"the {killed} service is ready")
        # Streams of an orchestrator end with it: docs/reliability.md, "Resuming".
        begun = asyncio.Barrier(2)
        asked = [replace(EXACT, sampling=SamplingParams(temperature=t)) for t in (0.0, 0.8)]
        cut = await asyncio.gather(*(cut_off(client, o, serving, begun) for o in asked))
        await serving.says("the orchestrator service is ready")
        for options, (started, received) in zip(asked, cut, strict=True):
            options = replace(options, seed=started.seed)
            undisturbed = await client.complete("the cat sat on", options)
            assert 0 < len(received) < len(undisturbed.token_ids) == started.max_tokens
            rest = await client.complete(
                [*started.prompt_token_ids, *received],
                replace(options, max_tokens=started.max_tokens - len(received)),
            )
            assert [*received, *rest.token_ids] == list(undisturbed.token_ids)
        token_ids, done = await stream(client, serving)
        assert token_ids == whole
        assert any(share.drafter == "model" for share in done.drafters)
    assert await all_gone(list(serving.facts["pids"].values()))


class Falling:
    """A stack of one service that has exited and fails to start `failures` times."""

    def __init__(self, name: str, failures: int) -> None:
        self.services: dict[str, Any] = {name: self}
        self.said: list[str] = []
        self._starts = iter([FlyspecError("no such model")] * failures)
        self._lives: Iterator[str] = iter(["signal SIGKILL"] + failures * ["code 2"])

    async def how_it_ended(self) -> str:
        for how in self._lives:
            return f"it ended with {how}"
        raise asyncio.CancelledError  # it lives

    async def restart(self, _: str) -> None:
        for error in self._starts:
            raise error

    def say(self, text: str) -> None:
        self.said.append(text)


async def supervised(stack: Falling) -> list[float]:
    """The pauses before its starts, in seconds."""
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    with pytest.raises((FlyspecError, asyncio.CancelledError)) as caught:
        await supervise(stack, sleep)  # type: ignore[arg-type]
    stack.said.append(str(caught.value))
    return pauses


@pytest.mark.parametrize("name", ["verify", "orchestrator"])
async def test_a_service_that_cannot_be_started_ends_the_stack(name: str) -> None:
    stack = Falling(name, failures=9)
    assert len(await supervised(stack)) == MOST_FAILED_STARTS
    assert stack.said[0] == "it ended with signal SIGKILL; restarting now"
    assert stack.said[1] == "it ended with code 2; restarting in 1 s"
    assert stack.said[-1] == "no such model"


async def test_a_drafter_that_cannot_be_started_is_tried_for_ever() -> None:
    assert await supervised(Falling("draft", failures=7)) == [0, 1, 2, 4, 8, 16, 30, 30]


async def test_starts_that_failed_are_forgotten_when_one_has_worked() -> None:
    assert len(await supervised(Falling("verify", failures=4))) == 5

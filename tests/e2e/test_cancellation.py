"""Clients that vanish leave nothing behind, in separate processes on the bundled models."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import replace

import pytest

from flyspec.client import Chat, GenerateOptions
from flyspec.rules import Rule
from flyspec_lab.word_problems import problems
from tests.e2e.installation import Installation
from tests.waiting import idle

LONG = GenerateOptions(rule=Rule("exact"), max_tokens=2000, ignore_eos=True)


async def rests(stack: Installation) -> bool:
    """Wait until every session is gone."""
    async with stack.admin() as admin:
        return await idle(admin)


async def test_a_killed_client_leaves_no_session(stack):
    for delay in (0.0, 0.3):
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "flyspec.cli",
            "generate",
            "--address",
            stack.address,
            "--ignore-eos",
            "--max-tokens",
            "2000",
            "--color",
            "never",
            "import os\n",
            stdout=asyncio.subprocess.PIPE,
            env=stack.environment(),
        )
        assert client.stdout is not None
        await client.stdout.read(16)
        await asyncio.sleep(delay)
        client.send_signal(signal.SIGKILL)
        await client.wait()
        assert await rests(stack)


@pytest.mark.parametrize("number", [30, pytest.param(200, marks=pytest.mark.full)])
async def test_many_cancelled_requests(stack, number):
    (problem,) = problems("cancellation", 1)
    prompt = Chat.of_user(problem.question)
    async with stack.client() as client:
        before = await client.complete(prompt, replace(LONG, max_tokens=40))
        for wait in (0.05, 0.5):
            tasks = [asyncio.create_task(client.complete(prompt, LONG)) for _ in range(number)]
            await asyncio.sleep(wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await rests(stack)
        after = await client.complete(prompt, replace(LONG, max_tokens=40))
        assert after.token_ids == before.token_ids

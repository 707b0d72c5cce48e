"""A drain by SIGTERM while requests run and wait."""

from __future__ import annotations

import asyncio
import signal

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AdminClient, AsyncClient, GenerateOptions
from flyspec.errors import UnavailableError
from flyspec.rules import Rule
from tests.waiting import until

LONG = GenerateOptions(rule=Rule("exact"), max_tokens=120, ignore_eos=True)


async def test_sigterm_drains():
    options = StackOptions(
        draft_model="",
        log_level="error",
        drain_grace_s=60.0,
        orchestrator_flags=("--max-concurrent", "2", "--max-waiting", "5"),
    )
    async with (
        Stack(options) as stack,
        AsyncClient(stack.address, max_retries=0) as client,
        AdminClient(stack.admin_address) as admin,
    ):
        # Held, so that nothing ends, however fast the model is, before the rest has been refused.
        target, orchestrator = stack.services["verify"], stack.services["orchestrator"]
        target.send(signal.SIGSTOP)
        try:
            tasks = [asyncio.create_task(client.complete("import os\n", LONG)) for _ in range(5)]

            async def three_wait() -> bool:
                return (await admin.status()).waiting_generations == 3

            await until(three_wait)
            orchestrator.send(signal.SIGTERM)
            await until(lambda: sum(task.done() for task in tasks) == 3)
        finally:
            target.send(signal.SIGCONT)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [r for r in results if isinstance(r, UnavailableError)]
        assert len(refused) == 3
        assert all("draining" in str(r) for r in refused)
        texts = {tuple(r.token_ids) for r in results if r not in refused}
        assert {len(text) for text in texts} == {120}
        assert await orchestrator.ended() == 0

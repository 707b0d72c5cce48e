"""More requests than can be served: a short form of `python -m bench.overload`; a drain by SIGTERM.

Nothing about speed here, which depends on what else the machine does.
"""

from __future__ import annotations

import asyncio
import signal

from bench import overload
from flyspec.cli.stack import Stack, StackOptions
from flyspec.client import AdminClient, Client, GenerateOptions
from flyspec.errors import UnavailableError
from flyspec.rules import Rule
from tests.waiting import until

DEPENDS_ON_THE_MACHINE = (
    "p99 of accepted", "refusals take", "normal latency", "the generator is late", "memory of",
)  # fmt: skip
LONG = GenerateOptions(rule=Rule("exact"), max_tokens=120, ignore_eos=True)


async def test_ten_times_the_load_is_refused_with_when_to_retry():
    flags = (
        "--seconds 4 --baseline 2 --calibrate 2 --warm-up 1 --max-tokens 16 --max-sessions 4 "
        "--every 0.2 --json"
    )
    report = await overload.measure(overload.parser().parse_args(flags.split()))
    load = report.phase("overload")
    assert report.errors == {}
    assert load.completed + load.refused == load.sent
    assert load.completed > 0
    assert load.refused > 0
    assert load.refusals_without_retry == 0
    assert not any(report.left.values())
    assert report.memory
    assert [why for why in report.broken() if not why.startswith(DEPENDS_ON_THE_MACHINE)] == []
    assert overload.table(report).row_count == len(report.phases)
    assert "p99 of accepted" in overload.summary(report)


async def test_sigterm_drains():
    options = StackOptions(
        draft_model="",
        log_level="error",
        drain_grace_s=60.0,
        orchestrator_flags=("--max-concurrent", "2", "--max-waiting", "5"),
    )
    async with (
        Stack(options) as stack,
        Client(stack.address) as client,
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

"""Services in their own processes whose models fail: no request fails, and the services exit."""

from __future__ import annotations

import asyncio
import re
import signal
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec.cli.service import Child
from flyspec.client import GenerateOptions
from flyspec.rules import Rule
from flyspec.serving import EXIT_LOST
from flyspec_lab.ports import free_port
from tests.orchestrator.stacks import held, orchestrator_at, start_stack
from tests.waiting import until

OPTIONS = GenerateOptions(
    rule=Rule("exact"), max_tokens=8, ignore_eos=True, num_speculative_tokens=4
)
REASONS = {
    "hang": "a step of [0-9]+ tokens has been running for",
    "nan": "the logits are not finite",
    "device": "its device failed",
}
CALLS = 20
"""Steps before the model fails."""
WAIT_S = 240.0
FOREVER_S = 3600.0
"""The orchestrator's timeouts, too long to be what helps."""
SERVING = health_pb2.HealthCheckResponse.ServingStatus


@asynccontextmanager
async def sick(kind, module, model_dir, server):
    """A service whose model fails, its output, and its port."""
    port, said = free_port(), []
    flags = ["--model", model_dir, "--port", str(port), "--device", "cpu", "--dtype", "float64",
             "--threads", "1", "--max-sessions", "16", "--metrics-port", "-1",
             "--step-timeout-s", "1", "--log-level", "warning"]  # fmt: skip
    child = await Child.start(
        module,
        "loadtest.chaos.sick_service",
        [kind, str(CALLS), module, *flags],
        1,
        said.append,
        server,
    )
    try:
        await child.ready()
        yield child, f"127.0.0.1:{port}"
    finally:
        child.send(signal.SIGKILL)
        await child.ended()


def orchestrator(*addresses):
    """An orchestrator that learns of failures only from the services."""
    return orchestrator_at(*addresses, round_timeout_s=FOREVER_S, draft_timeout_s=FOREVER_S)


async def watch_health(address) -> list[int]:
    """Return the service's reported health, from now until it exits."""
    found = []
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            async for response in call:
                found.append(response.status)
        except grpc.aio.AioRpcError:
            pass
    return found


async def ask_until_ended(client, child, greedy) -> None:
    """Send requests, six at a time, until the service has exited, and once more; check all."""
    ended = False
    async with asyncio.timeout(WAIT_S):
        while not ended:
            ended = child.process.returncode is not None
            texts = [f"{n} The cat sat on the mat, and the dog sat" for n in range(6)]
            done = await asyncio.gather(*(client.complete(text, OPTIONS) for text in texts))
            for completion in done:
                assert completion.token_ids == greedy(completion.started.prompt_token_ids, 8)


async def check_end(child, kind) -> None:
    assert await child.ended() == EXIT_LOST
    said = "\n".join(child.lines)
    assert "the model is lost; exiting so that the process is restarted" in said
    assert re.search(REASONS[kind], said)


@pytest.mark.parametrize("kind", REASONS)
async def test_a_sick_target_gives_way_and_ends(model_dirs, greedy, kind, fork_server):
    async with (
        start_stack(model_dirs) as well,
        sick(kind, "verify_service", model_dirs[0], fork_server) as (child, address),
    ):
        health = asyncio.create_task(watch_health(address))
        targets = f"127.0.0.1:{well.verify_server.port},{address}"
        async with orchestrator(targets, f"127.0.0.1:{well.draft_server.port}") as (_, client, _):
            await ask_until_ended(client, child, greedy)
        await check_end(child, kind)
        assert await health == [SERVING.SERVING, SERVING.NOT_SERVING]


@pytest.mark.parametrize("kind", ["nan"])
async def test_a_sick_drafter_gives_way_and_ends(model_dirs, greedy, kind, fork_server):
    async with (
        start_stack(model_dirs) as well,
        sick(kind, "draft_service", model_dirs[1], fork_server) as (child, address),
        orchestrator(f"127.0.0.1:{well.verify_server.port}", address) as (_, client, _),
    ):
        await ask_until_ended(client, child, greedy)
        await check_end(child, kind)


async def test_the_step_at_hand_is_told(model_dirs):
    async with start_stack(model_dirs, probe_interval_s=0.05) as stack:

        async def running_ns() -> tuple[int, int]:
            status = await stack.admin.status()
            return status.verify.process.step_running_ns, status.draft.process.step_running_ns

        assert await running_ns() == (0, 0)
        with held(stack):
            work = asyncio.create_task(stack.client.complete("The cat sat", OPTIONS))

            async def grows() -> bool:
                return (await running_ns())[0] > 200_000_000

            await until(grows)
        await work
        await stack.idle()

        async def rests() -> bool:
            return await running_ns() == (0, 0)

        await until(rests)

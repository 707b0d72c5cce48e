"""Hostile messages to clients' and operators' ports: the right status, and no effect on others."""

from __future__ import annotations

import grpc
import pytest

from flyspec.rpc import malformed
from flyspec.v1 import generation_pb2
from tests.examples import examples
from tests.hostile import fuzz, logged
from tests.orchestrator.stacks import start_stack

GENERATE = "/flyspec.v1.GenerationService/Generate"


@pytest.mark.parametrize(("server", "calls"), [("generation", 150), ("admin", 300)])
async def test_hostile_messages_change_nothing(model_dirs, monkeypatch, server, calls):
    monkeypatch.setattr(malformed, "REQUEST_TIMEOUT_S", 2.0)
    options = {"max_sessions": 40, "idle_timeout_s": 5.0}
    async with start_stack(model_dirs, draft=options, verify=options) as stack:
        port, admin_port = stack.orchestrator.ports
        ports = {"generation": port, "admin": admin_port, "draft": stack.draft_server.port}
        addresses = {name: f"127.0.0.1:{number}" for name, number in ports.items()}
        report = await fuzz(server, addresses, examples(calls))
        assert report.statuses["OK"] > 10
        assert await stack.idle()


async def test_a_deadline_that_passes_leaves_no_trace(stack):
    """Its status can no longer be sent; that is not a server error."""
    address = f"127.0.0.1:{stack.orchestrator.ports[0]}"
    request = generation_pb2.GenerateRequest(text="The cat", max_tokens=200, ignore_eos=True)
    async with grpc.aio.insecure_channel(address) as channel:
        with logged() as lines:
            for deadline_s in (0.01, 0.02, 0.05, 0.1) * 2:
                call = channel.unary_stream(GENERATE)(
                    request.SerializeToString(), timeout=deadline_s
                )
                await call.code()
            assert await stack.idle()
    assert not [line for line in lines if "Error" in line or "Traceback" in line]

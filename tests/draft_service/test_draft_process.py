"""The draft service as a process: ready line, health, drain, and no torch without a model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec import wire
from flyspec.v1 import draft_pb2_grpc
from flyspec.values.rounds import DraftAdvance, DraftOpen
from tests.draft_service.draft_harness import GREEDY

# Any attempt to import one of these fails as if it were not installed.
WITHOUT_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "numpy", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from draft_service.__main__ import main
main()
"""


@contextmanager
def process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A draft service without torch, and the port that it announced."""
    read, write = os.pipe()
    command = [sys.executable, "-c", WITHOUT_TORCH, "--port", "0", "--ready-fd", str(write), *flags]
    with subprocess.Popen(command, pass_fds=[write], stderr=subprocess.PIPE, text=True) as running:
        os.close(write)
        try:
            with os.fdopen(read) as pipe:
                line = pipe.readline()
            yield running, json.loads(line)["port"] if line else 0
        finally:
            running.kill()


def test_prompt_lookup_without_torch_and_graceful_end() -> None:
    with process("--drain-grace-s", "1") as (running, port):
        assert port
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "flyspec.v1.DraftService"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            messages = [
                wire.encode(DraftOpen([1, 2, 3, 1, 2], GREEDY, 0)),
                wire.encode(DraftAdvance(1, 5, [], 4)),
            ]
            (response,) = draft_pb2_grpc.DraftServiceStub(channel).Draft(iter(messages))
            assert list(response.token_ids) == [3, 1, 2, 3]
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0


def test_a_model_without_torch_is_refused_in_one_line() -> None:
    with process("--model", "some/model", "--metrics-port", "-1") as (running, port):
        assert port == 0
        assert running.wait(60) == 2
        assert running.stderr is not None
        (line,) = running.stderr.read().splitlines()
        assert line.startswith("error: --model some/model: needs torch")


def test_port_in_use_is_refused_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process("--port", str(port)) as (running, announced):
            assert announced == 0
            assert running.wait(60) == 2
            assert running.stderr is not None
            assert f"error: --port {port}: cannot listen on 127.0.0.1: " in running.stderr.read()

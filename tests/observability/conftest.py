"""The bundled models in separate processes, which log as JSON and write their spans to files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from tests.observability.observed import SERVICES, Observed


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables for the processes that are started in the block."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


@pytest.fixture(scope="session")
async def observed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    traces = {service: folder / f"{service}.jsonl" for service in SERVICES}
    variables = {"OTEL_BSP_SCHEDULE_DELAY": "200"}  # ms; the SDK's own is 5 s
    for service, path in traces.items():
        prefix = f"FLYSPEC_{service.upper()}"
        variables |= {f"{prefix}_TRACES_FILE": str(path), f"{prefix}_LOG_FORMAT": "json"}
    logs: list[str] = []
    on_log: Callable[[str], None] = logs.append
    # A trial of staging, whenever it comes, has rounds whose parts overlap.
    flags = "--max-concurrent-per-client", "4", "--staging", "off"
    options = StackOptions(log_level="debug", orchestrator_flags=flags)
    stack = Stack(options, on_log=on_log)
    with environment(variables):  # of this stack alone
        await stack.__aenter__()
    try:
        yield Observed(stack, logs, traces)
    finally:
        await stack.stop()

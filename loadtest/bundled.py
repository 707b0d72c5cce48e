"""The same on a stack of its own: `python -m loadtest.bundled SCENARIO [flags]`.

Starts `flyspec serve` with the bundled models, and stops it after the test.
"""

from __future__ import annotations

import loadtest.patched  # noqa: F401  before anything that gevent has to patch

# isort: split
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

from flyspec.cli.program import run, say
from flyspec.cli.service import child_environment
from flyspec.config import NO_PORT
from flyspec.errors import FlyspecError
from flyspec.flags import Flag
from flyspec.startup import STAGE
from loadtest.options import LoadOptions
from loadtest.run import LoadTest, run_test
from loadtest.scenarios import scenario_app

END_S = 60.0
"""Time for a process to stop when told to."""


@dataclass(frozen=True)
class StackFlags:
    """The stack; its services also read their environment variables."""

    serve: Annotated[str, Flag("Flags of `flyspec serve`.", group="Stack", metavar="FLAGS")] = ""


def start(scenario: type[LoadTest], load: LoadOptions, own: Any, stack: StackFlags) -> int:
    """Start the stack and run the test; its exit code."""
    load.validate()
    http = load.requests.protocol == "http"
    flags = [f"--{name}=0" for name in ("port", "admin-port", "draft-port", "verify-port")]
    flags += [f"--http-port={0 if http else NO_PORT}", "--log-level=error"]
    flags += shlex.split(stack.serve)
    with _stack_with(flags) as served:
        load = replace(
            load,
            address=served["http_url" if http else "address"],
            admin_address=served["admin_address"],
            watch=(*load.watch, *served["pids"].items()),
        )
        return run_test(scenario, load, own, say)


@contextmanager
def _stack_with(flags: list[str]) -> Iterator[dict[str, Any]]:
    """Run `flyspec serve`, which ends with this process in any case; yield what it announces."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "flyspec.cli.child", "flyspec.cli", "serve", "--json", *flags],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        env=child_environment(1),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        found = (json.loads(line) for line in process.stdout)
        served = next((facts for facts in found if STAGE not in facts), None)
        if served is None:
            raise FlyspecError("the stack did not start")
        yield served
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()


app = scenario_app(
    "Start the bundled models, test them under load, and stop them.", start, stack=StackFlags()
)

if __name__ == "__main__":
    run(app)

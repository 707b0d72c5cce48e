"""The same on a stack of its own: `python -m loadtest.bundled SCENARIO [flags]`.

Starts the bundled pair on this machine, for `drafter-swap` further draft services as well, runs
`python -m loadtest` against it as a process of its own, and stops everything. Apart from `loadtest`
itself, which needs no service's code.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack

from flyspec.cli.service import ROOT, Child
from flyspec.cli.stack import DEMO_MODELS, Stack, StackOptions
from flyspec.errors import FlyspecError
from loadtest import options
from loadtest.scenarios import SCENARIOS

SWAPPED = "drafter-swap"
DRAFTERS = (("model-b", "draft", "model"), ("levels", "draft", "multi_level"),
            ("bytes", "draft-bytes", "model"))  # fmt: skip
"""Name, bundled model and kind of each drafter that takes turns."""
END_S = 60.0
"""So long may a test take to stop when it is told to."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The flags of the stack; the rest is `loadtest`'s."""
    found = argparse.ArgumentParser(
        prog="loadtest.bundled", add_help=False, allow_abbrev=False,
        usage="loadtest.bundled SCENARIO [flags of loadtest] [flags of the stack]",
    )  # fmt: skip
    found.add_argument("--model", help="another target than the bundled one")
    found.add_argument("--draft-model", help="another draft model; '' drafts by prompt lookup")
    found.add_argument("--max-sessions", type=int, default=32)
    found.add_argument("--dtype", default="auto")
    found.add_argument("--orchestrator-flags", default="", help="such as '--max-waiting 4'")
    return found


async def run(stack_args: argparse.Namespace, flags: list[str]) -> int:
    """Start the stack and the test; the test's exit code. SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    stack_options = StackOptions(
        model=stack_args.model, draft_model=stack_args.draft_model,
        dtype=stack_args.dtype, max_sessions=stack_args.max_sessions, log_level="error",
        orchestrator_flags=tuple(stack_args.orchestrator_flags.split()),
    )  # fmt: skip
    async with AsyncExitStack() as resources:
        stack = await resources.enter_async_context(Stack(stack_options, _say, _say))
        # Later flags win, but nobody has a reason to give these.
        flags = [*flags, "--address", stack.address, "--admin-address", stack.admin_address]
        for name, service in stack.services.items():
            flags += ["--watch", f"{name}={service.pid}"]
        if flags[0] == SWAPPED:
            for name, model, kind in DRAFTERS:
                address = await further_drafter(resources, name, model, _say)
                flags += ["--swap-to", f"{name}={address},{kind}"]
        return await stack.guard(_test(flags))


async def _test(flags: list[str]) -> int:
    """Run the test as a child; stop it in an orderly way if this process is stopped."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}  # fmt: skip
    test = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", *flags, env=environment, start_new_session=True
    )
    try:
        return await test.wait()
    finally:
        if test.returncode is None:
            test.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(test.wait(), END_S)
            if test.returncode is None:
                test.kill()


async def further_drafter(
    resources: AsyncExitStack, name: str, model: str, on_log: Callable[[str], None]
) -> str:
    """Start a further draft service, which ends with `resources`; its address."""
    flags = ["--model", str(DEMO_MODELS / model), "--port", "0", "--threads", "1",
             "--log-level", "error"]  # fmt: skip
    service = await Child.start(name, "draft_service", flags, 1, on_log)

    async def stop() -> None:
        service.send(signal.SIGTERM)
        await service.ended()

    resources.push_async_callback(stop)
    await service.ready()
    return f"127.0.0.1:{service.facts['port']}"


def main() -> int:
    """Run it; the exit code."""
    stack_args, flags = parser().parse_known_args()
    # Checked before anything starts; what the stack will add stands in for itself.
    added = ["--admin-address", "x:1", *(["--swap-to", "x=x:1"] if flags[:1] == [SWAPPED] else [])]
    given = [*flags, *added] if flags[:1] and flags[0] in SCENARIOS else flags
    args = options.parser("loadtest.bundled").parse_args(given)
    try:
        options.check(args)
        return asyncio.run(run(stack_args, flags))
    except FlyspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


if __name__ == "__main__":
    sys.exit(main())

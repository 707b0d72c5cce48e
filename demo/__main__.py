"""`python -m demo` (`make demo`): demonstrates the services on the bundled models."""

from __future__ import annotations

import asyncio
import shlex
import sys

from flyspec.cli.program import run, single
from flyspec.cli.runtime import run_async
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.cli.starting import shown
from flyspec.errors import FlyspecError
from flyspec.progress import error_console
from flyspec.rules.presets import DEFAULT_RULE

PROBLEM = (
    "A bus sets out with 18 people. At the first stop 17 get on and 6 get off. At the second stop "
    "9 get on and 9 get off. How many people are on the bus then?"
)


def say(text: str) -> None:
    print(f"\n== {text}", file=sys.stderr, flush=True)


async def flyspec(*arguments: str) -> None:
    """Show and run a `flyspec` command. Raises `FlyspecError` if it fails."""
    print("$ flyspec " + shlex.join(arguments), file=sys.stderr, flush=True)
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "flyspec.cli", *arguments)
    if await process.wait():
        raise FlyspecError(f"flyspec {arguments[0]} failed with exit code {process.returncode}")


async def show() -> None:
    say("starting the services on the bundled pair: 12 M parameters, for word problems only")
    options = StackOptions(log_level="warning")
    async with shown(Stack(options), error_console()) as stack:
        color = ["--color", "always"]
        say("solving a word problem, up to 15 drafts per round; colors show where tokens came from")
        await flyspec(
            "generate", "--address", stack.address, "--rule", DEFAULT_RULE,
            "--num-speculative-tokens", "15", *color, "--chat", PROBLEM,
        )  # fmt: skip
        say("the same exactly: the target's own text, token for token, as many drafts as pay off")
        await flyspec(
            "generate", "--address", stack.address, "--rule", "exact", *color, "--chat", PROBLEM,
        )  # fmt: skip
        say(f"comparing plain decoding, exact and {DEFAULT_RULE} on fresh word problems")
        await flyspec(
            "bench", "--address", stack.address, "--problems", "8", "--repeats", "2",
        )  # fmt: skip
        say("stopping")


def demo() -> None:
    """Start the services on the bundled models, and show and run a few commands."""
    run_async(show())
    print("Done. `.venv/bin/flyspec serve` starts the same stack; see README.md for next steps.")


if __name__ == "__main__":
    run(single(demo), failed=1)

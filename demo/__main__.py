"""`python -m demo` (`make demo`): the three services on the bundled models, at work.

Starts the stack once, then runs the commands that a user would type against it, and says which.
"""

from __future__ import annotations

import asyncio
import shlex
import sys

from demo.corpus import problems
from flyspec.cli.stack import Stack, StackOptions
from flyspec.errors import FlyspecError

PYTHON_PROMPT = '''import os

def read_lines(path):
    """Return the lines of a text file."""
'''
PROBLEM_SEED = "demo"


def say(text: str) -> None:
    """Tell what comes next, on standard error like all progress."""
    print(f"\n== {text}", file=sys.stderr, flush=True)


async def flyspec(*arguments: str) -> None:
    """Run a `flyspec` command, shown as it would be typed; raises when it fails."""
    print("$ flyspec " + shlex.join(arguments), file=sys.stderr, flush=True)
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "flyspec.cli", *arguments)
    if await process.wait():
        raise FlyspecError(f"flyspec {arguments[0]} failed with exit code {process.returncode}")


async def run() -> None:
    """The demonstration."""
    (problem,) = problems(PROBLEM_SEED, 1)
    say("starting draft service, verify service and orchestrator on the bundled models")
    options = StackOptions(log_level="warning")
    async with Stack(
        options, on_event=lambda event: print(f"   {event}", file=sys.stderr)
    ) as stack:
        color = ["--color", "always"]
        say("a word problem, solved; colours tell where each token came from")
        await flyspec(
            "generate", "--address", stack.address, "--rule", "fly", *color, "--chat",
            problem.question,
        )  # fmt: skip
        say("a Python file, continued; with exact decoding")
        await flyspec(
            "generate", "--address", stack.address, "--rule", "exact", *color,
            "--max-tokens", "96", PYTHON_PROMPT,
        )  # fmt: skip
        say("plain decoding, exact and fly over fresh word problems, in turn")
        await flyspec(
            "bench", "--address", stack.address, "--problems", "8", "--repeats", "2",
        )  # fmt: skip
        say("stopping")


def main() -> int:
    """Run; an error is one line."""
    try:
        asyncio.run(run())
    except FlyspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("Done. `.venv/bin/flyspec serve` starts the same stack; README.md goes on from here.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m bench.fuzz --server verify --messages 200000 --seed 0`: hostile clients, many at once.

Starts the server with the bundled models as a child process, sends it that many messages, mostly
sessions with something wrong in them, and looks at it from beside: a canary's tokens, sessions,
memory, process, log. Prints a table. Exits with 1, the seed and the smallest script that shows it,
at a status that blames the server (INTERNAL, UNKNOWN, ...), at one that does not fit what was sent,
at a crash, a leak, or a traceback in its log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import uvloop

from bench.fuzz.report import FuzzReport
from bench.fuzz.run import FuzzRun
from bench.fuzz.services import DraftTarget, FuzzTarget, VerifyTarget
from bench.fuzz.stack import StackTarget

TARGETS: dict[str, Callable[[], FuzzTarget]] = {
    "draft": DraftTarget,
    "verify": VerifyTarget,
    "generation": lambda: StackTarget(admin=False),
    "admin": lambda: StackTarget(admin=True),
}


async def fuzz(server: str, messages: int, seed: int, only: int | None = None) -> FuzzReport:
    """Start a server, fuzz it, end it; or play one script, number `only`."""
    target, log = TARGETS[server](), list[str]()
    try:
        await target.start(log.append)
        run = FuzzRun(server, target, seed, log)
        if only is None:
            await run.run(messages)
        else:
            outcome = await run.only(only)
            print(outcome.script)
            print(f"{outcome.status}: {outcome.details}; {outcome.complaint or 'as expected'}")
            print("\n".join(log))
        return run.report
    finally:
        await target.stop()


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="bench.fuzz", description=__doc__)
    parser.add_argument("--server", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--messages", type=int, default=200_000, help="messages to each server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="play the script of this number alone")
    args = parser.parse_args()
    servers = list(TARGETS) if args.server == "all" else [args.server]
    passed = True
    for server in servers:
        report = uvloop.run(fuzz(server, args.messages, args.seed, args.only))
        if args.only is None:
            print(report, flush=True)
        passed &= report.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Fuzz flyspec's servers: send invalid and abandoned calls, many at once, and watch the server.

Starts the stack with the bundled models and attacks one server after the other. Exits with 1 if a
server answered with a status that blames itself (INTERNAL, UNKNOWN, ...) or accepted a mistake, did
not answer, died, leaked memory or sessions, gave another session wrong tokens, or logged a
traceback. Prints the seed and the smallest call that shows it.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import uvloop

from loadtest.fuzz.run import FuzzRun, fuzz
from loadtest.fuzz.servers import bundled
from loadtest.fuzz.source import SERVICES


async def play_alone(name: str, seed: int, number: int) -> None:
    """Play one script against a fresh server and print what comes of it."""
    log: list[str] = []
    async with bundled(name, log.append) as server:
        run = FuzzRun(server, seed, log)
        outcome = await run.alone(run.script(number))
    print(outcome.script)
    print(f"{outcome.status}: {outcome.details}; {outcome.complaint or 'as expected'}")
    print("\n".join(log))


def main() -> int:
    """Run it and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="loadtest.fuzz", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--server", choices=[*SERVICES, "all"], default="all")
    parser.add_argument("--messages", type=int, default=200_000, help="Messages per server.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed of all messages.")
    parser.add_argument("--only", type=int, metavar="N", help="Play script number N alone.")
    args = parser.parse_args()
    passed = True
    for name in SERVICES if args.server == "all" else [args.server]:
        if args.only is not None:
            uvloop.run(play_alone(name, args.seed, args.only))
            continue
        report = uvloop.run(fuzz(partial(bundled, name), args.messages, args.seed))
        print(report, flush=True)
        passed &= report.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

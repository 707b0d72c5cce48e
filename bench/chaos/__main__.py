"""Does every stream go on? `python -m bench.chaos --seconds 300`.

Two targets, two drafters and one with another tokenizer, each behind a proxy, one orchestrator. 32
streams ask for texts of every kind while services are killed, drained, held, delayed, stalled and
cut off at random, one by one and all targets at once.

With `exact`, every completed text must be the one that came out before the faults. With lossy rules
every round is judged again by a fresh target, which must give the same decisions and text. No
request may fail, nor last longer than its deadline; at the end no session may be left anywhere, and
every drafter must draft again. Exits with 1 if anything of this does not hold, and names the seed
that repeats the schedule.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import asdict

from bench import command
from bench.chaos.fleet import FleetOptions
from bench.chaos.report import ChaosReport, plot, show
from bench.chaos.run import ChaosOptions, run


def main() -> int:
    """Run it; the exit code."""
    parser = command.parser("chaos", __doc__, plots=True)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long faults come")
    parser.add_argument("--once", action="store_true", help="each fault once, instead of --seconds")
    parser.add_argument("--streams", type=int, default=32, help="requests at once")
    parser.add_argument("--jobs", type=int, default=96, help="different texts")
    parser.add_argument(
        "--lossy-share", type=float, default=0.3, help="requests that are not exact"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="a request's deadline, s")
    parser.add_argument("--seed", type=int, help="of schedule and requests; drawn if not given")
    parser.add_argument("--dtype", default="auto", help="the target's numbers")
    parser.add_argument("--no-foreign", action="store_true", help="no drafter of another tokenizer")
    parser.add_argument("--log-level", default="error", help="of the services, to standard error")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if args.seed is None else args.seed
    options = ChaosOptions(
        seed=seed,
        seconds=None if args.once else args.seconds,
        streams=args.streams,
        jobs=args.jobs,
        lossy_share=args.lossy_share,
        timeout_s=args.timeout,
        fleet=FleetOptions(foreign=not args.no_foreign, dtype=args.dtype, log_level=args.log_level),
    )

    def measure() -> ChaosReport:
        command.say(f"seed {seed}")
        return asyncio.run(run(options, command.say))

    return command.run(
        args, measure, lambda r: {**asdict(r), "passed": r.passed}, show,
        lambda r: r.passed, plot,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

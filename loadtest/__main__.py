"""Load tests of a running flyspec: `python -m loadtest SCENARIO --address HOST:PORT`.

Exits with 0 if every goal was met and every check passed, 1 if not, 2 if the test could not run.
"""

from __future__ import annotations

import sys

try:
    import loadtest.patched  # noqa: F401  before anything that gevent has to patch
except ImportError as missing:
    print(
        f"error: load tests need locust ({missing}); install it with: pip install "
        "'flyspec[loadtest]'",
        file=sys.stderr,
    )
    sys.exit(2)

# isort: split
import argparse
import json
import signal
from dataclasses import asdict

import gevent

from flyspec.errors import FlyspecError
from loadtest import options
from loadtest.report.terminal import show
from loadtest.report.write import write, write_records
from loadtest.run import Interrupted, LoadTest


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit code."""
    args = options.parser().parse_args(argv)
    try:
        options.check(args)
        return _run(args)
    except FlyspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    main_greenlet = gevent.getcurrent()
    for number in (signal.SIGINT, signal.SIGTERM):
        gevent.signal_handler(number, gevent.kill, main_greenlet, Interrupted)
    test = LoadTest(args, lambda text: print(text, file=sys.stderr, flush=True))
    try:
        document = test.run()
    except Interrupted:
        print("stopped before it began", file=sys.stderr)
        return 2
    finally:
        test.close()
    if args.records is not None:
        write_records(args.records, (json.dumps(asdict(r)) for r in test.records))
    write(document, html=args.html, json=args.json, plot=args.plot)
    show(document)
    if args.html is not None:
        print(f"report: {args.html}")
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""How the commands here are told where results go, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flyspec.cli.runtime import to_json
from flyspec.errors import FlyspecError
from flyspec.tables import markdown

R = TypeVar("R", bound=Mapping[str, Any])


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """For `python -m bench.NAME`: flags for the report."""
    found = argparse.ArgumentParser(
        prog=f"bench.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--output", type=Path, help="write the JSON report here")
    found.add_argument(
        "--json", nargs="?", const=True, type=Path, metavar="FILE",
        help="print the JSON report, nothing else; with FILE, write it there instead",
    )  # fmt: skip
    return found


def run(
    args: argparse.Namespace,
    measure: Callable[[], R],
    show: Callable[[R], None],
    passed: Callable[[R], bool],
) -> int:
    """Measure, write what is asked for, print; the exit code.

    0 if it passed, 1 if not, 2 if it could not be measured.
    """
    report = None
    try:
        report = measure()
    except* FlyspecError as errors:
        for error in errors.exceptions:
            print(f"error: {error}", file=sys.stderr)
    if report is None:
        return 2
    document = to_json(report)
    quiet = args.json is True
    for path in {args.output, None if quiet else args.json} - {None}:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document + "\n")
    if quiet:
        print(document)
    else:
        show(report)
    return 0 if passed(report) else 1


def say(line: str) -> None:
    """Tell what goes on, where it does not disturb a report."""
    print(line, file=sys.stderr, flush=True)


def print_records(records: Sequence[Mapping[str, Any]]) -> None:
    """A table in Markdown of records that have the same keys, which head its columns."""
    if records:
        rows = [
            [f"{v:.3g}" if isinstance(v, float) else str(v) for v in record.values()]
            for record in records
        ]
        print(f"\n{markdown(list(records[0]), rows, aligned=True)}\n")

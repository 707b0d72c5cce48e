"""Makes page and plot of a test's JSON: `python -m loadtest.report FILE.json --html FILE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flyspec.errors import FlyspecError
from loadtest.report.document import read
from loadtest.report.terminal import markdown, show
from loadtest.report.write import write


def main() -> int:
    """Print the table and write what is asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="loadtest.report", description=__doc__)
    parser.add_argument("file", type=Path, help="what `--json` wrote")
    parser.add_argument("--html", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=".svg, .png or .pdf")
    parser.add_argument("--markdown", action="store_true", help="print a table for a document")
    args = parser.parse_args()
    try:
        document = read(args.file)
        write(document, html=args.html, plot=args.plot)
    except FlyspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.markdown:
        print(markdown(document))
    else:
        show(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())

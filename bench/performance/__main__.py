"""`python -m bench.performance`: the tables and plots of docs/performance.md.

Reads the JSON reports in a folder, and rewrites the parts of the document between
`<!-- NAME -->` and `<!-- /NAME -->`, and its plots. Parts without reports are left as they are.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.performance.parts import parts_of
from bench.performance.plots import plot_batches, plot_groups
from bench.performance.reports import groups, others_of, read_reports
from flyspec.errors import ConfigError, FlyspecError


def write_between(text: str, parts: Mapping[str, str]) -> str:
    """Replace the text between each part's two marks. Raises `ConfigError`."""
    for name, part in parts.items():
        marks = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)"
        pieces = re.split(marks, text, flags=re.DOTALL)
        if len(pieces) == 4:
            text = f"{pieces[0]}{pieces[1]}\n{part}\n\n{pieces[2]}{pieces[3]}"
        else:
            raise ConfigError(f"the document must have <!-- {name} --> and <!-- /{name} --> once")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the document and its plots; return the exit code."""
    args = argparse.ArgumentParser(prog="bench.performance", description=__doc__)
    args.add_argument("reports", type=Path, nargs="?", default=Path("build/performance"))
    args.add_argument("--document", type=Path, default=Path("docs/performance.md"))
    given = args.parse_args(arguments)
    try:
        reports = read_reports(given.reports)
        text = write_between(given.document.read_text(), parts_of(reports))
        speed = reports.get("speed", ())
        images = given.document.parent / "images" / given.document.stem
        images.parent.mkdir(exist_ok=True)
        plot_groups(groups(speed), others_of(speed), images)
        plot_batches([b for d in speed for b in d["batches"]], images)
    except (FlyspecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    given.document.write_text(text)
    print(f"wrote {given.document} and {images}-*.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs `make demo` and draws its output, as in a terminal, to docs/demo.svg.

`python docs/record.py`. Needs only the bundled models.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 110


def settled(output: str) -> str:
    """Return what a terminal shows in the end: only the last state of a progress bar remains.

    Interprets rich's control codes: carriage return, cursor up, erase line, hide and show cursor.
    """
    lines, returned = [""], False
    for piece in re.split(r"(\r?\n|\r|\x1b\[1A|\x1b\[2K|\x1b\[\?25[lh])", output):
        if piece in ("\n", "\r\n"):
            lines.append("")
        elif piece == "\r":
            returned = True
            continue
        elif piece == "\x1b[1A":
            del lines[-1]
        elif piece == "\x1b[2K":
            lines[-1] = ""
        elif not piece.startswith("\x1b[?25"):
            lines[-1] = piece if returned and piece else lines[-1] + piece
        returned = returned and not piece
    return "\n".join(lines)


def main() -> None:
    """Run the demonstration and draw its output."""
    shown = (
        subprocess.run(
            [sys.executable, "-m", "demo"],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=True,
        )
        .stdout.decode()
        .replace(f"{ROOT}/", "")
    )
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(settled(shown)))
    console.save_svg(str(ROOT / "docs" / "demo.svg"), title="make demo")


if __name__ == "__main__":
    main()

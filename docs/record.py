"""Draws docs/demo.svg: what `make demo` prints, as the terminal shows it.

`python docs/record.py`. Needs the bundled models and nothing else.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 110


def main() -> None:
    """Run the demonstration, keep what it prints, draw it."""
    shown = subprocess.run(
        [sys.executable, "-m", "demo"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout.replace(f"{ROOT}/", "")
    # A progress bar redraws its line: only its last state stays.
    lines = [line.rsplit("\r", 1)[-1] for line in shown.replace("\r\n", "\n").split("\n")]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines)))
    console.save_svg(str(ROOT / "docs" / "demo.svg"), title="make demo")


if __name__ == "__main__":
    main()

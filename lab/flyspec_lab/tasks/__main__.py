"""Regenerates the table of tasks in a document: `python -m flyspec_lab.tasks docs/tasks.md`.

The table is between `<!-- tasks -->` and `<!-- end -->`; everything else is left unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from flyspec_lab.tasks import TASKS

_TABLE = re.compile(r"(<!-- tasks -->\n).*?(<!-- end -->)", re.DOTALL)


def write_tables(document: str) -> str:
    """Return the document with its table regenerated."""
    head, *rows = _rows()
    lines = (head, ["---"] * len(head), *rows)
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return _TABLE.sub(lambda found: found[1] + table + found[2], document)


def _rows() -> Iterable[list[str]]:
    yield ["task", "reads", "examples", "right is", "tokens"]
    for name, task in TASKS.items():
        reads = task.reads if task.needs_path else "nothing: generated"
        examples = "–" if task.default_shots is None else str(task.default_shots)
        yield [f"`{name}`", reads, examples, task.scoring, f"{task.max_tokens:,}"]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(write_tables(path.read_text(encoding="utf-8")), encoding="utf-8")

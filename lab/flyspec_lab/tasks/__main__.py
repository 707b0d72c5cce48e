"""Regenerates the table of tasks in a document: `python -m flyspec_lab.tasks docs/tasks.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from flyspec.tables import markdown
from flyspec_lab.report import write_into
from flyspec_lab.tasks import TASKS


def write_table(path: Path) -> None:
    """Write the table between <!-- tasks --> and <!-- /tasks -->; all else is left unchanged."""
    columns = ["task", "reads", "examples", "right is", "tokens"]
    rows = []
    for name, task in TASKS.items():
        reads = task.reads if task.needs_path else "nothing: generated"
        examples = "–" if task.default_shots is None else str(task.default_shots)
        rows.append([f"`{name}`", reads, examples, task.scoring, f"{task.max_tokens:,}"])
    write_into(path, {"tasks": markdown(columns, rows, left=len(columns))})


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        write_table(path)

"""`python -m bench.edits`: edits of the project's small Python files, as prompts for a benchmark.

Each line asks for a whole file with one change, and has the original as its predicted output.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("flyspec", "lab", "loadtest", "examples")
SIZES = range(500, 1500)
"""Bytes of a file, so that an answer has some hundred tokens."""
CHANGES = (
    "Rename the function `{name}` to `new_{name}`, wherever it is used.",
    "Give the function `{name}` a docstring that says what it does; replace one that is there.",
    "Give the function `{name}` another keyword argument, `verbose: bool = False`.",
)


def edits() -> Iterator[dict[str, Any]]:
    """Yield requests for a change of each small file with a function, each change in turn."""
    change = cycle(CHANGES)
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        code = path.read_text()
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        named = (node.name for node in ast.parse(code).body if isinstance(node, kinds))
        names = [name for name in named if not name.startswith("_")]
        if len(code) not in SIZES or not names:
            continue
        asked = f"{next(change).format(name=names[0])} Answer with the whole file and nothing else."
        content = f"{asked}\n\n```python\n{code}```"
        yield {
            "messages": [{"role": "user", "content": content}],
            "prediction": {"type": "content", "content": code},
        }


if __name__ == "__main__":
    for edit in edits():
        print(json.dumps(edit))

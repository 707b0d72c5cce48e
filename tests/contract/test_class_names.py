"""No two classes of the product have the same name; nor have two outside it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ["flyspec", "orchestrator", "draft_service", "verify_service"]
LABORATORY = ["lab/flyspec_lab", "loadtest", "bench"]


@pytest.mark.parametrize("house", [PRODUCT, LABORATORY])
def test_no_two_classes_have_one_name(house: list[str]) -> None:
    places = defaultdict(set)
    for path in (path for folder in house for path in (ROOT / folder).rglob("*.py")):
        if path.is_relative_to(ROOT / "flyspec" / "v1"):
            continue  # generated
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].add(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 100
    again = [f"{name}: {sorted(found)}" for name, found in places.items() if len(found) > 1]
    assert not again, "\n".join(again)

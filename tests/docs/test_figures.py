"""Tables that are copied from other documents equal them."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT

GROUPS = {
    "word problems": "word problems",
    "code (HumanEval)": "HumanEval",
    "general (Spec-Bench mt)": "spec_bench_question/mt",
    "summaries (Spec-Bench)": "spec_bench_question/summarization",
    "random tokens": "random tokens",
}
"""Rows of the README's table, and the groups of the measurements."""
MEASURED = "docs/measurements/performance.md"


def rows(document: str, part: str = "") -> list[list[str]]:
    """Return the rows of a document's tables, or of those between two marks."""
    text = (ROOT / document).read_text()
    if part:
        text = text.split(f"<!-- {part} -->")[1].split(f"<!-- /{part} -->")[0]
    lines = text.splitlines()
    return [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines if line.startswith("|")]


PLAIN = "measured plain plain-problems problems gsm8k spec-bench humaneval mgsm acpbench random"


@pytest.mark.parametrize("shown", GROUPS)
def test_the_readme_has_the_measured_speeds(shown: str) -> None:
    (found,) = [row for row in rows("README.md") if row[0] == shown]
    name = GROUPS[shown]
    plain = {row[1]: row for row in rows(MEASURED, PLAIN) if row[0] == name}
    others = {row[1]: row for row in rows(MEASURED, "others") if row[0] == name}
    ratios = [f"{plain[rule][2].split()[0]} ({plain[rule][3]})" for rule in ("exact", "fly")]
    beside = [f"{float(others['fly'][column].split()[0]):.1f}" for column in (6, 7)]
    assert found[1:] == [plain["plain again"][5], *ratios, *beside]

"""Code blocks of the documents say what they are and can be parsed; links and copies are right."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
import yaml

from tests.docs.blocks import ROOT, UNRUN, Block, blocks, documents
from tests.docs.commands import check_body, check_command, check_shell

LANGUAGES = ("sh", "python", "javascript", "json", "toml", "yaml", "text")
COMMAND = re.compile(r"^\$? ?(flyspec|python|pip|make|curl|kubectl|docker|npm) \S", re.MULTILINE)
ALL = [block for document in documents() for block in blocks(document)]


@pytest.mark.parametrize("block", ALL, ids=str)
def test_block(block: Block) -> None:
    assert block.language in LANGUAGES, "fence it, and name its language: one of these"
    if block.mark in UNRUN:
        assert block.reason, f"say why after <!-- {block.mark}: -->"
    match block.language:
        case "sh":
            check_shell(block.text)
        case "python":
            compile(block.text, str(block), "exec")
        case "javascript" if node := shutil.which("node"):
            check = [node, "--check", "--input-type=module", "-"]
            done = subprocess.run(check, input=block.text, text=True, capture_output=True)
            assert not done.returncode, done.stderr
        case "json":
            found = json.loads(block.text)
            if "messages" in found:
                check_body("/v1/chat/completions", found)
        case "toml":
            tomllib.loads(block.text)
        case "yaml":
            assert [*yaml.safe_load_all(block.text)]
        case "text":
            hidden = COMMAND.search(block.text)
            assert not hidden, f"a command that nothing checks: {hidden and hidden[0]}"


@pytest.mark.parametrize("document", documents())
def test_links_lead_somewhere(document):
    """Headings that links name are checked when the site is built."""
    text = (ROOT / document).read_text()
    for link in re.findall(r'(?:\]\(| src(?:set)?=")([^)"#]+)', text):
        if not link.startswith("http"):
            assert ((ROOT / document).parent / link).exists(), link


def test_published_models_are_measured_by_commands_that_are_understood() -> None:
    make = ["make", "-n", "REAL=none", "MODELS=models", "real-bench", "real-eval"]
    printed = subprocess.run(make, cwd=ROOT, text=True, capture_output=True).stdout
    lines = printed.replace("\\\n", " ").splitlines()
    asked = [line.partition("&&")[0] for line in lines if "bin/flyspec " in line]
    assert len(asked) == 24
    for line in asked:
        check_command(shlex.split(line))


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

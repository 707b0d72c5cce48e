"""Every code block of the documents says what it is, and what cannot be run is at least parsed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml

from tests.docs.blocks import ROOT, UNRUN, Block, blocks, documents
from tests.docs.commands import check_body, check_shell

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

"""Every block of the documents, run in order as a reader would: `make docs-test`.

It uses the ports that the documents name, so it runs in a network of its own where it can.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, UNRUN, Block, blocks, documents
from tests.docs.reader import Reader, listens

pytestmark = [pytest.mark.docs, pytest.mark.timeout(600)]
ALL = [block for document in documents() for block in blocks(document)]
PARSED = ("text", "json", "toml", "yaml")
"""Nothing to run, unless they are files or answers."""
CLIENTS = Path(os.environ.get("CLIENTS", ROOT / "build/http-clients"))
"""Where OpenAI's package for Node is installed."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    taken = [port for port in (50050, 50053, 8000) if listens(port)]
    assert not taken, f"something listens on {taken} already: stop it, or `make docs-test`"
    reader = Reader(tmp_path_factory.mktemp("documents"))
    yield reader
    reader.close()


def is_run(block: Block) -> bool:
    return block.mark in ("file", "answer") or block.language not in PARSED


@pytest.mark.parametrize("block", [b for b in ALL if is_run(b)], ids=str)
def test_block(reader, block: Block) -> None:
    if block.mark in UNRUN:
        pytest.skip(f"{block.mark}: {block.reason}")
    if block.language == "javascript":
        reader.open(block.document)
        run_node(block)
    else:
        reader.open(block.document)
        reader.do(block)


def run_node(block: Block) -> None:
    if not (CLIENTS / "node_modules/openai").is_dir():
        pytest.skip(f"OpenAI's package for Node is not in {CLIENTS}: make http-clients")
    script = CLIENTS / "document.mjs"
    script.write_text(block.text)
    done = subprocess.run([shutil.which("node") or "node", script], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_python_is_typed(tmp_path) -> None:
    (tmp_path / "wrong.py").write_text("import flyspec\nflyspec.Client().complete(3, seed='x')\n")
    for number, block in enumerate(ALL):
        if block.language == "python":
            name = f"{Path(block.document).stem.lower().replace('-', '_')}_{number}.py"
            (tmp_path / name).write_text(block.text)
    config = tmp_path / "mypy.ini"
    # As it is for users, whose installed packages are not checked; pyarrow has no types.
    config.write_text(
        "[mypy]\n[mypy-flyspec.*]\nignore_errors = true\n"
        "[mypy-pyarrow.*]\nignore_missing_imports = true\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", config, tmp_path],
        cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, done.stdout
    for line, kind in zip(errors, ("int", "str"), strict=True):
        assert "wrong.py:2: " in line
        assert f'incompatible type "{kind}"' in line

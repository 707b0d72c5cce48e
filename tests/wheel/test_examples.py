"""Every file of examples/, with the wheel."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.wheel.user import ROOT, run

EXAMPLES = ROOT / "examples"
SAYS = {
    "stream.py": r"(?s)#### 22\b.*\d+ EXACT_MODEL.*\d+ loose tokens cost \d+\.\d\d nats",
    "many_requests.py": r"4\d of 48 right; \d+ tokens in",
    "openai_client.py": r"(?s)#### 22\b.*EXACT_MODEL",
    "http.sh": r'(?s)"id":"target:careful".*"content":.*"origins": .*data: \[DONE\]',
    "reflection.py": r"(?s)#### 22\n\d+ tokens",
    "swap_drafter.py": r"(?s)model: \d+ of .*prompt_lookup: \d+ of .*\nthe text is the same",
}
"""What each program prints."""


def test_every_example_is_run_and_listed():
    files = {path.name for path in EXAMPLES.iterdir()} - {"README.md"}
    assert files == {*SAYS, "rules.toml", "token_by_token.ipynb"}
    listed = re.findall(r"^\| \[(\S+)\]\((\S+)\)", (EXAMPLES / "README.md").read_text(), re.M)
    assert [name for name, _ in listed] == [to for _, to in listed]
    assert {name for name, _ in listed} == files


@pytest.mark.parametrize("name", SAYS)
def test_program(installed, tools, folder, served, name):
    (folder / name).write_text(served.at((EXAMPLES / name).read_text()))
    program = ("sh",) if name.endswith(".sh") else (tools / "python",)
    said = run(*program, name, cwd=folder)
    assert re.search(SAYS[name], said), said


def test_one_needs_nothing_of_flyspec(folder, served, tools, installed):
    """`installed` has grpcio-reflection; flyspec itself is kept from being imported."""
    code = served.at((EXAMPLES / "reflection.py").read_text())
    (folder / "alone.py").write_text(f"import sys\nsys.modules['flyspec'] = None\n{code}")
    assert "#### 22" in run(installed / "python", "alone.py", cwd=folder)


def test_programs_are_typed(installed, tools, folder):
    """grpc and protobuf have no types of their own."""
    run(tools / "mypy", "--strict", "--disable-error-code", "import-untyped",
        *EXAMPLES.glob("*.py"), cwd=folder)  # fmt: skip


def test_notebook(installed, tools, folder):
    shutil.copy(EXAMPLES / "token_by_token.ipynb", folder)
    run(tools / "python", "-m", "pytest", "--nbmake", "--nbmake-timeout=300", "-p",
        "no:cacheprovider", "token_by_token.ipynb", cwd=folder)  # fmt: skip

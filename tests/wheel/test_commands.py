"""Commands of the wheel, in an environment that has nothing else, on the bundled models."""

from __future__ import annotations

import csv
import json
import re
import urllib.parse
import urllib.request
from importlib.metadata import distributions as distributions_in

import pytest

from flyspec.version import __version__
from tests.wheel.user import run

QUESTION = (
    "In a shop there are 3 red boxes with 4 pens each and 2 blue boxes with 5 pens each. "
    "How many pens are there in all?"
)


def test_nothing_of_the_checkout_is_imported(installed, folder):
    code = "import flyspec; print(flyspec.__file__, flyspec.__version__)"
    where, version = run(installed / "python", "-c", code, cwd=folder).split()
    assert where.startswith(str(folder))
    assert version == __version__
    assert run(installed / "flyspec", "--version", cwd=folder).strip() == version


def test_all_brings_no_development_tools(installed):
    (site,) = installed.parent.glob("lib/python3*/site-packages")
    found = {found.name.lower() for found in distributions_in(path=[str(site)])}
    assert {"torch", "fastapi", "matplotlib"} <= found
    assert not found & {"build", "hypothesis", "locust", "mypy", "openai", "pytest", "ruff"}


def test_generate_local(installed, folder):
    said = run(installed / "flyspec", "generate", "--local", "--json", "--chat", QUESTION,
               cwd=folder)  # fmt: skip
    assert json.loads(said)["text"].endswith("#### 22")


@pytest.mark.parametrize(
    "command", [["generate", "--rule", "careful", "--chat", QUESTION], ["chat"]]
)
def test_answers(installed, folder, served, command):
    address = f"127.0.0.1:{served['50050']}"
    said = run(installed / "flyspec", *command, "--address", address, cwd=folder, given=QUESTION)
    assert "22" in said


def test_fresh_word_problems_need_no_checkout(installed, folder, served):
    address = f"127.0.0.1:{served['50050']}"
    said = run(installed / "flyspec", "eval", "--address", address, "--problems", "2", "--json",
               "--rules", "exact", cwd=folder)  # fmt: skip
    assert json.loads(said)


def test_doctor(installed, folder):
    ports = [f"--{name}port=0" for name in ("", "http-", "admin-", "draft-", "verify-")]
    said = run(installed / "flyspec", "doctor", "--json", *ports, cwd=folder)
    found = json.loads(said)
    assert found["ok"], found
    assert {"target", "draft"} <= {line["subject"] for line in found["findings"]}


def test_page(served):
    """With the files that it names, which are package data."""
    root = f"http://127.0.0.1:{served['8000']}/"
    page = fetched(root)
    assert "<html" in page
    for name in re.findall(r'(?:src|href)="([^"#:]+)"', page):
        assert fetched(urllib.parse.urljoin(root, name)), name


def test_nothing_is_written_beside_the_code(installed, served):
    """So that site-packages may be read-only."""
    (site,) = installed.parent.glob("lib/python3*/site-packages")
    (record,) = site.glob("flyspec-*.dist-info/RECORD")
    with record.open() as lines:
        known = {row[0] for row in csv.reader(lines)}
    for top in ("flyspec", "draft_service", "verify_service", "orchestrator"):
        for path in (site / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(site)) in known


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()

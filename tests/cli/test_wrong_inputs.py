"""Wrong inputs are answered at once, as docs/wrong-inputs.md says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.wrong_inputs import CASES, LIMIT_S, WrongInput, folder, row, run
from flyspec.cli.service import ROOT

DOCUMENT = (ROOT / "docs" / "wrong-inputs.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Path, int]]:
    with folder() as made:
        yield made


def test_the_document_lists_every_case() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| ")][1:]
    assert [line.split(" | ")[0] for line in rows] == [f"| {case.what}" for case in CASES]
    assert len(CASES) >= 25


@pytest.mark.usefixtures("default_ports")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_a_wrong_input_is_answered_at_once(case: WrongInput, place: tuple[Path, int]) -> None:
    answer = run(case, *place)
    assert answer.code == 2, answer.message
    assert answer.cpu_s < LIMIT_S  # of its own process: other work on the machine adds little
    shown = row(case, answer)
    if "cuda" in case.command:  # the reason depends on what is installed
        reason = "--device cuda: .*; use --device cpu"
        assert re.search(reason, shown)
        assert re.search(reason, DOCUMENT)
    else:
        assert _without_time(shown) in map(_without_time, DOCUMENT.splitlines())


def _without_time(line: str) -> str:
    return line.rpartition(" | ")[0]

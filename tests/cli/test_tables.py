"""Tables fit 80 columns and a pipe; nothing in them is cut."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from flyspec.cli import drafters
from flyspec.tables import FittedTable, make_table, result_console
from flyspec.values.admin import (
    DrafterState,
    DrafterStats,
    DrafterStatus,
    ModelInfo,
    UpstreamStatus,
)
from tests.examples import examples

WORDS = st.text(st.sampled_from("abc-数"), min_size=1, max_size=12)
TEXTS = st.lists(WORDS, min_size=1, max_size=6).map(" ".join)
NUMBERS = st.floats(0, 1e9).map("{:,.2f}".format)


@st.composite
def tables(draw: st.DrawFn) -> FittedTable:
    """One or two columns of words that say what a row is about, then numbers and texts."""
    left = draw(st.integers(1, 2))
    kinds = [TEXTS] * left + draw(st.lists(st.sampled_from([NUMBERS, TEXTS]), max_size=12))
    rows = [[draw(kind) for kind in kinds] for _ in range(draw(st.integers(1, 4)))]
    return make_table([draw(TEXTS) for _ in kinds], rows, draw(st.none() | TEXTS), left)


def status(**known: object) -> DrafterStatus:
    model = ModelInfo(
        "/models/meta-llama/Llama-3.2-1B-Instruct", "", 128256, 131072, num_parameters=1_235_814_400
    )
    stats = DrafterStats(
        num_spec_steps=48123, num_draft_tokens=481230, num_accepted_draft_tokens=370544,
        num_emitted_tokens=418667, proposal_ns_total=48123 * 12_300_000, active_generations=17,
    )  # fmt: skip
    replicas = [
        UpstreamStatus(f"flyspec-draft-{n}.flyspec-draft.models:50051", True) for n in range(2)
    ]
    values = {
        "name": "llama-3.2-1b-canary", "state": DrafterState.CANARY, "share": 0.05,
        "kind": "multi_level", "model": model, "stats": stats, "replicas": replicas,
        "usable": True, "reason": "", "translated": True,
    }  # fmt: skip
    return DrafterStatus(**values | known)  # type: ignore[arg-type]


def drafters_table() -> FittedTable:
    here = status(
        name="prompt_lookup", kind="prompt_lookup", model=None, replicas=(), share=0.0,
        state=DrafterState.REGISTERED, stats=DrafterStats(), translated=False,
    )  # fmt: skip
    reason = "no answer from flyspec-draft-0.flyspec-draft.models:50051 in 2 s"
    return drafters.table_of_drafters([status(usable=False, reason=reason), here])


def check(table: FittedTable, width: int) -> None:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    shown = file.getvalue()
    assert max(map(cell_len, shown.split("\n"))) <= width
    assert "…" not in shown
    words = set(re.findall(r"\S+", shown))
    for word in " ".join(str(cell) for row in table.rows for cell in row).split():
        assert word in words or cell_len(word) > 20, word


@settings(max_examples=examples(50))
@given(tables())
def test_any_table_fits_and_nothing_is_cut(table: FittedTable) -> None:
    check(table, 80)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_drafters_fits(width: int) -> None:
    check(drafters_table(), width)


def test_a_pipe_gets_a_line_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    wide: Sequence[FittedTable] = (drafters_table(), make_table("ab", [["x" * 30, "y" * 70]], "c"))
    for table in wide:
        file = io.StringIO()
        with contextlib.redirect_stdout(file):
            result_console().print(table)
        assert len(file.getvalue().splitlines()) == len(table.rows) + 2 + bool(table.title)

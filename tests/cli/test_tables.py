"""Tables fit 80 columns, 120 columns, and a pipe; nothing in them is cut."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
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
from flyspec_lab import compare, curves, statistics
from flyspec_lab import tables as lab_tables
from flyspec_lab.bench import report

RULES = ["exact", "fly", "fuzzy-reference, K = 15"]


def filled(kind: Any, **known: Any) -> Any:
    """Make a value of a type, a dataclass included, with numbers that take much room."""
    origin, inner = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        values = {
            f.name: known[f.name] if f.name in known else filled(hints[f.name])
            for f in dataclasses.fields(kind)
        }
        return kind(**values)  # type: ignore[operator]
    if origin in (typing.Union, types.UnionType):
        return filled(next(one for one in inner if one is not type(None)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if origin is typing.Literal:
        return inner[0]
    if origin in (dict, Mapping):
        return {}
    if origin in (tuple, list, Sequence):
        return ()
    return {int: 1234, float: 12.345, str: "some words", bool: True}[kind]


def many(kind: Any, key: str, names: Sequence[str], **known: Any) -> list[Any]:
    return [filled(kind, **{key: name}, **known) for name in names]


def speed() -> list[FittedTable]:
    ratio = report.Ratio(12.34, 10.11, 13.56, 9.87, 3)
    modes = many(
        report.ModeReport, "mode", [report.PLAIN, *RULES],
        ratios={"plain": ratio, "transformers": ratio}, loose_share=0.0123, bound_share=0.91,
        chosen=("fly, K = 4", "fly, K = 8", "fly, K = 15"),
    )  # fmt: skip
    return report.speed_tables("humaneval/HumanEval.jsonl.gz", modes, ["transformers"])


def drafter(**known: Any) -> DrafterStatus:
    model = ModelInfo(
        "/models/meta-llama/Llama-3.2-1B-Instruct", "", 128256, 131072, num_parameters=1_235_814_400
    )
    stats = DrafterStats(
        num_spec_steps=48123, num_draft_tokens=481230, num_accepted_draft_tokens=370544,
        num_emitted_tokens=418667, proposal_ns_total=48123 * 12_300_000, active_generations=17,
    )  # fmt: skip
    replicas = [
        filled(UpstreamStatus, address=f"flyspec-draft-{n}.flyspec-draft.models:50051")
        for n in range(2)
    ]
    values = {
        "name": "llama-3.2-1b-canary", "state": DrafterState.CANARY, "share": 0.05,
        "kind": "multi_level", "model": model, "stats": stats, "replicas": replicas,
        "usable": True, "reason": "", "translated": True,
    }  # fmt: skip
    return DrafterStatus(**values | known)  # type: ignore[arg-type]


def drafters_table() -> list[FittedTable]:
    here = drafter(
        name="prompt_lookup", kind="prompt_lookup", model=None, replicas=(), share=0.0,
        state=DrafterState.REGISTERED, stats=DrafterStats(), translated=False,
    )  # fmt: skip
    broken = drafter(
        usable=False, reason="no answer from flyspec-draft-0.flyspec-draft.models:50051 in 2 s"
    )
    return [drafters.table_of_drafters([broken, here])]


def evaluation() -> list[FittedTable]:
    share = statistics.Interval(0.0123, -0.0123, 0.0345)
    flips = filled(statistics.Flips, harmful_rate_upper=0.0123, mcnemar_p=0.123)
    recovery = statistics.Interval(1.012, 0.987, 1.023)
    known: dict[str, Any] = {
        "accuracy": recovery, "recovery": recovery, "loose_share": 0.0456,
        "mean_accepted_tokens": 11.23, "loose_gap_nats_90": 0.34,
        "speed_ratio": statistics.Interval(1.31, 1.28, 1.35),
        "samples": 12345, "flips": flips,
        "versus": filled(compare.Versus, score_difference=share, loose_share_difference=share,
                         flips=flips),
    }  # fmt: skip
    reports = many(compare.ConditionReport, "condition", RULES, **known)
    at = curves.AtEqualSpeed(11.23, 0.0123, -0.0123, 0.0345)
    equal = many(curves.EqualCost, "condition", RULES[1:], acceptance=at, speed=at, of="random")
    leads = many(curves.AllocationLead, "condition", RULES[1:], at=at)
    return list(
        lab_tables.task_section("gsm8k/test.jsonl", reports, equal, leads, times=True).tables
    )


def others() -> list[FittedTable]:
    batches = [filled(report.BatchReport, group="humaneval/HumanEval.jsonl.gz", mode=rule, batch=b)
               for rule in RULES for b in (2, 4, 8, 16, 32)]  # fmt: skip
    return [
        report.batch_table(batches),
        make_table(["a", "b"], [["x" * 30, "y" * 70]]),
    ]


MAKERS: list[Callable[[], list[FittedTable]]] = [
    drafters_table, evaluation, speed, others
]  # fmt: skip
GOLDEN = Path(__file__).with_name("tables-80.txt")


def text(width: int, shown: Sequence[FittedTable]) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width)
    for table in shown:
        console.print(table)
        console.print()
    return "\n".join(map(str.rstrip, file.getvalue().split("\n")))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("make", MAKERS)
def test_tables_fit_and_nothing_is_cut(make: Callable[[], list[FittedTable]], width: int) -> None:
    for table in make():
        shown = text(width, [table])
        assert max(map(cell_len, shown.split("\n"))) <= width
        assert "…" not in shown
        words = set(re.findall(r"\S+", shown))
        for row in table.rows:
            for cell in filter(lambda c: isinstance(c, str), row):
                for word in cell.split():  # type: ignore[union-attr]
                    assert word in words or len(word) > 20, word


@pytest.mark.parametrize("make", MAKERS)
def test_a_pipe_gets_a_line_per_row(
    make: Callable[[], list[FittedTable]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for table in make():
        file = io.StringIO()
        with contextlib.redirect_stdout(file):
            result_console().print(table)
        lines = file.getvalue().splitlines()
        assert len(lines) == len(table.rows) + 2 + bool(table.title)


def test_tables_at_80_columns_look_as_they_did() -> None:
    shown = "\n".join(text(80, make()) for make in MAKERS)
    if os.environ.get("RENEW_GOLDEN"):
        GOLDEN.write_text(shown)
    assert shown == GOLDEN.read_text(), "if that is as it should be: RENEW_GOLDEN=1 pytest ..."

"""Tables of `flyspec bench device` for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flyspec.tables import Column, FittedTable, record_table
from flyspec_lab.bench.device.report import BoundedCost, DeviceReport

MODE_NAMES = {
    "eager": "eager",
    "captured": "captured",
    "compiled": "captured, compiled",
}
_CELL: tuple[Column, ...] = (
    ("mode", lambda c: MODE_NAMES[c.mode]),
    ("batch", "{.batch}"),
    ("tokens", "{.tokens}"),
    ("context", "{.context:,}"),
)
_TIMES: tuple[Column, ...] = (
    ("ms", "{.step_ms:.3f}"),
    ("slowest", "{.slowest_ms:.3f}"),
    ("until answered", "{.answer_ms:.3f}"),
    ("bound", "{.bound_ms:.3f}"),
    ("x bound", "{.ratio:.2f}"),
)
_DRAFT: tuple[Column, ...] = (("ms/token", "{.token_ms:.3f}"), ("waits", "{.waits:d}"))
_JUDGING: tuple[Column, ...] = (
    ("rule", "{.rule}"),
    ("temperature", "{.temperature:g}"),
    ("K", "{.num_speculative_tokens}"),
    ("rounds", "{.rounds}"),
    ("ms", "{.answer_ms:.3f}"),
    ("slowest", "{.slowest_ms:.3f}"),
    ("launches", "{.launches:d}"),
    ("waits", "{.waits:d}"),
)
NOTES = (
    "ms: median of steps that follow each other; until answered: of one that the host waits for; "
    "bound: reading the weights, and the cache of all sequences, once at the copy's bandwidth; "
    "waits: times that the host waits for the device\n"
    "eager: steps in their own shape; captured: of fixed shapes, as graphs on CUDA"
)


def device_shown(report: DeviceReport) -> list[Any]:
    """Return everything to show, what failed last."""
    shown: list[Any] = [device_summary(report)]
    if report.steps:
        shown.append(_sorted_table((*_CELL, *_TIMES), report.steps, f"steps of {report.target}"))
    if report.drafts:
        shown.append(_sorted_table(
            (*_CELL, *_TIMES, *_DRAFT), report.drafts, f"proposals of {report.draft}"
        ))  # fmt: skip
    if report.judging:
        title = f"judging rounds together, vocabulary of {report.vocab_size:,}"
        shown.append(record_table(_JUDGING, report.judging, title, keys=4))
    return [*shown, *(f"not measured: {what}: {why}" for what, why in report.failures.items())]


def device_summary(report: DeviceReport) -> str:
    name = report.machine["accelerator"] or report.machine["processor"]
    return (
        f"{name}: a copy of {report.copied_bytes / 1e9:.2g} GB moves "
        f"{report.bandwidth / 1e9:,.0f} GB/s; {report.target} in {report.dtype}, "
        f"{report.target_parameters / 1e6:,.0f} M parameters, {report.attention} attention over "
        f"blocks of {report.block_size}; medians of {report.repeats} runs"
    )


def _sorted_table(
    columns: tuple[Column, ...], costs: Iterable[BoundedCost], title: str
) -> FittedTable:
    """With the modes of a kind of step next to each other."""
    ordered = sorted(costs, key=lambda c: (c.context, c.batch, c.tokens))
    return record_table(columns, ordered, title, keys=len(_CELL))

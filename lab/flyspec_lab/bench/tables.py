"""Reports of `flyspec bench` as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from flyspec.tables import Column, FittedTable, cell, make_table, record_table
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.report import LONG_PROMPT, BatchReport, ModeReport


def tokens_per_second(rate: float) -> str:
    """Return a rate with decimals where they matter."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


_SPEED: tuple[Column, ...] = (
    ("mode", "{.mode}"),
    ("tok/s", lambda r: tokens_per_second(r.tokens_per_second)),
    ("x plain", "{.ratios[plain].median:.2f}"),
    ("95 %", "{0.ratios[plain].low:.2f}-{0.ratios[plain].high:.2f}"),
    ("worst", "{.ratios[plain].worst:.2f}"),
    ("TTFT", "{.first_token_ms:.1f} ms"),
    ("tok/round", "{.mean_accepted_tokens:.2f}"),
    ("bound", "{.bound:.2f}"),
    ("reached", "{.bound_share:.0%}"),
    ("same", lambda r: "-" if r.same_as_plain is None else f"{r.same_as_plain}/{r.prompts}"),
)
SPEED_NOTES = (
    "x plain: rate relative to plain decoding (K = 0, same services), median over prompts with "
    "bootstrap interval; worst: of the slowest prompt; TTFT: time to first token; bound: x plain "
    "if only the target took time; same: texts equal to plain decoding's; against others: rate "
    "relative to theirs, with the interval's lower end"
)
_ROUNDS: tuple[Column, ...] = (
    ("mode", "{.mode}"),
    ("accepted", "{.mean_acceptance_length:.2f}"),
    ("loose", "{.loose_share:.1%}"),
    ("verify", "{.verify_step_ms:.2f} ms"),
    ("draft", "{.draft_step_ms:.2f} ms"),
    ("judge", "{.judge_ms:.2f} ms"),
    ("overhead", "{.round_overhead_p50_ms:.2f} ms"),
    ("share", "{.overhead_share:.0%}"),
    ("in turn", "{.bound_in_turn:.2f}"),
    ("B/round", "{.bytes_per_round:,.0f}"),
    ("x TTFT", "{.first_token_ratio:.2f}"),
    ("long", "{.first_token_long_ms:.1f} ms"),
    ("x long", "{.first_token_long_ratio:.2f}"),
    ("chosen", lambda r: ", ".join(
        f"{number} {name.rpartition(', ')[2]}" for name, number in Counter(r.chosen).most_common()
    )),
)  # fmt: skip
ROUNDS_NOTES = (
    "accepted: 1 + accepted drafts per round with drafts; verify, judge: the target's and the "
    "rule's time per round; draft: the draft model's per token; overhead: time per round outside "
    "of them, and its share; in turn: the bound if target and draft model take turns; B/round: "
    "bytes of a round's messages; x TTFT: time to first token relative to plain decoding; long: "
    f"the same for prompts of over {LONG_PROMPT} tokens"
)


def speed_tables(
    name: str, reports: Sequence[ModeReport], others: Sequence[str] = ()
) -> list[FittedTable]:
    """Return a group's tables: all modes against plain decoding, rounds, ours against others."""
    ours = [r for r in reports if r.mode not in others]
    shown = [record_table(_SPEED, reports, f"{name}, {reports[0].prompts} prompts")]
    if any(r.draft_share or r.chosen for r in ours):
        columns = [c for c in _ROUNDS if any(cell(c[1], r) not in ("", "-") for r in ours)]
        shown.append(record_table(columns, [r for r in ours if r.mode != PLAIN], "rounds"))
    if others:
        columns = [("mode", "{.mode}"), *((other, _over(other)) for other in others)]
        shown.append(record_table(columns, ours, "against others"))
    return shown


def worst_prompts(
    reports: Sequence[ModeReport], where: Sequence[str], others: Sequence[str] = ()
) -> str:
    """Name the slowest prompt of each of flyspec's modes against plain decoding."""
    return "; ".join(
        f"{r.mode} {r.ratios[PLAIN].worst:.2f} at {where[r.ratios[PLAIN].worst_prompt]}"
        for r in reports
        if r.mode != PLAIN and r.mode not in others and not r.chosen
    )


def batch_table(reports: Sequence[BatchReport]) -> FittedTable:
    """Return a table of concurrent requests: tokens per second, and relative to plain decoding."""
    batches = sorted({r.batch for r in reports})
    rows = []
    for group, mode in dict.fromkeys((r.group, r.mode) for r in reports):
        of = {r.batch: r for r in reports if (r.group, r.mode) == (group, mode)}
        rows.append([group, mode, *(
            f"{tokens_per_second(of[b].tokens_per_second)} ({of[b].ratio_to_plain:.2f})"
            for b in batches
        )])  # fmt: skip
    columns = ["group", "mode", *map(str, batches)]
    return make_table(columns, rows, "tokens/s (x plain) by concurrent requests", left=2)


def _over(other: str) -> Callable[[ModeReport], str]:
    return lambda r: f"{r.ratios[other].median:.2f} ({r.ratios[other].low:.2f})"

"""The timeline of a round as a chart for a terminal."""

from __future__ import annotations

from rich.bar import Bar

from flyspec.tables import FittedTable, make_table
from flyspec_lab.bench.timeline import PARTS, WIRE, TimelineReport

_SLIVER = 1 / 300
"""Share of the round that a bar takes at least."""
TIMELINE_NOTES = (
    "Medians of each part, which add up to about the median round. hops: a round outside both "
    "models and the rule, without tracing; echoes: two bare gRPC round trips of as many bytes "
    "outside work of equal length, in the same run; nothing decided: the same with flyspec's "
    "messages, values, threads and time limits; text: from a round's end until the client has its "
    "tokens, during the next round."
)


def timeline_table(report: TimelineReport) -> FittedTable:
    """Return a row per part, in order, with a bar at the part's place in the round."""
    total = sum(report.parts.values()) or 1.0
    rows, begin = [], 0.0
    for part in PARTS:
        took = report.parts[part.name]
        where = "" if part.where == WIRE else part.where
        bar = Bar(total, begin, begin + max(took, _SLIVER * total))
        rows.append((where, part.what, bar, f"{took:.3f}", f"{took / total:.1%}"))
        begin += took
    title = (
        f"a round of {report.num_draft_tokens:g} drafts, {report.round_ms:.2f} ms: "
        f"median of {report.rounds} rounds"
    )
    return make_table(("process", "what", "when", "ms", "share"), rows, title, left=3)


def timeline_summary(report: TimelineReport) -> str:
    text = f", text {report.text_ms:.2f} ms" if report.text_ms is not None else ""
    return (
        f"hops {report.hops_ms:.2f} ms (traced {report.traced_hops_ms:.2f}), "
        f"echoes {report.echoes_ms:.2f} ms: {report.hops_over_echoes:.2f} times; "
        f"nothing decided {report.exchanges_ms:.2f} ms: {report.exchanges_over_echoes:.2f} times; "
        "loop around a proposal "
        f"{report.proposal_loop_ms:.2f} ms{text}"
    )

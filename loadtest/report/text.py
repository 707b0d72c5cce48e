"""How figures are written, in the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

COLUMNS = (
    "phase", "load", "sent", "done", "refused", "given up", "failed", "requests/s", "tokens/s",
    "tokens/round", "TTFT p50", "p99", "TPOT p50", "p99", "end to end p50", "p99", "goodput",
)  # fmt: skip


OPTIONAL = frozenset(("refused", "given up", "tokens/round", "goodput"))
"""Left out where no row has anything in them."""


def table(document: dict[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Columns and rows: a row a phase, and where requests ask in several ways a row a way."""
    rows = _rows(document)
    kept = [
        i for i, column in enumerate(COLUMNS)
        if column not in OPTIONAL or any(row[i] not in ("0", "–") for row in rows)
    ]  # fmt: skip
    return [COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _rows(document: dict[str, Any]) -> list[Sequence[str]]:
    found = [_row(p["name"], p["load"], p) for p in document["phases"]]
    for phase in document["phases"]:
        if len(phase["by_variant"]) > 1 and phase["judged"]:
            found += [_row(f"· {name}", "", v) for name, v in phase["by_variant"].items()]
    return found


def _row(name: str, load: str, figures: dict[str, Any]) -> Sequence[str]:
    f = figures
    return (
        name, load, f"{f['sent']:,}", f"{f['complete']:,}", f"{f['refused']:,}",
        f"{f['cancelled']:,}", f"{f['failed']:,}", number(f["requests_per_s"]),
        number(f["tokens_per_s"]), number(f["tokens_per_round"]),
        *(duration(f[f"{metric}_ms"][p]) for metric in ("ttft", "tpot", "e2e")
          for p in ("p50", "p99")),
        "–" if f["goodput"] is None else f"{f['goodput']:.1%}",
    )  # fmt: skip


def number(value: float | None) -> str:
    """Three digits or so; a dash for nothing."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def duration(ms: float | None) -> str:
    """Milliseconds, or seconds from a second on."""
    if ms is None or not math.isfinite(ms):
        return "–"
    if ms >= 1000:
        return f"{ms / 1000:.2f} s" if ms < 100_000 else f"{ms / 1000:.0f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms"


def highlights(document: dict[str, Any]) -> list[str]:
    """What the scenario found, in sentences."""
    found, lines = document["found"], []
    for series, curve in (found.get("curves") or {}).items():
        if "knee" in curve:
            knee = (
                f"knee at {curve['knee_load']}, {number(curve['knee_tokens_per_s'])} "
                f"tokens/s with {duration(curve['knee_e2e_p50_ms'])} end to end (p50), "
                f"{duration(curve['knee_e2e_p99_ms'])} (p99)"
            )
        else:
            knee = f"knee not reached by {curve['last_load']}, ramp further"
        lines.append(f"{series}: {knee}; at most {number(curve['most_tokens_per_s'])} tokens/s")
    for what in ("memory", "latency"):
        if growth := found.get(f"{what}_growth"):
            said = ", ".join(f"{name} {share:+.1%}" for name, share in growth.items())
            lines.append(f"growth of {what}, last third against middle third: {said}")
    if "normal_again_after_s" in found:
        after = found["normal_again_after_s"]
        lines.append(
            "no request after the burst had a normal latency" if after is None else
            f"a request sent {after:.1f} s after the burst had a normal latency again (p99 of "
            f"before: {duration(found['normal_e2e_ms'])})"
        )  # fmt: skip
    if turns := found.get("turns"):
        moves = sum(p["moves"] for p in document["phases"])
        pause = max((p["longest_pause_ms"] for p in document["phases"]), default=0.0)
        lines.append(
            f"{len(turns)} swaps moved {moves} generations in mid-stream, the longest pause "
            f"{duration(pause)}; to activate took {duration(max(t['activate_ms'] for t in turns))}"
            f" and to drain {duration(max(t['drain_ms'] for t in turns))} at most"
        )
    return lines

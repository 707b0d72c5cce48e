"""The report of a load test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.measures import duration, number
from loadtest.report.base import LabReport, Plot, Table
from loadtest.report.figures import plots

COLUMNS = (
    "phase", "load", "sent", "done", "refused", "given up", "failed", "requests/s", "tokens/s",
    "tokens/round", "TTFT p50", "p99", "TPOT p50", "p99", "end to end p50", "p99", "goodput",
)  # fmt: skip
OPTIONAL = frozenset(("refused", "given up", "tokens/round", "goodput"))
"""Left out if no row has anything in them."""


class LoadReport(LabReport):
    """A load test."""

    words = (
        ("TTFT", "time to first token: from when a request was due to its first tokens"),
        ("TPOT", "time per output token: from the first tokens to the end, divided by the tokens "
                 "minus one; a mean per request, since a message has several"),
        ("end to end", "from when a request was due to its end"),
        ("done", "completed; only these have times"),
        ("refused", "the server had no room and said when to retry; not a failure"),
        ("given up", "cancelled by its client on purpose"),
        ("failed", "every other request that did not complete"),
        ("requests/s, tokens/s", "of completed requests, each counted for the share of its time "
                                 "within the phase, excluding the phase's first tenth"),
        ("tokens/round", "output tokens per forward pass of the target"),
        ("goodput", "share of requests, excluding those given up, that completed within the "
                    "latency goals"),
    )  # fmt: skip

    @property
    def title(self) -> str:
        return f"flyspec load test: {self.document['scenario']}"

    @property
    def about(self) -> Sequence[str]:
        document, server = self.document, self.document["server"]
        facts = ", ".join(server[name] for name in ("dtype", "device") if name in server)
        return (
            document["about"],
            f"{document['begun']} · {document['seconds']:.0f} s · {server['target']}"
            f"{facts and f' ({facts})'} over {document['options'].get('protocol', 'grpc')}",
        )

    def tables(self) -> Sequence[Table]:
        rows = _rows(self.document)
        kept = [
            i for i, column in enumerate(COLUMNS)
            if column not in OPTIONAL or any(row[i] not in ("0", "–") for row in rows)
        ]  # fmt: skip
        phases = Table(
            "Phases", [COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows], left=2
        )
        own = (
            Table(name.capitalize(), [key.replace("_", " ") for key in records[0]],
                  [[_cell(v) for v in record.values()] for record in records])
            for name, records in self.document["found"].items()
            if isinstance(records, list) and records
        )  # fmt: skip
        return [phases, *own]

    def lines(self) -> Sequence[str]:
        lines: Sequence[str] = self.document["lines"]
        return lines

    def plots(self) -> Sequence[Plot]:
        return plots(self.document)


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


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

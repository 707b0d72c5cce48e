"""Reports of load tests; `python -m loadtest.report FILE` makes one again.

A report is made from its document alone, which `--output` writes.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.tables import FittedTable, make_table
from flyspec_lab.drawing import COLORS, GREY
from flyspec_lab.report import PageResults, Plot, Report, Section, markdown
from loadtest.goals import Check, checked
from loadtest.measures import duration, knee, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Document = dict[str, Any]
VERSION, DIGITS = 2, 5
COLUMNS = (
    "phase", "load", "sent", "done", "refused", "given up", "failed", "requests/s", "tokens/s",
    "tokens/round", "TTFT p50", "p99", "TPOT p50", "p99", "end to end p50", "p99", "goodput",
)  # fmt: skip
OPTIONAL = frozenset(("refused", "given up", "tokens/round", "goodput"))
"""Columns that are left out if no row has anything in them."""
NOTES = (
    "TTFT: from when a request was due to its first tokens; TPOT: from there to its end, divided "
    "by the tokens minus one; done: completed, only these have times; refused: the server had no "
    "room and said when to retry; given up: cancelled by its client on purpose; requests/s and "
    "tokens/s: of completed requests, each counted for the share of its time within the phase, "
    "excluding the phase's first tenth; tokens/round: output tokens per forward pass of the "
    "target; goodput: share of requests, excluding those given up, within the latency goals."
)
OUTCOMES = ("complete", "cancelled", "refused", "failed")
MOST_LABELS = 14


def short(value: Any) -> Any:
    """Shorten numbers to `DIGITS`, since measurements have no more; NaN and infinity are None."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        if value == 0 or abs(value) >= 10**DIGITS:
            return round(value)
        return round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    return [short(v) for v in value] if isinstance(value, list | tuple) else value


def load_report(document: Document) -> Report:
    """Return the report of a load test; its main plot is the scenario's."""
    document = short(document)
    server = document["server"]
    facts = ", ".join(server[name] for name in ("dtype", "device") if name in server)
    about = (
        f"{document['about']}\n{document['begun']} · {document['seconds']:.0f} s · "
        f"{server['target']}{facts and f' ({facts})'} over "
        f"{document['options'].get('protocol', 'grpc')}"
    )
    found = Section("Phases", [*document["lines"], NOTES], tables(document), plots(document))
    warnings = [f"warning: {warning}" for warning in document["warnings"]]
    options = " ".join(f"{name}={value}" for name, value in document["options"].items())
    checks = [Check(**check) for check in document["checks"]]
    return replace(
        checked(checks, [found, *warnings], document),
        title=f"flyspec load test: {document['scenario']}",
        subtitle=about,
        facts={"options": options},
    )


def tables(document: Document) -> list[FittedTable]:
    """Return the phases, and the records that the scenario has of its own."""
    rows = [_row(p["name"], p["load"], p) for p in document["phases"]]
    for phase in document["phases"]:
        if len(phase["by_variant"]) > 1 and phase["judged"]:
            rows += [_row(f"· {name}", "", v) for name, v in phase["by_variant"].items()]
    kept = [
        i for i, column in enumerate(COLUMNS)
        if column not in OPTIONAL or any(row[i] not in ("0", "–") for row in rows)
    ]  # fmt: skip
    found = [make_table([COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows],
                        "phases", left=2)]  # fmt: skip
    for name, records in document["found"].items():
        if isinstance(records, list) and records:
            cells = [
                [number(v) if isinstance(v, float) else str(v) for v in record.values()]
                for record in records
            ]
            found.append(make_table([key.replace("_", " ") for key in records[0]], cells, name))
    return found


def _row(name: str, load: str, f: dict[str, Any]) -> list[str]:
    counts = (f"{f[key]:,}" for key in ("sent", "complete", "refused", "cancelled", "failed"))
    rates = (number(f[key]) for key in ("requests_per_s", "tokens_per_s", "tokens_per_round"))
    times = (duration(f[f"{metric}_ms"][p]) for metric in ("ttft", "tpot", "e2e")
             for p in ("p50", "p99"))  # fmt: skip
    return [name, load, *counts, *rates, *times,
            "–" if f["goodput"] is None else f"{f['goodput']:.1%}"]  # fmt: skip


# --- plots ------------------------------------------------------------------------------------


def plots(document: Document) -> list[Plot]:
    """Return the plots, the scenario's main one first."""
    return [*_curves(document), _over_time(document)]


def _curves(document: Document) -> list[Plot]:
    series: dict[str, list[dict[str, Any]]] = {}
    for phase in document["phases"]:
        if phase["series"] and phase["complete"]:
            series.setdefault(phase["series"], []).append(phase)

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for (name, phases), color in zip(series.items(), COLORS, strict=False):
            rates = [p["tokens_per_s"] for p in phases]
            p50, p99 = ([p["e2e_ms"][which] / 1e3 for p in phases] for which in ("p50", "p99"))
            left.plot(rates, p50, "o-", color=color, label=f"{name}, p50")
            left.plot(rates, p99, "^:", color=color, label=f"{name}, p99")
            at = knee([(p["tokens_per_s"], p["e2e_ms"]["mean"]) for p in phases])
            if at is not None:
                left.annotate("knee", (rates[at], p50[at]), xytext=(8, -11), color=color,
                              textcoords="offset points", fontsize=9)  # fmt: skip
            load = [p["users"] or p["offered_requests_per_s"] for p in phases]
            right.plot(load, rates, "o-", color=color, label=name)
        left.set(xlabel="tokens/s, all requests together", ylabel="end to end, s", yscale="log")
        right.set(xlabel="users, or requests/s", ylabel="tokens/s, all requests together")
        left.legend()
        right.legend()

    caption = (
        "Throughput and latency: every point is a step of load. Up to the knee, the step with the "
        "most throughput for its mean latency, more load brings more than it costs."
    )
    return [Plot("curves", caption, draw, (9.2, 3.8))] if series else []


def _over_time(document: Document) -> Plot:
    line, status = document["timeline"], document["status"]
    begins, width = line["begin_s"], line["width_s"]
    times = {
        which: [math.nan if ms is None else ms / 1e3 for ms in line[f"e2e_{which}_ms"]]
        for which in ("p50", "p99")
    }
    ends = {name: [count / width for count in line[name]] for name in OUTCOMES if any(line[name])}
    open_ = {name: (status["seconds"], status[name]) for name in ("active", "waiting")}
    if not status["seconds"]:  # as the generator sees it
        open_ = {"under way": (begins, line["under_way"])}
    memory = {name: (of["seconds"], of["mib"]) for name, of in document["memory"].items()}
    panels = {
        "end to end, s": {name: (begins, of) for name, of in times.items()},
        "requests/s": {name: (begins, of) for name, of in ends.items()},
        "generations": open_,
        **({"memory, MiB": memory} if memory else {}),
    }

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(panels), 1, sharex=True)
        for ax, (label, lines) in zip(axes, panels.items(), strict=True):
            for (name, points), color in zip(lines.items(), COLORS, strict=False):
                ax.plot(*points, color=color, label=name, linewidth=1.2, drawstyle="steps-post")
            ax.set(ylabel=label, ylim=(0, None))
            ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
            for phase in document["phases"][1:]:
                ax.axvline(phase["began_s"], color=GREY, linewidth=0.8)
            for event in document["events"]:
                ax.axvline(event["seconds"], color=GREY, linewidth=0.8, linestyle="--")
        for event in document["events"][:MOST_LABELS]:
            ax.annotate(event["text"], (event["seconds"], 0.04), rotation=90, fontsize=7,
                        xycoords=("data", "axes fraction"), ha="right", va="bottom")  # fmt: skip
        ax.set(xlabel="seconds since the test began", xlim=(0, document["seconds"]))

    caption = (
        f"Stretches of {width:g} s; latencies by when a request was due. Grey lines part phases, "
        "dashed ones mark what the operator did."
    )
    return Plot("over-time", caption, draw, (9.2, 0.7 + 1.75 * len(panels)))


# --- files ------------------------------------------------------------------------------------


def read(path: Path) -> Document:
    """Read a document from its file. Raises `ConfigError`."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(document, dict) or document.pop("version", None) != VERSION:
        raise ConfigError(f"{path}: is not a report of a load test of this version")
    document.pop("report", None)
    return {"version": VERSION, **document}


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write every request, one per line; compressed if the name ends in .gz."""
    data = "".join(f"{json.dumps(record)}\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@with_flags
def render(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Report that --output wrote.")],
    results: PageResults,
    as_markdown: Annotated[bool, Flag("Print the tables as Markdown.", name="--markdown")] = False,
) -> None:
    """Recreate a load test's report from its JSON."""
    results.check()
    report = load_report(read(file))
    if as_markdown:
        results.write(report)
        print(markdown(table for section in report.sections for table in section.tables))
    else:
        results.finish(report)


if __name__ == "__main__":
    run(single(render))

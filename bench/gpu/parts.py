"""The tables of docs/gpu.md, each from the reports that have something for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.documents import read_documents
from flyspec.tables import Column, cell, markdown
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.device.tables import MODE_NAMES

Document = Mapping[str, Any]

NOTHING = "not measured yet"
_FIELDS = {"bandwidth": "device", "groups": "speed", "modes": "pair"}
"""A field that only this kind of report has, in the order in which they are looked for."""


def read_reports(folder: Path) -> dict[str, list[Document]]:
    """Read the reports by kind, in the order of their file names; only those of a CUDA device.

    Raises `ConfigError` for a file that is no JSON.
    """
    found: dict[str, list[Document]] = {}
    for _, kind, document in read_documents(folder, _FIELDS):
        if kind and str(document.get("device", "")).startswith("cuda"):
            found.setdefault(kind, []).append(document)
    return found


def measured_parts(reports: Mapping[str, Sequence[Document]]) -> dict[str, str]:
    """Return every part that is measured, by the name of its marks."""
    parts = {
        "machine": _machine([d for of in reports.values() for d in of]),
        "worst": _worst(reports.get("device", ())),
        "steps": _costs(reports.get("device", ()), "steps", "target"),
        "drafting": _costs(reports.get("device", ()), "drafts", "draft", _PER_TOKEN),
        "judging": _judging(reports.get("device", ())),
        "speed": _speed(reports.get("speed", ())),
        "pairs": _pairs(reports.get("pair", ())),
        "failures": _failures(reports.get("device", ())),
    }
    return {name: part or NOTHING for name, part in parts.items()}


def _table(columns: Sequence[Column], records: Iterable[Mapping[str, Any]], left: int) -> str:
    """Return a Markdown table, or nothing without records."""
    rows = [[cell(form, record) for _, form in columns] for record in records]
    return markdown([heading for heading, _ in columns], rows, left) if rows else ""


def _machine(documents: Sequence[Document]) -> str:
    """The devices, drivers and versions, each set once, and the bandwidths."""
    lines = []
    for document in documents:
        m = document.get("machine")
        if m is None:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
        driver = f", driver {m['driver']}" if m.get("driver") else ""
        lines.append(f"{m['accelerator']}{driver}; {m['cores']} cores; {versions}.")
    lines += [
        f"A copy of {d['copied_bytes'] / 1e9:.3g} GB moved {d['bandwidth'] / 1e9:,.0f} GB/s, read "
        f"and written ({d['target']}'s run)."
        for d in documents
        if "bandwidth" in d
    ]
    return "\n".join(dict.fromkeys(lines))


_COST: tuple[Column, ...] = (
    ("model", "{0[model]}"),
    ("mode", lambda c: MODE_NAMES[c["mode"]]),
    ("batch", "{0[batch]}"),
    ("tokens", "{0[tokens]}"),
    ("context", "{0[context]:,}"),
    ("ms", "{0[step_ms]:.2f}"),
    ("slowest", "{0[slowest_ms]:.2f}"),
    ("until answered", "{0[answer_ms]:.2f}"),
    ("bound", "{0[bound_ms]:.2f}"),
    ("x bound", "{0[ratio]:.2f}"),
)
_PER_TOKEN: tuple[Column, ...] = (("ms/token", "{0[token_ms]:.3f}"), ("waits", "{0[waits]}"))


def _costs(
    documents: Sequence[Document], field: str, model: str, more: Sequence[Column] = ()
) -> str:
    records = [{**c, "model": d[model]} for d in documents for c in d[field]]
    records.sort(key=lambda c: (c["model"], c["context"], c["batch"], c["tokens"]))
    return _table([*_COST, *more], records, 2)


def _worst(documents: Sequence[Document]) -> str:
    """The case of each mode that is furthest above its bound, and the slowest judging."""
    lines = []
    for d in documents:
        for field, model in (("steps", "target"), ("drafts", "draft")):
            for mode in dict.fromkeys(c["mode"] for c in d[field]):
                c = max((c for c in d[field] if c["mode"] == mode), key=lambda c: c["ratio"])
                lines.append(
                    f"- {field} of {d[model]}, {MODE_NAMES[mode]}: {c['ratio']:.2f} x bound "
                    f"(batch {c['batch']}, {c['tokens']} tokens, context {c['context']:,})"
                )
        if d["judging"]:
            j = max(d["judging"], key=lambda j: j["answer_ms"])
            lines.append(
                f"- judging: {j['answer_ms']:.2f} ms ({j['rule']}, temperature "
                f"{j['temperature']:g}, {j['rounds']} rounds)"
            )
    return "\n".join(lines)


def _judging(documents: Sequence[Document]) -> str:
    columns: tuple[Column, ...] = (
        ("rule", "{0[rule]}"), ("temperature", "{0[temperature]:g}"), ("rounds", "{0[rounds]}"),
        ("ms", "{0[answer_ms]:.2f}"), ("slowest", "{0[slowest_ms]:.2f}"),
        ("launches", "{0[launches]}"), ("waits", "{0[waits]}"),
    )  # fmt: skip
    return _table(columns, [j for d in documents[:1] for j in d["judging"]], 1)


def _speed(documents: Sequence[Document]) -> str:
    plain_ratio: Callable[[Any], str] = lambda m: (  # noqa: E731
        f"{m['ratios'][PLAIN]['median']:.2f}" if PLAIN in m["ratios"] else "-"
    )
    slowest: Callable[[Any], str] = lambda m: (  # noqa: E731
        f"{m['ratios'][PLAIN]['worst']:.2f}" if PLAIN in m["ratios"] else "-"
    )
    columns: tuple[Column, ...] = (
        ("prompts", "{0[group]}"), ("mode", "{0[mode]}"),
        ("tokens/s", "{0[tokens_per_second]:,.0f}"), ("x plain", plain_ratio),
        ("slowest prompt", slowest), ("tokens/round", "{0[mean_accepted_tokens]:.2f}"),
    )  # fmt: skip
    records = [
        {**m, "group": group} for d in documents for group, of in d["groups"].items() for m in of
    ]
    return _table(columns, records, 2)


def _pairs(documents: Sequence[Document]) -> str:
    columns: tuple[Column, ...] = (
        ("target", "{0[target]}"), ("mode", "{0[mode]}"), ("K", "{0[num_speculative_tokens]}"),
        ("accepted", "{0[acceptance_rate]:.0%}"), ("tokens/s", "{0[tokens_per_second]:.1f}"),
        ("x plain", "{0[speedup]:.2f}"),
        ("slowest prompt", "{0[worst_speedup]:.2f} (#{0[worst_prompt]})"),
        ("verify, ms", "{0[verify_step_ms]:.2f}"), ("draft, ms", "{0[draft_step_ms]:.2f}"),
        ("bound", "{0[bound_in_turn]:.2f}"), ("judging, ms", "{0[judge_ms]:.2f}"),
    )  # fmt: skip
    return _table(columns, [{**d, **m} for d in documents for m in d["modes"]], 2)


def _failures(documents: Sequence[Document]) -> str:
    lines = [
        f"- {d['target']}: {what}: {why}" for d in documents for what, why in d["failures"].items()
    ]
    return "\n".join(lines) if lines or not documents else "Nothing."

"""Reports of `flyspec bench`, `bench pair` and `bench round`, and what several have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from bench.documents import read_documents
from flyspec.errors import ConfigError
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.modes import Sample
from flyspec_lab.bench.report import report

Document = Mapping[str, Any]

HINDSIGHT = "best fixed K"
_DEFAULT = ", K auto"
_KINDS = {"groups": "speed", "hops_over_echoes": "round", "conditions": "eval"}
"""A field that only this kind of report has. Other reports with `modes` are those of pairs."""


def read_reports(folder: Path) -> dict[str, list[Document]]:
    """Read reports by kind, in the order of their file names. Raises `ConfigError`.

    `piece@2.json` and so on are further runs of `piece.json`; together they make one report.
    """
    found: dict[str, list[Document]] = {}
    runs: dict[str, list[Document]] = {}
    for path, kind, document in read_documents(folder, _KINDS):
        if not kind and "modes" in document:
            kind = "pair"
        if not kind:
            continue
        document["file"] = path.name
        if kind == "speed":
            runs.setdefault(path.stem.partition("@")[0], []).append(document)
        else:
            found.setdefault(kind, []).append(document)
    if runs:
        found["speed"] = [_together(of) for of in runs.values()]
    if not found:
        raise ConfigError(f"{folder}: has no reports of `flyspec bench`; `make bench` writes them")
    return found


def _together(runs: Sequence[Document]) -> Document:
    """Combine the runs of one piece into a report of all their repeats."""
    first, *others = runs
    if not others:
        return first
    samples: list[Document] = []
    repeats = 0
    for run in runs:
        samples += [{**sample, "repeat": sample["repeat"] + repeats} for sample in run["samples"]]
        repeats += run["repeats"]
    modes = report([Sample(**sample) for sample in samples], first["others"])
    merged = {**first, "groups": modes, "repeats": repeats, "samples": samples}
    found: Document = to_jsonable_python(merged)
    return found


def groups(documents: Sequence[Document]) -> list[tuple[str, dict[str, Any]]]:
    """Return each group with its modes by name, from the reports with default settings.

    If several reports have a mode, the one with the most repeats counts. Reports that search the
    best K, or compare drafters or data types, have parts of their own.
    """
    found: dict[str, dict[str, Any]] = {g: {} for d in documents for g in d["groups"]}
    for document in sorted(documents, key=lambda d: int(d["repeats"])):
        modes_of = document["groups"]
        names = [m["mode"] for modes in modes_of.values() for m in modes]
        if len(document["drafters"]) > 1 or any(is_dtype(n) or HINDSIGHT in n for n in names):
            continue
        for group, modes in modes_of.items():
            for m in modes:
                name = m["mode"].removesuffix(_DEFAULT)
                before = found[group].get(name, {"ratios": {}})
                found[group][name] = {**m, "ratios": {**before["ratios"], **m["ratios"]}}
    return [(group, modes) for group, modes in found.items() if modes]


def is_dtype(mode: str) -> bool:
    """Return whether a mode is plain decoding in another data type."""
    return mode.startswith(f"{PLAIN}, ")


def others_of(documents: Sequence[Document]) -> list[str]:
    """Return the names of all modes that are not flyspec's."""
    return list(dict.fromkeys(name for d in documents for name in d.get("others", ())))

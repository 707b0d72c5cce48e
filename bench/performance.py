"""`python -m bench.performance`: docs/performance.md's tables and plots, from what was measured.

Reads the JSON reports of `flyspec bench`, `bench pair` and `bench round` in a folder, and writes
what stands between the lines `<!-- NAME -->` and `<!-- /NAME -->` of the document, and its plots.
A part whose reports are not there stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import performance_plots
from flyspec.bench.conditions import PLAIN
from flyspec.errors import ConfigError, FlyspecError
from flyspec.tables import markdown

Document = Mapping[str, Any]

_HINDSIGHT, _DEFAULT = "best fixed K", ", K auto"
_KINDS = {"groups": "speed", "hops_over_echoes": "round", "conditions": "eval"}
"""A field that only this kind of report has. Reports of pairs are those with `modes`."""


def read_reports(folder: Path) -> dict[str, list[Document]]:
    """Reports by kind, in the order of their files' names. Raises `ConfigError`."""
    found: dict[str, list[Document]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from None
        kind = next((k for field, k in _KINDS.items() if field in document), "")
        if not kind and "modes" in document:
            kind = "pair"
        if kind:
            found.setdefault(kind, []).append({**document, "file": path.name})
    if not found:
        raise ConfigError(f"{folder}: no reports of `flyspec bench` in it; `make bench` makes them")
    return found


def write_between(text: str, parts: Mapping[str, str]) -> str:
    """The text with what is between each part's two marks replaced. Raises `ConfigError`."""
    for name, part in parts.items():
        marks = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)"
        pieces = re.split(marks, text, flags=re.DOTALL)
        if len(pieces) == 4:
            text = f"{pieces[0]}{pieces[1]}\n{part}\n\n{pieces[2]}{pieces[3]}"
        else:
            raise ConfigError(f"the document must have <!-- {name} --> and <!-- /{name} --> once")
    return text


def parts_of(reports: Mapping[str, Sequence[Document]]) -> dict[str, str]:
    """Every part for which there is something, by the name of its marks."""
    made = {name: make(reports.get(kind, ())) for name, (kind, make) in _PARTS.items()}
    return {name: part for name, part in made.items() if part}


# --- parts ------------------------------------------------------------------------------------


def _machine(documents: Sequence[Document]) -> str:
    lines = []
    for document in documents[:1]:
        m = document["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
        target, draft = (
            f"{document[n]} thread(s)" if document[n] else "a thread for each core"
            for n in ("threads", "draft_threads")
        )
        lines = [
            f"{m['processor']}, {m['cores']} cores, {' '.join(m['instruction_sets'])}"
            + (f"; {m['accelerator']}" if m["accelerator"] else "") + f"; {versions}.",
            f"Target in {document['dtype']} on {document['device']}: {target}; "
            f"draft model: {draft}.",
        ]  # fmt: skip
    return "\n".join(lines)


def _commands(documents: Sequence[Document]) -> str:
    return "\n".join("    " + shlex.join(d["command"]) for d in documents)


def _groups(documents: Sequence[Document]) -> list[tuple[str, dict[str, Any]]]:
    """(group, its modes by name) of every report of the defaults.

    Of what several have measured, that of the most repeats is taken. Reports that look for the best
    K, or compare drafters or data types, have parts of their own.
    """
    found: dict[str, dict[str, Any]] = {g: {} for d in documents for g in d["groups"]}
    for document in sorted(documents, key=lambda d: int(d["repeats"])):
        modes_of = document["groups"]
        names = [m["mode"] for modes in modes_of.values() for m in modes]
        if len(document["drafters"]) > 1 or any(_is_dtype(n) or _HINDSIGHT in n for n in names):
            continue
        for group, modes in modes_of.items():
            for m in modes:
                name = m["mode"].removesuffix(_DEFAULT)
                before = found[group].get(name, {"ratios": {}})
                found[group][name] = {**m, "ratios": {**before["ratios"], **m["ratios"]}}
    return [(group, modes) for group, modes in found.items() if modes]


def _is_dtype(mode: str) -> bool:
    return mode.startswith(f"{PLAIN}, ")


def _rules(modes: Mapping[str, Any], others: Sequence[str]) -> list[str]:
    return [m for m in modes if m != PLAIN and m not in others]


def _others(documents: Sequence[Document]) -> list[str]:
    return list(dict.fromkeys(name for d in documents for name in d.get("others", ())))


def _ratio(ratio: Mapping[str, float] | None) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _against_plain(documents: Sequence[Document]) -> str:
    others, rows = _others(documents), []
    for group, modes in _groups(documents):
        for name in _rules(modes, others):
            m = modes[name]
            ratio = m["ratios"][PLAIN]
            rows.append([
                group, name, _ratio(ratio), f"{ratio['worst']:.2f}", str(m["prompts"]),
                f"{m['tokens_per_second']:,.0f}", _number(m["mean_accepted_tokens"], ".2f"),
                f"{m['loose_share']:.1%}",
            ])  # fmt: skip
    columns = ["prompts", "mode", "x plain (95 %)", "slowest prompt", "number", "tokens/s",
               "tokens a round", "loose"]  # fmt: skip
    return markdown(columns, rows, left=2) if rows else ""


def _against_others(documents: Sequence[Document]) -> str:
    others, rows = _others(documents), []
    for group, modes in _groups(documents):
        there = [name for name in others if name in modes]
        for name in [PLAIN, *_rules(modes, others)] if there else []:
            ratios = modes[name]["ratios"]
            rows.append([group, name, *(_ratio(ratios.get(other)) for other in others)])
    return markdown(["prompts", "mode", *(f"x {o}" for o in others)], rows, left=2) if rows else ""


def _first_token(documents: Sequence[Document]) -> str:
    others, rows = _others(documents), []
    for group, modes in _groups(documents):
        for name in [PLAIN, *_rules(modes, others), *(o for o in others if o in modes)]:
            m = modes[name]
            rows.append([
                group, name, _number(m["first_token_ms"], ".1f"),
                _number(m["first_token_ratio"], ".2f"),
                _number(m["first_token_long_ms"], ".1f"),
                _number(m["first_token_long_ratio"], ".2f"),
            ])  # fmt: skip
    columns = ["prompts", "mode", "ms", "x plain", "over 500 tokens, ms", "x plain"]
    return markdown(columns, rows, left=2) if rows else ""


def _bound(documents: Sequence[Document]) -> str:
    others, rows = _others(documents), []
    for group, modes in _groups(documents):
        for name in _rules(modes, others):
            m = modes[name]
            if m["draft_share"] is not None:
                rows.append([
                    group, name, _number(m["bound"], ".2f"), _number(m["bound_share"], ".0%"),
                    _number(m["target_share"], ".0%"), _number(m["draft_share"], ".0%"),
                    _number(m["round_overhead_p50_ms"], ".2f"),
                ])  # fmt: skip
    columns = ["prompts", "mode", "bound", "reached", "time in the target", "in the draft model",
               "overhead of a round, ms"]  # fmt: skip
    return markdown(columns, rows, left=2) if rows else ""


def _hindsight(documents: Sequence[Document]) -> str:
    rows = []
    for document in documents:
        for group, modes in document["groups"].items():
            of = {m["mode"]: m for m in modes}
            for name in (m for m in of if _HINDSIGHT in m):
                rule = name.partition(",")[0]
                auto = of.get(f"{rule}, K auto")
                chosen = of[name]["chosen"]
                ks = ", ".join(
                    f"{chosen.count(c)} {c.rpartition(', ')[2]}" for c in dict.fromkeys(chosen)
                )
                rows.append([group, rule, _ratio(auto and auto["ratios"][PLAIN]),
                             _ratio(of[name]["ratios"][PLAIN]), ks])  # fmt: skip
    columns = ["prompts", "rule", "K auto, x plain", "best fixed K a prompt, x plain", "chosen"]
    return markdown(columns, rows, left=2) if rows else ""


def _dtypes(documents: Sequence[Document]) -> str:
    rows = [
        [group, d["dtype"], m["mode"].rpartition(", ")[2], _ratio(m["ratios"][PLAIN])]
        for d in documents
        for group, modes in d["groups"].items()
        for m in modes if _is_dtype(m["mode"])
    ]  # fmt: skip
    columns = ["prompts", "here", "against", "x plain of the other"]
    return markdown(columns, rows, left=3) if rows else ""


def _drafters(documents: Sequence[Document]) -> str:
    rows = [
        [group, m["mode"], _ratio(m["ratios"][PLAIN]), f"{m['ratios'][PLAIN]['worst']:.2f}",
         _number(m["mean_accepted_tokens"], ".2f")]
        for d in documents if len(d["drafters"]) > 1
        for group, modes in d["groups"].items()
        for m in modes if any(m["mode"].endswith(f", {drafter}") for drafter in d["drafters"])
    ]  # fmt: skip
    columns = ["prompts", "rule, drafter", "x plain (95 %)", "slowest prompt", "tokens a round"]
    return markdown(columns, rows, left=2) if rows else ""


def _batches(documents: Sequence[Document]) -> str:
    cells = {(b["group"], b["mode"], b["batch"]): b for d in documents for b in d["batches"]}
    sizes = sorted({batch for _, _, batch in cells})
    rows = []
    for group, mode in dict.fromkeys(key[:2] for key in cells):
        row = [group, mode]
        for size in sizes:
            b = cells.get((group, mode, size))
            row.append(f"{b['tokens_per_second']:,.0f} ({b['ratio_to_plain']:.2f})" if b else "-")
        rows.append(row)
    return markdown(["prompts", "mode", *map(str, sizes)], rows, left=2) if rows else ""


def _setups(documents: Sequence[Document]) -> str:
    rows = []
    for document in documents:
        for found in document["calibrations"]:
            of = ", ".join(document["groups"])
            rows.append([found["peer"], of, found["setup"], str(len(found["tried"]))])
    columns = ["way of transformers'", "on", "fastest", "of so many tried"]
    return markdown(columns, rows, left=3) if rows else ""


def _pairs(documents: Sequence[Document]) -> str:
    rows = [
        [d["target"], m["mode"], str(d["num_speculative_tokens"]),
         _number(m["cost_ratio"], ".1f"), f"{m['tokens_per_round']:.1f}",
         f"{m['speedup']:.2f}", f"{m['bound']:.2f}", f"{m['share']:.0%}",
         f"{m['bytes_per_round']:,.0f}", f"{m['judge_ms']:.2f}"]
        for d in documents for m in d["modes"] if m["mode"] != PLAIN
    ]  # fmt: skip
    columns = ["target", "rule", "K", "verify / draft step", "tokens a round", "x plain", "bound",
               "reached", "bytes a round", "judging, ms"]  # fmt: skip
    return markdown(columns, rows, left=2) if rows else ""


def _rounds(documents: Sequence[Document]) -> str:
    rows = [
        [d["file"].removesuffix(".json"), d["rule"], f"{d['round_ms']:.2f}", f"{d['hops_ms']:.2f}",
         f"{d['echoes_ms']:.2f}", f"{d['hops_over_echoes']:.2f}", f"{d['proposal_loop_ms']:.2f}"]
        for d in documents
    ]  # fmt: skip
    columns = ["run", "rule", "a round, ms", "outside the models, ms", "two bare echoes, ms",
               "over the echoes", "around a proposal, ms"]  # fmt: skip
    return markdown(columns, rows, left=2) if rows else ""


_PARTS: dict[str, tuple[str, Callable[[Sequence[Document]], str]]] = {
    "machine": ("speed", _machine),
    "plain": ("speed", _against_plain),
    "others": ("speed", _against_others),
    "setups": ("speed", _setups),
    "first-token": ("speed", _first_token),
    "bound": ("speed", _bound),
    "hindsight": ("speed", _hindsight),
    "dtypes": ("speed", _dtypes),
    "drafters": ("speed", _drafters),
    "batches": ("speed", _batches),
    "commands": ("speed", _commands),
    "pairs": ("pair", _pairs),
    "rounds": ("round", _rounds),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the document and its plots; 1, and why, if they cannot be."""
    args = argparse.ArgumentParser(prog="bench.performance", description=__doc__)
    args.add_argument("reports", type=Path, nargs="?", default=Path("build/performance"))
    args.add_argument("--document", type=Path, default=Path("docs/performance.md"))
    given = args.parse_args(arguments)
    try:
        reports = read_reports(given.reports)
        text = write_between(given.document.read_text(), parts_of(reports))
        speed = reports.get("speed", ())
        images = given.document.parent / "images"
        images.mkdir(exist_ok=True)
        performance_plots.plot_groups(_groups(speed), _others(speed), images)
        performance_plots.plot_batches([b for d in speed for b in d["batches"]], images)
    except (FlyspecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    given.document.write_text(text)
    print(f"{given.document} and {images} are written")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The tables of docs/performance.md, each from the reports that have something for it."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.performance.reports import HINDSIGHT, Document, groups, is_dtype, others_of
from flyspec.tables import Column, cell, markdown
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.speed import AGAIN
from flyspec_lab.bench.summaries import grouped

Record = Mapping[str, Any]

_WORK = ("(plain decoding again)", "was not asked", "followed the text", "drafted rounds")


def parts_of(reports: Mapping[str, Sequence[Document]]) -> dict[str, str]:
    """Return every part for which there are reports, by the name of its marks."""
    speed = reports.get("speed", ())
    made = {"machine": _machine(speed[:1]), "commands": _commands(speed)}
    made["others"] = _against_others(speed)
    made["batches"] = _batches(speed)
    for name, table in _TABLES.items():
        made[name] = _table(table.columns, table.records(reports.get(table.kind, ())), table.left)
    return {name: part for name, part in made.items() if part}


def _machine(documents: Sequence[Document]) -> str:
    lines = []
    for document in documents:
        m = document["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
        target, draft = (
            f"{document[n]} thread(s)" if document[n] else "a thread for each core"
            for n in ("threads", "draft_threads")
        )
        lines += [
            f"{m['processor']}, {m['cores']} cores, {' '.join(m['instruction_sets'])}"
            + (f"; {m['accelerator']}" if m["accelerator"] else "") + f"; {versions}.",
            f"Target in {document['dtype']} on {document['device']}: {target}; "
            f"draft model: {draft}.",
        ]  # fmt: skip
    return "\n".join(lines)


def _commands(documents: Sequence[Document]) -> str:
    lines = "\n".join(shlex.join(d["command"]) for d in documents)
    return f"<!-- long: hours -->\n```sh\n{lines}\n```"


# --- tables -----------------------------------------------------------------------------------


def _table(columns: Sequence[Column], records: Iterable[Record], left: int = 2) -> str:
    """Return a Markdown table, or nothing without records."""
    rows = [[cell(form, record) for _, form in columns] for record in records]
    return markdown([heading for heading, _ in columns], rows, left) if rows else ""


def _ratio(ratio: Mapping[str, float] | None) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "-"


def _to(base: str) -> Callable[[Record], str]:
    """Return the form of a ratio to another mode."""
    return lambda m: _ratio(m["ratios"].get(base))


def _modes(documents: Sequence[Document], *also: str) -> list[Record]:
    """Return the results of flyspec's modes with drafts, and of those in `also`, by group."""
    others = others_of(documents)
    return [
        {**modes[name], "group": group, "mode": name}
        for group, modes in groups(documents)
        for name in [
            *(m for m in (PLAIN,) if m in also),
            *(m for m in modes if m != PLAIN and m not in others),
            *(m for m in others if m in modes and m in also),
        ]
    ]


def _every_mode(documents: Sequence[Document]) -> list[Record]:
    """Return the results of each group and mode of every report, special ones included."""
    return [
        {**m, "group": group, "document": d}
        for d in documents
        for group, modes in d["groups"].items()
        for m in modes
    ]


_PROMPTS: Column = ("prompts", "{0[group]}")
_MODE: Column = ("mode", "{0[mode]}")
_AGAINST_PLAIN: Column = ("x plain (95 %)", _to(PLAIN))
_SLOWEST: Column = ("slowest prompt", "{0[ratios][plain][worst]:.2f}")
_TOKENS_PER_ROUND: Column = ("tokens/round", "{0[mean_accepted_tokens]:.2f}")


def _against_others(documents: Sequence[Document]) -> str:
    others = others_of(documents)
    columns: list[Column] = [_PROMPTS, _MODE, *((f"x {o}", _to(o)) for o in others)]
    records = [m for m in _modes(documents, PLAIN) if not m["ratios"].keys().isdisjoint(others)]
    return _table(columns, records)


def _batches(documents: Sequence[Document]) -> str:
    cells = {(b["group"], b["mode"], b["batch"]): b for d in documents for b in d["batches"]}
    sizes = sorted({batch for _, _, batch in cells})
    rows = []
    for group, mode in dict.fromkeys(key[:2] for key in cells):
        of = [cells.get((group, mode, size)) for size in sizes]
        form = "{0[tokens_per_second]:,.0f} ({0[ratio_to_plain]:.2f})"
        rows.append([group, mode, *(form.format(b) if b else "-" for b in of)])
    return markdown(["prompts", "mode", *map(str, sizes)], rows, left=2) if rows else ""


def _asked(documents: Sequence[Document]) -> list[Record]:
    """Compute the cost of finding out whether drafts pay: requests by the drafter's work.

    From reports that measured plain decoding twice; each request relative to plain decoding in the
    same repeat.
    """
    ratios: list[tuple[str, float]] = []
    for document in documents:
        samples = document.get("samples", ())
        if any(sample["mode"] == AGAIN for sample in samples):
            plain = {_turn(s): s["seconds"] for s in samples if s["mode"] == PLAIN}
            ratios += [
                (_work(s), plain[_turn(s)] / s["seconds"]) for s in samples if s["mode"] != PLAIN
            ]
    by_work = grouped(ratios, lambda pair: pair[0])
    return [
        {"work": work, "number": len(of), "median": statistics.median(ratio for _, ratio in of)}
        for work in _WORK
        if (of := by_work.get(work))
    ]


def _turn(sample: Record) -> tuple[str, int, int]:
    return sample["group"], sample["prompt"], sample["repeat"]


def _work(sample: Record) -> str:
    if sample["mode"] == AGAIN:
        return _WORK[0]
    return _WORK[3] if sample["spec_steps"] else _WORK[2] if sample["draft_ns"] else _WORK[1]


def _hindsight(documents: Sequence[Document]) -> list[Record]:
    records: list[Record] = []
    for m in _every_mode(documents):
        if HINDSIGHT in m["mode"]:
            rule = m["mode"].partition(",")[0]
            same = {other["mode"]: other for other in m["document"]["groups"][m["group"]]}
            auto = same.get(f"{rule}, K auto", {}).get("ratios", {}).get(PLAIN)
            chosen = Counter(name.rpartition(", ")[2] for name in m["chosen"])
            ks = ", ".join(f"{number} {k}" for k, number in chosen.items())
            records.append({**m, "rule": rule, "auto": auto, "ks": ks})
    return records


class _Table(NamedTuple):
    """A table from the reports of a kind."""

    kind: str
    columns: Sequence[Column]
    records: Callable[[Sequence[Document]], Sequence[Record]]
    left: int = 2


_TABLES = {
    "plain": _Table("speed", (
        _PROMPTS, _MODE, _AGAINST_PLAIN, _SLOWEST, ("number", "{0[prompts]}"),
        ("tokens/s", "{0[tokens_per_second]:,.0f}"), _TOKENS_PER_ROUND,
        ("loose", "{0[loose_share]:.1%}"),
    ), _modes),
    "asked": _Table("speed", (
        ("the drafter", "{0[work]}"), ("requests", "{0[number]:,}"), ("x plain", "{0[median]:.3f}"),
    ), _asked, 1),
    "setups": _Table("speed", (
        ("mode of transformers", "{0[peer]}"), _PROMPTS, ("fastest setup", "{0[setup]}"),
        ("setups tried", lambda found: str(len(found["tried"]))),
    ), lambda documents: [
        {**found, "group": ", ".join(d["groups"])} for d in documents for found in d["calibrations"]
    ], 3),
    "first-token": _Table("speed", (
        _PROMPTS, _MODE, ("ms", "{0[first_token_ms]:.1f}"),
        ("x plain", "{0[first_token_ratio]:.2f}"),
        ("over 500 tokens, ms", "{0[first_token_long_ms]:.1f}"),
        ("x plain", "{0[first_token_long_ratio]:.2f}"),
    ), lambda documents: _modes(documents, PLAIN, *others_of(documents))),
    "bound": _Table("speed", (
        _PROMPTS, _MODE, ("bound", "{0[bound]:.2f}"), ("reached", "{0[bound_share]:.0%}"),
        ("time in the target", "{0[target_share]:.0%}"),
        ("in the draft model", "{0[draft_share]:.0%}"),
        ("overhead per round, ms", "{0[round_overhead_p50_ms]:.2f}"),
    ), lambda documents: [m for m in _modes(documents) if m["draft_share"] is not None]),
    "hindsight": _Table("speed", (
        _PROMPTS, ("rule", "{0[rule]}"), ("K auto, x plain", lambda m: _ratio(m["auto"])),
        ("best fixed K per prompt, x plain", _to(PLAIN)), ("chosen", "{0[ks]}"),
    ), _hindsight),
    "dtypes": _Table("speed", (
        _PROMPTS, ("here", "{0[document][dtype]}"),
        ("compared with", lambda m: m["mode"].rpartition(", ")[2]),
        ("x plain of the other", _to(PLAIN)),
    ), lambda documents: [m for m in _every_mode(documents) if is_dtype(m["mode"])], 3),
    "drafters": _Table("speed", (
        _PROMPTS, ("rule, drafter", "{0[mode]}"), _AGAINST_PLAIN, _SLOWEST, _TOKENS_PER_ROUND,
    ), lambda documents: [
        m for m in _every_mode([d for d in documents if len(d["drafters"]) > 1])
        if any(m["mode"].endswith(f", {drafter}") for drafter in m["document"]["drafters"])
    ]),
    "pairs": _Table("pair", (
        ("target", "{0[target]}"), ("rule", "{0[mode]}"), ("K", "{0[num_speculative_tokens]}"),
        ("verify / draft step", "{0[cost_ratio]:.1f}"),
        ("tokens/round", "{0[tokens_per_round]:.1f}"), ("x plain", "{0[speedup]:.2f}"),
        ("bound", "{0[bound]:.2f}"), ("reached", "{0[share]:.0%}"),
        ("bytes/round", "{0[bytes_per_round]:,.0f}"), ("judging, ms", "{0[judge_ms]:.2f}"),
    ), lambda documents: [{**d, **m} for d in documents for m in d["modes"] if m["mode"] != PLAIN]),
    "rounds": _Table("round", (
        ("run", lambda d: d["file"].removesuffix(".json")), ("rule", "{0[rule]}"),
        ("round, ms", "{0[round_ms]:.2f}"), ("outside the models, ms", "{0[hops_ms]:.2f}"),
        ("two bare echoes, ms", "{0[echoes_ms]:.2f}"),
        ("over the echoes", "{0[hops_over_echoes]:.2f}"),
        ("nothing decided, ms", "{0[exchanges_ms]:.2f}"),
        ("over the echoes", "{0[exchanges_over_echoes]:.2f}"),
        ("around a proposal, ms", "{0[proposal_loop_ms]:.2f}"),
    ), lambda documents: documents),
}  # fmt: skip

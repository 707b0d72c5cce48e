"""The tables of docs/performance.md, each from the reports that have something for it."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.performance.reports import HINDSIGHT, Document, groups, is_dtype, others_of
from flyspec.bench.conditions import PLAIN
from flyspec.bench.speed import AGAIN
from flyspec.tables import markdown

_WORK = ("(plain decoding again)", "was not asked", "followed the text", "drafted rounds")


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


def _rules(modes: Mapping[str, Any], others: Sequence[str]) -> list[str]:
    return [m for m in modes if m != PLAIN and m not in others]


def _ratio(ratio: Mapping[str, float] | None) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _against_plain(documents: Sequence[Document]) -> str:
    others, rows = others_of(documents), []
    for group, modes in groups(documents):
        for name in _rules(modes, others):
            m = modes[name]
            ratio = m["ratios"][PLAIN]
            rows.append([
                group, name, _ratio(ratio), f"{ratio['worst']:.2f}", str(m["prompts"]),
                f"{m['tokens_per_second']:,.0f}", _number(m["mean_accepted_tokens"], ".2f"),
                f"{m['loose_share']:.1%}",
            ])  # fmt: skip
    columns = ["prompts", "mode", "x plain (95 %)", "slowest prompt", "number", "tokens/s",
               "tokens/round", "loose"]  # fmt: skip
    return markdown(columns, rows, left=2) if rows else ""


def _against_others(documents: Sequence[Document]) -> str:
    others, rows = others_of(documents), []
    for group, modes in groups(documents):
        for name in [PLAIN, *_rules(modes, others)]:
            ratios = modes[name]["ratios"]
            if any(other in ratios for other in others):
                rows.append([group, name, *(_ratio(ratios.get(other)) for other in others)])
    return markdown(["prompts", "mode", *(f"x {o}" for o in others)], rows, left=2) if rows else ""


def _first_token(documents: Sequence[Document]) -> str:
    others, rows = others_of(documents), []
    for group, modes in groups(documents):
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
    others, rows = others_of(documents), []
    for group, modes in groups(documents):
        for name in _rules(modes, others):
            m = modes[name]
            if m["draft_share"] is not None:
                rows.append([
                    group, name, _number(m["bound"], ".2f"), _number(m["bound_share"], ".0%"),
                    _number(m["target_share"], ".0%"), _number(m["draft_share"], ".0%"),
                    _number(m["round_overhead_p50_ms"], ".2f"),
                ])  # fmt: skip
    columns = ["prompts", "mode", "bound", "reached", "time in the target", "in the draft model",
               "overhead per round, ms"]  # fmt: skip
    return markdown(columns, rows, left=2) if rows else ""


def _asked(documents: Sequence[Document]) -> str:
    """What it costs to find out whether drafts pay: requests by what the drafter had to do.

    Of reports that measured plain decoding twice; each request over the plain one of its repeat.
    """
    ratios: dict[str, list[float]] = {}
    for document in documents:
        samples = document.get("samples", ())
        if not any(sample["mode"] == AGAIN for sample in samples):
            continue
        plain = {_turn(s): s["seconds"] for s in samples if s["mode"] == PLAIN}
        for sample in samples:
            if sample["mode"] != PLAIN:
                ratios.setdefault(_work(sample), []).append(
                    plain[_turn(sample)] / sample["seconds"]
                )
    rows = [
        [work, f"{len(ratios[work]):,}", f"{statistics.median(ratios[work]):.3f}"]
        for work in _WORK if work in ratios
    ]  # fmt: skip
    return markdown(["the drafter", "requests", "x plain"], rows) if rows else ""


def _turn(sample: Mapping[str, Any]) -> tuple[str, int, int]:
    return sample["group"], sample["prompt"], sample["repeat"]


def _work(sample: Mapping[str, Any]) -> str:
    if sample["mode"] == AGAIN:
        return _WORK[0]
    return _WORK[3] if sample["spec_steps"] else _WORK[2] if sample["draft_ns"] else _WORK[1]


def _hindsight(documents: Sequence[Document]) -> str:
    rows = []
    for document in documents:
        for group, modes in document["groups"].items():
            of = {m["mode"]: m for m in modes}
            for name in (m for m in of if HINDSIGHT in m):
                rule = name.partition(",")[0]
                auto = of.get(f"{rule}, K auto")
                chosen = of[name]["chosen"]
                ks = ", ".join(
                    f"{chosen.count(c)} {c.rpartition(', ')[2]}" for c in dict.fromkeys(chosen)
                )
                rows.append([group, rule, _ratio(auto and auto["ratios"][PLAIN]),
                             _ratio(of[name]["ratios"][PLAIN]), ks])  # fmt: skip
    columns = ["prompts", "rule", "K auto, x plain", "best fixed K per prompt, x plain", "chosen"]
    return markdown(columns, rows, left=2) if rows else ""


def _dtypes(documents: Sequence[Document]) -> str:
    rows = [
        [group, d["dtype"], m["mode"].rpartition(", ")[2], _ratio(m["ratios"][PLAIN])]
        for d in documents
        for group, modes in d["groups"].items()
        for m in modes if is_dtype(m["mode"])
    ]  # fmt: skip
    columns = ["prompts", "here", "compared with", "x plain of the other"]
    return markdown(columns, rows, left=3) if rows else ""


def _drafters(documents: Sequence[Document]) -> str:
    rows = [
        [group, m["mode"], _ratio(m["ratios"][PLAIN]), f"{m['ratios'][PLAIN]['worst']:.2f}",
         _number(m["mean_accepted_tokens"], ".2f")]
        for d in documents if len(d["drafters"]) > 1
        for group, modes in d["groups"].items()
        for m in modes if any(m["mode"].endswith(f", {drafter}") for drafter in d["drafters"])
    ]  # fmt: skip
    columns = ["prompts", "rule, drafter", "x plain (95 %)", "slowest prompt", "tokens/round"]
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
    columns = ["mode of transformers", "prompts", "fastest setup", "setups tried"]
    return markdown(columns, rows, left=3) if rows else ""


def _pairs(documents: Sequence[Document]) -> str:
    rows = [
        [d["target"], m["mode"], str(d["num_speculative_tokens"]),
         _number(m["cost_ratio"], ".1f"), f"{m['tokens_per_round']:.1f}",
         f"{m['speedup']:.2f}", f"{m['bound']:.2f}", f"{m['share']:.0%}",
         f"{m['bytes_per_round']:,.0f}", f"{m['judge_ms']:.2f}"]
        for d in documents for m in d["modes"] if m["mode"] != PLAIN
    ]  # fmt: skip
    columns = ["target", "rule", "K", "verify / draft step", "tokens/round", "x plain", "bound",
               "reached", "bytes/round", "judging, ms"]  # fmt: skip
    return markdown(columns, rows, left=2) if rows else ""


def _rounds(documents: Sequence[Document]) -> str:
    rows = [
        [d["file"].removesuffix(".json"), d["rule"], f"{d['round_ms']:.2f}", f"{d['hops_ms']:.2f}",
         f"{d['echoes_ms']:.2f}", f"{d['hops_over_echoes']:.2f}",
         f"{d['exchanges_ms']:.2f}", f"{d['exchanges_over_echoes']:.2f}",
         f"{d['proposal_loop_ms']:.2f}"]
        for d in documents
    ]  # fmt: skip
    columns = ["run", "rule", "round, ms", "outside the models, ms", "two bare echoes, ms",
               "over the echoes", "nothing decided, ms", "over the echoes",
               "around a proposal, ms"]  # fmt: skip
    return markdown(columns, rows, left=2) if rows else ""


_PARTS: dict[str, tuple[str, Callable[[Sequence[Document]], str]]] = {
    "machine": ("speed", _machine),
    "plain": ("speed", _against_plain),
    "asked": ("speed", _asked),
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

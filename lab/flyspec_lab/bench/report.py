"""Statistics and tables of `flyspec bench`: ratios with intervals, the bound, hindsight.

A prompt's rate in a mode is its tokens per second, median over the repeats. Ratios to plain
decoding are taken within a repeat, whose modes ran one after the other at the same speed of the
machine; then their median per prompt, then over the prompts of a group. A ratio to other software,
which has repeats of its own, is the quotient of a prompt's two ratios to plain decoding. Its
interval is the 95 % percentile bootstrap interval over the prompts (10,000 resamples).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flyspec.tables import Column, FittedTable, cell, make_table, rate, record_table
from flyspec.values.generation import SpeculationMetrics
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.modes import Sample
from flyspec_lab.bench.speed import BatchSample
from flyspec_lab.statistics import grouped, median_interval, median_or_none


@dataclass(frozen=True)
class Ratio:
    """A median of ratios with its 95 % interval, and the lowest ratio, that of `worst_prompt`."""

    median: float
    low: float
    high: float
    worst: float
    worst_prompt: int


@dataclass(frozen=True)
class ModeReport:
    """A mode over a group of prompts. None: not measured, or undefined.

    `ratios` are rates over those of plain decoding and of software other than flyspec, by its mode;
    above 1 is faster. `decode_ratio` is the median ratio to plain decoding of the rates after the
    first token, `first_token_ms` is a median over the prompts. `mean_accepted_tokens` is
    tokens per round. `verify_step_ms` is the target's time per round, prompt included,
    `draft_step_ms` the draft model's per drafted token, `judge_ms` the rule's per round. `bound` is
    what the ratio to plain decoding would be if only the target took time: tokens per round times
    plain step over verify step, computed from the target's time per token; `bound_share` is the
    share of the bound reached.
    """

    mode: str
    prompts: int
    tokens_per_second: float
    ratios: dict[str, Ratio]
    decode_ratio: float | None
    first_token_ms: float | None
    mean_accepted_tokens: float | None
    mean_acceptance_length: float | None
    loose_share: float
    round_overhead_p50_ms: float | None
    verify_step_ms: float | None
    draft_step_ms: float | None
    judge_ms: float | None
    bound: float | None
    bound_share: float | None
    same_as_plain: int | None
    chosen: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchReport:
    """Concurrent requests, relative to plain decoding; the interval is over the repeats."""

    group: str
    batch: int
    mode: str
    tokens_per_second: float
    ratio_to_plain: float
    low: float
    high: float
    first_token_ms: float


def report(
    samples: Sequence[Sample],
    others: Sequence[str] = (),
    fixed: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, list[ModeReport]]:
    """Summarize each group's modes: plain, `others`, then the rest by first appearance.

    `others` are modes that are not flyspec's. `fixed` maps the name of a further mode to those from
    which it takes each prompt's fastest: chosen in hindsight, so no fixed choice can be faster.
    """
    order = [PLAIN, *others, *(sample.mode for sample in samples), *(fixed or {})]
    found = {}
    for group, of in grouped(samples, lambda s: s.group).items():
        every = [*of, *_with_hindsight(of, fixed or {})]
        modes = {name: _Mode(s) for name, s in grouped(every, lambda s: s.mode).items()}
        names = [name for name in dict.fromkeys(order) if name in modes]
        baselines = [name for name in names if name == PLAIN or name in others]
        found[group] = [_report_mode(name, modes, baselines) for name in names]
    return found


def report_batches(samples: Sequence[BatchSample]) -> list[BatchReport]:
    """Summarize each group, batch and mode; ratios are taken within a repeat, then their median."""
    by_cell = grouped(samples, lambda s: (s.group, s.batch, s.mode))
    order = list(dict.fromkeys(name for group, _, mode in by_cell for name in (group, mode)))
    found = []
    for (group, batch, mode), of in sorted(
        by_cell.items(), key=lambda c: (order.index(c[0][0]), c[0][1], order.index(c[0][2]))
    ):
        plain = {s.repeat: s.rate for s in by_cell[group, batch, PLAIN]}
        ratios = [s.rate / plain[s.repeat] for s in of]
        found.append(BatchReport(
            group, batch, mode, _median(s.rate for s in of), _median(ratios),
            *median_interval(ratios), 1e3 * _median(s.first_token_s for s in of),
        ))  # fmt: skip
    return found


class _Mode:
    """A mode's samples in a group, by prompt."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.every = samples
        self.by_prompt = grouped(samples, lambda s: s.prompt)

    def each(self, value: Callable[[Sample], float]) -> dict[int, float]:
        """Return medians over the repeats, by prompt."""
        return {p: _median(map(value, of)) for p, of in self.by_prompt.items()}

    def ms_per(self, count: int, name: str) -> float | None:
        """Return one of the timings divided by a count, in ms; None if either is 0."""
        ns = sum(getattr(s.timings, name) for s in self.every)
        return ns / 1e6 / count if ns and count else None

    def over(self, base: _Mode, value: Callable[[Sample], float | None]) -> dict[int, float]:
        """Return ratios of a value to the base's in the same repeat, medians by prompt.

        Prompts without a value in either are left out.
        """
        theirs = {(s.prompt, s.repeat): value(s) for s in base.every}
        found = {}
        for prompt, of in self.by_prompt.items():
            pairs = [(value(s), theirs.get((prompt, s.repeat))) for s in of]
            ratios = [one / other for one, other in pairs if one is not None and other]
            if ratios and len(ratios) == len(of):
                found[prompt] = _median(ratios)
        return found


def _report_mode(name: str, modes: Mapping[str, _Mode], baselines: Sequence[str]) -> ModeReport:
    mode, plain = modes[name], modes[PLAIN]
    every = mode.every
    tokens = sum(s.tokens for s in every)
    done = SpeculationMetrics.total(s.speculation for s in every)
    overheads = [s.timings.round_overhead_p50_ns for s in every if s.speculation.num_spec_steps]
    target = mode.over(plain, lambda s: s.timings.target_model_ns / max(1, s.tokens))
    bound = {p: 1.0 / ratio for p, ratio in target.items() if ratio}
    to_plain = {n: modes[n].over(plain, lambda s: s.rate) for n in {name, *baselines}}
    speedups = {
        base: {p: r / other for p, r in to_plain[name].items() if (other := to_plain[base].get(p))}
        for base in baselines
    }
    first = {
        p: _median(s.first_token_s for s in of if s.first_token_s is not None)
        for p, of in mode.by_prompt.items()
        if all(s.first_token_s is not None for s in of)
    }
    return ModeReport(
        mode=name,
        prompts=len(mode.by_prompt),
        tokens_per_second=(
            sum(statistics.mean(s.tokens for s in of) for of in mode.by_prompt.values())
            / sum(mode.each(lambda s: s.seconds).values())
        ),
        ratios={base: _ratio(of) for base, of in speedups.items()},
        decode_ratio=median_or_none(mode.over(plain, lambda s: s.decode_rate).values()),
        first_token_ms=median_or_none(1e3 * f for f in first.values()),
        mean_accepted_tokens=tokens / done.num_rounds if done.num_rounds else None,
        mean_acceptance_length=done.mean_acceptance_length if done.num_rounds else None,
        loose_share=done.num_loose_tokens / max(1, tokens),
        round_overhead_p50_ms=median_or_none(ns / 1e6 for ns in overheads if ns),
        verify_step_ms=mode.ms_per(done.num_rounds, "target_model_ns"),
        draft_step_ms=mode.ms_per(done.num_draft_tokens, "draft_model_ns"),
        judge_ms=mode.ms_per(done.num_rounds, "judge_ns"),
        bound=median_or_none(bound.values()),
        bound_share=median_or_none(
            speedup / bound[p] for p, speedup in speedups[PLAIN].items() if p in bound
        ),
        same_as_plain=(
            sum(list(of[0].token_ids) == list(plain.by_prompt[p][0].token_ids)
                for p, of in mode.by_prompt.items())
            if all(s.token_ids for s in every) else None
        ),
        chosen=tuple(of[0].chosen for of in mode.by_prompt.values() if of[0].chosen),
    )  # fmt: skip


def _ratio(ratios: Mapping[int, float]) -> Ratio:
    worst = min(ratios, key=lambda p: ratios[p])
    values = list(ratios.values())
    return Ratio(_median(values), *median_interval(values), ratios[worst], worst)


def _with_hindsight(
    samples: Sequence[Sample], fixed: Mapping[str, Sequence[str]]
) -> Iterable[Sample]:
    """Yield, under each name, the samples of the mode that was each prompt's fastest."""
    for name, candidates in fixed.items():
        of = {mode: _Mode([s for s in samples if s.mode == mode]) for mode in candidates}
        rates = {mode: of[mode].each(lambda s: s.rate) for mode in candidates}
        for prompt in of[candidates[0]].by_prompt:
            best = max(candidates, key=lambda mode: rates[mode][prompt])
            for sample in of[best].by_prompt[prompt]:
                yield replace(sample, mode=name, chosen=best)


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


# --- tables -----------------------------------------------------------------------------------


_SPEED: tuple[Column, ...] = (
    ("mode", "{.mode}"),
    ("tok/s", lambda r: rate(r.tokens_per_second)),
    ("x plain", "{.ratios[plain].median:.2f}"),
    ("95 %", "{0.ratios[plain].low:.2f}-{0.ratios[plain].high:.2f}"),
    ("worst", "{.ratios[plain].worst:.2f}"),
    ("decode", "{.decode_ratio:.2f}"),
    ("TTFT", "{.first_token_ms:.1f} ms"),
    ("tok/round", "{.mean_accepted_tokens:.2f}"),
    ("bound", "{.bound:.2f}"),
    ("reached", "{.bound_share:.0%}"),
    ("same", lambda r: "-" if r.same_as_plain is None else f"{r.same_as_plain}/{r.prompts}"),
)
_ROUNDS: tuple[Column, ...] = (
    ("mode", "{.mode}"),
    ("accepted", "{.mean_acceptance_length:.2f}"),
    ("loose", "{.loose_share:.1%}"),
    ("verify", "{.verify_step_ms:.2f} ms"),
    ("draft", "{.draft_step_ms:.2f} ms"),
    ("judge", "{.judge_ms:.2f} ms"),
    ("overhead", "{.round_overhead_p50_ms:.2f} ms"),
    ("chosen", lambda r: ", ".join(
        f"{number} {name.rpartition(', ')[2]}" for name, number in Counter(r.chosen).most_common()
    )),
)  # fmt: skip
NOTES = (
    "x plain: rate relative to plain decoding (K = 0, same services), median over prompts with "
    "bootstrap interval; worst: of the slowest prompt; decode: x plain after the first token; "
    "TTFT: time to first token; bound: x plain if only the target took time; same: texts equal to "
    "plain decoding's; against others: rate relative to theirs, with the interval's lower end",
    "accepted: 1 + accepted drafts per round with drafts; verify, judge: the target's and the "
    "rule's time per round; draft: the draft model's per token; overhead: time per round outside "
    "of them",
)


def speed_tables(
    name: str, reports: Sequence[ModeReport], others: Sequence[str] = ()
) -> list[FittedTable]:
    """Return a group's tables: all modes against plain decoding, rounds, ours against others."""
    ours = [r for r in reports if r.mode not in others]
    shown = [record_table(_SPEED, reports, f"{name}, {reports[0].prompts} prompts")]
    if any(r.draft_step_ms or r.chosen for r in ours):
        columns = [c for c in _ROUNDS if any(cell(c[1], r) not in ("", "-") for r in ours)]
        shown.append(record_table(columns, [r for r in ours if r.mode != PLAIN], f"{name}, rounds"))
    if others:
        columns = [("mode", "{.mode}"), *((other, _over(other)) for other in others)]
        shown.append(record_table(columns, ours, f"{name}, against others"))
    return shown


def batch_table(reports: Sequence[BatchReport]) -> FittedTable:
    """Return a table of concurrent requests: tokens per second, and relative to plain decoding."""
    batches = sorted({r.batch for r in reports})
    rows = []
    for names, of in grouped(reports, lambda r: (r.group, r.mode)).items():
        cells = {r.batch: f"{rate(r.tokens_per_second)} ({r.ratio_to_plain:.2f})" for r in of}
        rows.append([*names, *(cells.get(batch, "-") for batch in batches)])
    columns = ["group", "mode", *map(str, batches)]
    return make_table(columns, rows, "tokens/s (x plain) by concurrent requests", left=2)


def _over(other: str) -> Callable[[ModeReport], str]:
    return lambda r: f"{r.ratios[other].median:.2f} ({r.ratios[other].low:.2f})"

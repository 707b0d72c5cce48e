"""Statistics of `flyspec bench`: ratios with intervals, the bound, hindsight.

A prompt's rate in a mode is its tokens per second, median over the repeats. Ratios are taken within
a repeat, whose modes ran one after the other at the same speed of the machine; then their median
per prompt, then over the prompts of a group. Its interval is the 95 % percentile bootstrap interval
over the prompts (2,000 resamples).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.modes import Sample
from flyspec_lab.bench.speed import BatchSample
from flyspec_lab.bench.summaries import grouped, interval, median_or_none

LONG_PROMPT = 500
"""Prompts with more tokens than this are long; they have their own times to first token."""


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
    above 1 is faster. `first_token_ms` is a median over the prompts (`_long`: of prompts over
    `LONG_PROMPT` tokens); `first_token_ratio` is relative to plain decoding, above 1 is later.
    `mean_accepted_tokens` is tokens per round. `overhead_share` is the part of a round's time
    outside the models and the rule. `verify_step_ms` is the target's time per round, prompt
    included, `draft_step_ms` the draft model's per drafted token, `judge_ms` the rule's per round.
    `bound` is what the ratio to plain decoding would be if only the target took time: tokens per
    round times plain step over verify step, computed from the target's time per token;
    `bound_in_turn` also counts the draft model. `bound_share` is the share of the bound reached.
    """

    mode: str
    prompts: int
    tokens_per_second: float
    ratios: dict[str, Ratio]
    first_token_ms: float | None
    first_token_ratio: float | None
    first_token_long_ms: float | None
    first_token_long_ratio: float | None
    mean_accepted_tokens: float | None
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    loose_share: float
    mean_loose_cost_nats: float
    round_overhead_p50_ms: float | None
    overhead_share: float | None
    draft_share: float | None
    target_share: float | None
    verify_step_ms: float | None
    draft_step_ms: float | None
    judge_ms: float | None
    bytes_per_round: float | None
    bound: float | None
    bound_in_turn: float | None
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
    order = {
        name: i for i, name in enumerate(dict.fromkeys(x for g, _, m in by_cell for x in (g, m)))
    }
    return [
        BatchReport(
            group, batch, mode, _median(s.rate for s in of),
            *batch_ratio(of, by_cell[group, batch, PLAIN]),
            1e3 * _median(s.first_token_s for s in of),
        )
        for (group, batch, mode), of in sorted(
            by_cell.items(), key=lambda c: (order[c[0][0]], c[0][1], order[c[0][2]])
        )
    ]  # fmt: skip


def batch_ratio(
    samples: Sequence[BatchSample], base: Sequence[BatchSample]
) -> tuple[float, float, float]:
    """Return the median of the ratios of rates within a repeat, and its interval."""
    rates = {s.repeat: s.rate for s in base}
    ratios = [s.rate / rates[s.repeat] for s in samples]
    return _median(ratios), *interval(ratios)


class _Mode:
    """A mode's samples in a group, by prompt."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.every = samples
        self.by_prompt = grouped(samples, lambda s: s.prompt)

    def each(self, value: Callable[[Sample], float]) -> dict[int, float]:
        """Return medians over the repeats, by prompt."""
        return {p: _median(map(value, of)) for p, of in self.by_prompt.items()}

    def total(self, name: str) -> float:
        """Return the sum of a field over all samples."""
        return float(sum(getattr(s, name) for s in self.every))

    def per(self, name: str, other: str, scale: float = 1.0) -> float | None:
        """Return the ratio of two fields' sums; None where one of them is 0."""
        top, bottom = self.total(name), self.total(other)
        return scale * top / bottom if top and bottom else None

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
    drafted = [s for s in every if s.spec_steps and s.overhead_ns]
    target = mode.over(plain, lambda s: s.target_ns / max(1, s.tokens))
    in_turn = mode.over(plain, lambda s: (s.target_ns + s.draft_ns) / max(1, s.tokens))
    bound = {p: 1.0 / ratio for p, ratio in target.items() if ratio}
    timed = [s.prompt for s in every if s.first_token_s is None]
    first = {p: t for p, t in mode.each(lambda s: s.first_token_s or 0.0).items() if p not in timed}
    speedups = {base: mode.over(modes[base], lambda s: s.rate) for base in baselines}
    late = mode.over(plain, lambda s: s.first_token_s)
    long = {p for p, tokens in mode.each(lambda s: s.prompt_tokens).items() if tokens > LONG_PROMPT}
    return ModeReport(
        mode=name,
        prompts=len(mode.by_prompt),
        tokens_per_second=(
            sum(statistics.mean(s.tokens for s in of) for of in mode.by_prompt.values())
            / sum(mode.each(lambda s: s.seconds).values())
        ),
        ratios={base: _ratio(of) for base, of in speedups.items()},
        first_token_ms=median_or_none(1e3 * f for f in first.values()),
        first_token_ratio=median_or_none(late.values()),
        first_token_long_ms=median_or_none(1e3 * f for p, f in first.items() if p in long),
        first_token_long_ratio=median_or_none(r for p, r in late.items() if p in long),
        mean_accepted_tokens=mode.per("tokens", "rounds"),
        mean_acceptance_length=(
            1.0 + (mode.per("accepted", "spec_steps") or 0.0) if mode.total("rounds") else None
        ),
        acceptance_rate=mode.per("accepted", "drafted"),
        loose_share=mode.per("loose", "tokens") or 0.0,
        mean_loose_cost_nats=mode.total("loose_cost_nats") / len(every),
        round_overhead_p50_ms=median_or_none(s.overhead_ns / 1e6 for s in drafted),
        overhead_share=median_or_none(s.overhead_ns * s.rounds / 1e9 / s.seconds for s in drafted),
        draft_share=mode.per("draft_ns", "seconds", 1e-9),
        target_share=mode.per("target_ns", "seconds", 1e-9),
        verify_step_ms=mode.per("target_ns", "rounds", 1e-6),
        draft_step_ms=mode.per("draft_ns", "drafted", 1e-6),
        judge_ms=mode.per("judge_ns", "rounds", 1e-6),
        bytes_per_round=mode.per("round_bytes", "rounds"),
        bound=median_or_none(bound.values()),
        bound_in_turn=median_or_none(1.0 / ratio for ratio in in_turn.values() if ratio),
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
    return Ratio(_median(values), *interval(values), ratios[worst], worst)


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

"""What samples amount to: ratios a prompt, their medians with intervals, the bound, hindsight.

A prompt's rate in a mode is its tokens a second at the median over the repeats. Ratios are taken
within a repeat, whose modes followed each other on a machine as fast for all, then their median a
prompt, then that over the prompts of a group; its interval is that of 2,000 bootstrap resamples of
the prompts, 95 %, by percentiles.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flyspec.bench.conditions import PLAIN
from flyspec.bench.intervals import interval
from flyspec.bench.modes import Sample
from flyspec.bench.speed import BatchSample

LONG_PROMPT = 500
"""Tokens from which a prompt is long, where times to a first token are told apart."""


@dataclass(frozen=True)
class Ratio:
    """A median of ratios with its 95 % interval, and the lowest: `worst_prompt`'s."""

    median: float
    low: float
    high: float
    worst: float
    worst_prompt: int


@dataclass(frozen=True)
class ModeReport:
    """A mode over a group; above 1 is faster than what a ratio is to.

    `ratios` are of rates, by the mode that they are to: plain decoding first, then what is not
    flyspec. `first_token_ms` are medians over the prompts, of those over `LONG_PROMPT` tokens
    apart; `first_token_ratio` is to plain, above 1 later. `mean_accepted_tokens` is tokens a round.
    `bound` is how often plain's rate would be reached if only the target took time: tokens a round
    times plain step over verify step, which is the target's time a token of both, prompt included;
    `bound_share` what was reached of it. None where there is nothing to tell.
    """

    mode: str
    prompts: int
    tokens: int
    tokens_per_second: float
    ratios: dict[str, Ratio]
    first_token_ms: float | None
    first_token_ratio: float | None
    first_token_long_ms: float | None
    first_token_long_ratio: float | None
    mean_accepted_tokens: float | None
    mean_acceptance_length: float | None
    loose_share: float
    mean_loose_cost_nats: float
    round_overhead_p50_ms: float | None
    draft_share: float | None
    target_share: float | None
    bound: float | None
    bound_share: float | None
    same_as_plain: int | None
    chosen: tuple[str, ...] = ()

    @property
    def ratio_to_plain(self) -> float:
        """The median ratio to plain decoding."""
        return self.ratios[PLAIN].median


@dataclass(frozen=True)
class BatchReport:
    """Requests at once, against plain decoding with as many; the interval is over repeats."""

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
    """The modes of every group: plain, `others`, then in the order of their first appearance.

    `others` are modes that are not flyspec's. `fixed` names modes of which each prompt's fastest is
    a mode of its own, chosen with hindsight: no fixed choice can be faster.
    """
    grouped: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.group].append(sample)
    order = list(dict.fromkeys(sample.mode for sample in samples))
    return {
        name: _report_group([*of, *_with_hindsight(of, fixed or {})], others, order)
        for name, of in grouped.items()
    }


def report_batches(samples: Sequence[BatchSample]) -> list[BatchReport]:
    """Every group, batch and mode; ratios are taken a repeat, then their median."""
    by_cell: dict[tuple[str, int, str], list[BatchSample]] = defaultdict(list)
    for sample in samples:
        by_cell[sample.group, sample.batch, sample.mode].append(sample)
    order = {mode: i for i, mode in enumerate(dict.fromkeys(s.mode for s in samples))}
    groups = {group: i for i, group in enumerate(dict.fromkeys(s.group for s in samples))}
    cells = sorted(by_cell, key=lambda c: (groups[c[0]], c[1], order[c[2]]))
    found = []
    for group, batch, mode in cells:
        of = by_cell[group, batch, mode]
        plain = {s.repeat: s.rate for s in by_cell[group, batch, PLAIN]}
        ratios = [s.rate / plain[s.repeat] for s in of]
        found.append(
            BatchReport(
                group,
                batch,
                mode,
                _median(s.rate for s in of),
                _median(ratios),
                *interval(ratios),
                1e3 * _median(s.first_token_s for s in of),
            )
        )
    return found


def to_document(reports: Mapping[str, Sequence[ModeReport]], **facts: Any) -> dict[str, Any]:
    """The report as JSON."""
    return {**facts, "groups": {name: [asdict(m) for m in r] for name, r in reports.items()}}


class _Mode:
    """A mode's samples of a group, by prompt."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.every = list(samples)
        self.by_prompt: dict[int, list[Sample]] = defaultdict(list)
        for sample in samples:
            self.by_prompt[sample.prompt].append(sample)
        self.rates = self.each(lambda s: s.rate)
        firsts = {p: [s.first_token_s for s in of] for p, of in self.by_prompt.items()}
        self.first_token = {
            p: _median(f for f in of if f is not None) for p, of in firsts.items() if None not in of
        }
        self.prompt_tokens = self.each(lambda s: s.prompt_tokens)

    def each(self, value: Callable[[Sample], float]) -> dict[int, float]:
        """The median over the repeats, by prompt."""
        return {p: _median(map(value, of)) for p, of in self.by_prompt.items()}

    def over(self, base: _Mode, value: Callable[[Sample], float | None]) -> dict[int, float]:
        """The value over the base's of the same repeat, at the median over the repeats, by prompt.

        Without the prompts of which one has none.
        """
        theirs = {(s.prompt, s.repeat): value(s) for s in base.every}
        found = {}
        for prompt, of in self.by_prompt.items():
            pairs = [(value(s), theirs.get((prompt, s.repeat))) for s in of]
            ratios = [one / other for one, other in pairs if one is not None and other]
            if ratios and len(ratios) == len(of):
                found[prompt] = _median(ratios)
        return found

    def share(self, value: Callable[[Sample], float]) -> float | None:
        """The part of the time that was spent so, if any."""
        spent = sum(map(value, self.every))
        return spent / 1e9 / sum(s.seconds for s in self.every) if spent else None


def _report_group(
    samples: Sequence[Sample], others: Sequence[str], order: Sequence[str]
) -> list[ModeReport]:
    by_mode: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_mode[sample.mode].append(sample)
    modes = {name: _Mode(of) for name, of in by_mode.items()}
    place = {name: i for i, name in enumerate(dict.fromkeys([PLAIN, *others, *order]))}
    names = sorted(modes, key=lambda m: place.get(m, len(place)))
    baselines = [name for name in names if name == PLAIN or name in others]
    return [_report_mode(name, modes, baselines) for name in names]


def _report_mode(name: str, modes: Mapping[str, _Mode], baselines: Sequence[str]) -> ModeReport:
    mode, plain = modes[name], modes[PLAIN]
    every = mode.every
    tokens, rounds = sum(s.tokens for s in every), sum(s.rounds for s in every)
    drafted = [s for s in every if s.spec_steps]
    overheads = [s.overhead_ns / 1e6 for s in drafted if s.overhead_ns]
    seconds = sum(_median(s.seconds for s in of) for of in mode.by_prompt.values())
    a_prompt = sum(statistics.mean(s.tokens for s in of) for of in mode.by_prompt.values())
    target = mode.over(plain, lambda s: s.target_ns / max(1, s.tokens))
    bound = {p: 1.0 / ratio for p, ratio in target.items() if ratio}
    first = mode.first_token
    speedups = {base: mode.over(modes[base], lambda s: s.rate) for base in baselines}
    late = mode.over(plain, lambda s: s.first_token_s)
    long = {p for p, tokens in mode.prompt_tokens.items() if tokens > LONG_PROMPT}
    return ModeReport(
        mode=name,
        prompts=len(mode.by_prompt),
        tokens=sum(of[0].tokens for of in mode.by_prompt.values()),
        tokens_per_second=a_prompt / seconds,
        ratios={base: _ratio(of) for base, of in speedups.items()},
        first_token_ms=_median_or_none(1e3 * f for f in first.values()),
        first_token_ratio=_median_or_none(late.values()),
        first_token_long_ms=_median_or_none(1e3 * f for p, f in first.items() if p in long),
        first_token_long_ratio=_median_or_none(r for p, r in late.items() if p in long),
        mean_accepted_tokens=tokens / rounds if rounds else None,
        mean_acceptance_length=(
            1.0 + sum(s.accepted for s in every) / max(1, sum(s.spec_steps for s in every))
            if rounds
            else None
        ),
        loose_share=sum(s.loose for s in every) / max(1, tokens),
        mean_loose_cost_nats=sum(s.loose_cost_nats for s in every) / len(every),
        round_overhead_p50_ms=_median_or_none(overheads),
        draft_share=mode.share(lambda s: s.draft_ns),
        target_share=mode.share(lambda s: s.target_ns),
        bound=_median_or_none(bound.values()),
        bound_share=_median_or_none(
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
    """Of every prompt's."""
    worst = min(ratios, key=lambda p: ratios[p])
    values = list(ratios.values())
    return Ratio(_median(values), *interval(values), ratios[worst], worst)


def _with_hindsight(
    samples: Sequence[Sample], fixed: Mapping[str, Sequence[str]]
) -> Iterable[Sample]:
    """For each name, the samples of that of its modes which was each prompt's fastest."""
    for name, candidates in fixed.items():
        of = {mode: _Mode([s for s in samples if s.mode == mode]) for mode in candidates}
        for prompt in next(iter(of.values())).by_prompt:
            best = max(candidates, key=lambda mode: of[mode].rates[prompt])
            for sample in of[best].by_prompt[prompt]:
                yield replace(sample, mode=name, chosen=best)


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def _median_or_none(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return _median(known) if known else None

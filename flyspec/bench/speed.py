"""How fast: plain decoding, the rules and transformers' `generate`, prompt by prompt in turn.

All modes of a prompt run one after the other before the next prompt, in an order that rotates, so
that a machine whose speed drifts slows all of them alike. A prompt's rate is its tokens a second at
the median over the repeats; ratios are taken a prompt, then their median.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from flyspec.bench.conditions import PLAIN, Condition
from flyspec.bench.prompts import Group, to_request
from flyspec.client import Client, GenerateOptions
from flyspec.rules import Rule

if TYPE_CHECKING:
    from flyspec.bench.reference import Reference

REFERENCE = "transformers"


@dataclass(frozen=True)
class SpeedOptions:
    """What is measured."""

    conditions: Sequence[Condition] = (
        Condition("exact", Rule("exact")),
        Condition("fly", Rule("fly")),
    )
    num_speculative_tokens: int = 15
    max_tokens: int = 128
    repeats: int = 3
    drafter: str = ""
    chat: bool | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Sample:
    """One generation: what it took, and what speculation did."""

    group: str
    prompt: int
    repeat: int
    mode: str
    token_ids: Sequence[int]
    seconds: float
    rounds: int = 0
    spec_steps: int = 0
    accepted: int = 0
    loose: int = 0
    loose_cost_nats: float = 0.0
    overhead_ns: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True)
class ModeReport:
    """A mode over a group. Ratios above 1 are faster; `best` is the faster of the baselines.

    `ratio_*` is the median over the prompts, `total_ratio_*` that of tokens a second in total.
    """

    mode: str
    tokens: int
    tokens_per_second: float
    ratio_to_plain: float
    ratio_to_best: float
    total_ratio_to_plain: float
    total_ratio_to_best: float
    mean_accepted_tokens: float
    mean_acceptance_length: float
    loose_share: float
    loose_cost_nats: float
    round_overhead_p50_ms: float | None
    same_as_plain: int
    prompts: int


async def measure(
    client: Client,
    groups: Sequence[Group],
    options: SpeedOptions,
    reference: Reference | None = None,
    on_sample: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Run everything once to warm up, then `repeats` times, one request at a time."""
    modes = _modes(options)
    names = [*modes, *([REFERENCE] if reference else [])]
    samples: list[Sample] = []
    for group in groups:
        prompts = [to_request(prompt, options.chat) for prompt in group.prompts]
        ids = []
        for prompt in prompts:  # tells the prompt's tokens
            first = await client.complete(prompt, replace(modes[PLAIN], max_tokens=1))
            ids.append(list(first.started.prompt_token_ids))
        for mode in modes.values():
            await client.complete(prompts[0], mode)
        if reference:
            reference.generate(ids[0], options.max_tokens, options.ignore_eos)
        for repeat in range(options.repeats):
            for i, prompt in enumerate(prompts):
                turn = (i + repeat) % len(names)
                for name in names[turn:] + names[:turn]:
                    key = (group.name, i, repeat, name)
                    if name == REFERENCE and reference:
                        begin = time.perf_counter()
                        tokens = reference.generate(ids[i], options.max_tokens, options.ignore_eos)
                        samples.append(Sample(*key, tokens, time.perf_counter() - begin))
                    else:
                        samples.append(await _sample(client, prompt, modes[name], key))
                    on_sample()
    return samples


def count(groups: Sequence[Group], options: SpeedOptions, reference: bool) -> int:
    """How many samples `measure` takes."""
    modes = len(_modes(options)) + reference
    return sum(len(g.prompts) for g in groups) * modes * options.repeats


def report(samples: Sequence[Sample]) -> dict[str, list[ModeReport]]:
    """The modes of every group, in the order of their first appearance."""
    grouped: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.group].append(sample)
    return {name: _report_group(of_group) for name, of_group in grouped.items()}


def to_document(reports: dict[str, list[ModeReport]], **facts: Any) -> dict[str, Any]:
    """The report as JSON."""
    return {**facts, "groups": {name: [asdict(m) for m in r] for name, r in reports.items()}}


def _modes(options: SpeedOptions) -> dict[str, GenerateOptions]:
    """What each mode asks of the server."""
    base = GenerateOptions(
        max_tokens=options.max_tokens, ignore_eos=options.ignore_eos, drafter=options.drafter
    )
    modes = {PLAIN: replace(base, rule=Rule("exact"), num_speculative_tokens=0)}
    for condition in options.conditions:
        k = condition.num_speculative_tokens
        modes[condition.name] = replace(
            base,
            rule=condition.rule,
            num_speculative_tokens=options.num_speculative_tokens if k is None else k,
        )
    return modes


async def _sample(
    client: Client, prompt: Any, options: GenerateOptions, key: tuple[str, int, int, str]
) -> Sample:
    begin = time.perf_counter()
    generation = await client.complete(prompt, options)
    seconds = time.perf_counter() - begin
    m = generation.completion.speculation
    return Sample(
        *key,
        token_ids=generation.token_ids,
        seconds=seconds,
        rounds=m.num_rounds,
        spec_steps=m.num_spec_steps,
        accepted=m.num_accepted_draft_tokens,
        loose=m.num_loose_tokens,
        loose_cost_nats=m.loose_cost_nats,
        overhead_ns=generation.completion.timings.round_overhead_p50_ns,
    )


def _report_group(samples: Sequence[Sample]) -> list[ModeReport]:
    by_mode: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        by_mode[sample.mode][sample.prompt].append(sample)
    modes = sorted(by_mode, key=lambda m: {PLAIN: 0, REFERENCE: 1}.get(m, 2))
    rates = {m: {p: _median(s.rate for s in of) for p, of in by_mode[m].items()} for m in modes}
    totals = {m: _total_rate(by_mode[m]) for m in modes}
    baselines = [m for m in modes if m in (PLAIN, REFERENCE)]
    best_total = max(totals[m] for m in baselines)
    reports = []
    for mode in modes:
        of = by_mode[mode]
        every = [s for group in of.values() for s in group]
        drafted = [s for s in every if s.spec_steps]
        tokens = sum(len(s.token_ids) for s in every)
        overheads = [s.overhead_ns / 1e6 for s in drafted if s.overhead_ns]
        reports.append(
            ModeReport(
                mode=mode,
                tokens=sum(len(group[0].token_ids) for group in of.values()),
                tokens_per_second=totals[mode],
                ratio_to_plain=_median(r / rates[PLAIN][p] for p, r in rates[mode].items()),
                ratio_to_best=_median(
                    r / max(rates[b][p] for b in baselines) for p, r in rates[mode].items()
                ),
                total_ratio_to_plain=totals[mode] / totals[PLAIN],
                total_ratio_to_best=totals[mode] / best_total,
                mean_accepted_tokens=tokens / max(1, sum(s.rounds for s in every) or tokens),
                mean_acceptance_length=1.0
                + sum(s.accepted for s in every) / max(1, sum(s.spec_steps for s in every)),
                loose_share=sum(s.loose for s in every) / max(1, tokens),
                loose_cost_nats=sum(s.loose_cost_nats for s in every) / len(every),
                round_overhead_p50_ms=statistics.median(overheads) if overheads else None,
                same_as_plain=sum(
                    list(group[0].token_ids) == list(by_mode[PLAIN][p][0].token_ids)
                    for p, group in of.items()
                ),
                prompts=len(of),
            )
        )
    return reports


def _median(values: Any) -> float:
    return float(statistics.median(values))


def _total_rate(of: dict[int, list[Sample]]) -> float:
    """Tokens a second over all prompts, each at its median time."""
    seconds = sum(_median(s.seconds for s in group) for group in of.values())
    return sum(statistics.mean(len(s.token_ids) for s in group) for group in of.values()) / seconds

"""What speculation reaches of its bound, on pairs of models that the bundled ones are not.

The bound is what a round would win if it cost the target's forward alone: tokens a round x plain
step / verify step. With the draft model's time beside the verify step it is the bound of rounds in
which the two take turns. All modes of a prompt run one after the other, in an order that rotates,
after a run of everything that is not counted.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from flyspec.bench.conditions import PLAIN, Condition
from flyspec.client import Client
from flyspec.rules import Rule
from flyspec.speculation_length import MOST_BY_AUTO, SpeculationLength
from flyspec.tables import Column, Table, record_table
from flyspec.values.generation import GenerateOptions, Generation, Prompt

_JUDGING = "flyspec_verify_judge_seconds"


@dataclass(frozen=True)
class PairOptions:
    """What is measured. `num_speculative_tokens` None leaves K to the server.

    `rehearse`: before all else run everything with the longest rounds, so that a drafter which
    replays has asked for what it will draft; how long that takes tells K auto nothing.
    """

    conditions: Sequence[Condition] = (
        Condition("exact", Rule("exact")),
        Condition("fly", Rule("fly")),
        Condition("fuzzy", Rule("fuzzy")),
    )
    num_speculative_tokens: SpeculationLength | None = 15
    max_tokens: int = 64
    repeats: int = 3
    drafter: str = ""
    rehearse: bool = False


@dataclass(frozen=True)
class PairSample:
    """One generation. `as_before`: the same tokens as in the run that is not counted; `as_plain`:
    as plain decoding in that run.

    `target_ns` and `draft_ns` are inside the models, `judge_ns` is of the rule and of sampling.
    """

    mode: str
    prompt: int
    repeat: int
    seconds: float
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    loose: int
    target_ns: int
    draft_ns: int
    judge_ns: int
    round_bytes: int
    distribution_bytes: int
    as_before: bool
    as_plain: bool


@dataclass(frozen=True)
class PairReport:
    """A mode over all prompts; plain decoding has no bound. Times in ms, a round or a token.

    `cost_ratio` is a verify step over a draft step, `bound` and `share` are of rounds that cost the
    verify step alone, `bound_in_turn` and `share_in_turn` of those that also wait for the draft
    model. `same` and `same_as_plain` count the generations whose tokens were those of the run
    before, and of plain decoding in it.
    """

    mode: str
    tokens_per_second: float
    tokens_per_round: float
    acceptance_rate: float
    loose_share: float
    plain_step_ms: float
    verify_step_ms: float
    draft_step_ms: float | None
    cost_ratio: float | None
    speedup: float
    bound: float
    share: float
    bound_in_turn: float
    share_in_turn: float
    bytes_per_round: float
    distribution_bytes_per_round: float
    judge_ms: float
    round_ms: float
    same: int
    same_as_plain: int
    generations: int


async def measure(
    client: Client,
    prompts: Sequence[Prompt],
    options: PairOptions,
    metrics_port: int,
    on_sample: Callable[[], None] = lambda: None,
) -> list[PairSample]:
    """Run everything once, then `repeats` times. `metrics_port` is the verify service's."""
    for prompt in prompts if options.rehearse else ():
        for mode in _modes(replace(options, num_speculative_tokens=MOST_BY_AUTO)).values():
            await client.complete(prompt, mode)
            on_sample()
    modes = _modes(options)
    names = list(modes)
    before: dict[tuple[str, int], list[int]] = {}
    samples = []
    for repeat in range(-1, options.repeats):
        for i, prompt in enumerate(prompts):
            turn = (i + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                judged_s = await _judge_seconds(metrics_port)
                begin = time.perf_counter()
                generation = await client.complete(prompt, modes[name])
                seconds = time.perf_counter() - begin
                judged_s = await _judge_seconds(metrics_port) - judged_s
                if repeat < 0:
                    before[name, i] = generation.token_ids
                else:
                    key = (name, i, repeat, seconds)
                    same = [before[m, i] == generation.token_ids for m in (name, PLAIN)]
                    samples.append(_sample(key, generation, judged_s, *same))
                on_sample()
    return samples


def count(num_prompts: int, options: PairOptions) -> int:
    """How many times `measure` calls `on_sample`."""
    return num_prompts * len(_modes(options)) * (options.repeats + 1 + options.rehearse)


def report(samples: Sequence[PairSample]) -> list[PairReport]:
    """The modes, plain decoding first."""
    names = list(dict.fromkeys(sample.mode for sample in samples))
    names.sort(key=lambda name: name != PLAIN)
    plain = _total([s for s in samples if s.mode == PLAIN])
    return [_report(name, [s for s in samples if s.mode == name], plain) for name in names]


def to_document(reports: Sequence[PairReport], **facts: Any) -> dict[str, Any]:
    """The report as JSON."""
    return {**facts, "modes": [asdict(r) for r in reports]}


class _Total(NamedTuple):
    """Sums over the prompts; times are the medians of the repeats, counts their means."""

    seconds: float
    target_ns: float
    draft_ns: float
    tokens: float
    rounds: float
    drafted: float


def _total(samples: Sequence[PairSample]) -> _Total:
    by_prompt: dict[int, list[PairSample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt, []).append(sample)

    def total(name: str, of: Callable[[list[float]], float]) -> float:
        return sum(of([getattr(s, name) for s in group]) for group in by_prompt.values())

    times = (total(name, statistics.median) for name in ("seconds", "target_ns", "draft_ns"))
    counts = (total(name, statistics.mean) for name in ("tokens", "rounds", "drafted"))
    return _Total(*times, *counts)


def _report(name: str, samples: Sequence[PairSample], plain: _Total) -> PairReport:
    total = _total(samples)
    all_rounds, tokens = sum(s.rounds for s in samples), sum(s.tokens for s in samples)
    plain_step = plain.target_ns / plain.tokens
    verify_step = total.target_ns / total.rounds
    draft_step = total.draft_ns / total.drafted if total.drafted else None
    per_round = total.tokens / total.rounds
    speedup = (total.tokens / total.seconds) / (plain.tokens / plain.seconds)
    bound = per_round * plain_step / verify_step
    in_turn = per_round * plain_step / (verify_step + total.draft_ns / total.rounds)
    return PairReport(
        mode=name,
        tokens_per_second=total.tokens / total.seconds,
        tokens_per_round=per_round,
        acceptance_rate=sum(s.accepted for s in samples) / max(1, sum(s.drafted for s in samples)),
        loose_share=sum(s.loose for s in samples) / tokens,
        plain_step_ms=plain_step / 1e6,
        verify_step_ms=verify_step / 1e6,
        draft_step_ms=draft_step / 1e6 if draft_step else None,
        cost_ratio=verify_step / draft_step if draft_step else None,
        speedup=speedup,
        bound=bound,
        share=speedup / bound,
        bound_in_turn=in_turn,
        share_in_turn=speedup / in_turn,
        bytes_per_round=sum(s.round_bytes for s in samples) / all_rounds,
        distribution_bytes_per_round=sum(s.distribution_bytes for s in samples) / all_rounds,
        judge_ms=sum(s.judge_ns for s in samples) / all_rounds / 1e6,
        round_ms=1e3 * total.seconds / total.rounds,
        same=sum(s.as_before for s in samples),
        same_as_plain=sum(s.as_plain for s in samples),
        generations=len(samples),
    )


def _modes(options: PairOptions) -> dict[str, GenerateOptions]:
    """What each mode asks of the server: equal lengths, and no change of rule for odd texts."""

    def of(rule: Rule, k: SpeculationLength | None) -> GenerateOptions:
        return GenerateOptions(
            max_tokens=options.max_tokens,
            ignore_eos=True,
            disable_loop_guard=True,
            drafter=options.drafter,
            rule=rule,
            num_speculative_tokens=k,
        )

    modes = {PLAIN: of(Rule("exact"), 0)}
    for condition in options.conditions:
        k = condition.requested_k(options.num_speculative_tokens)
        modes[condition.name] = of(condition.rule, k)
    return modes


def _sample(
    key: tuple[str, int, int, float],
    generation: Generation,
    judged_s: float,
    as_before: bool,
    as_plain: bool,
) -> PairSample:
    spent, timings = generation.completion.speculation, generation.completion.timings
    return PairSample(
        *key,
        tokens=len(generation.token_ids),
        rounds=spent.num_rounds,
        drafted=spent.num_draft_tokens,
        accepted=spent.num_accepted_draft_tokens,
        loose=spent.num_loose_tokens,
        target_ns=timings.target_model_ns,
        draft_ns=timings.draft_model_ns,
        judge_ns=round(judged_s * 1e9),
        round_bytes=spent.round_bytes,
        distribution_bytes=spent.distribution_bytes,
        as_before=as_before,
        as_plain=as_plain,
    )


async def _judge_seconds(port: int) -> float:
    """What the verify service has judged so far, in seconds; nobody else asks it."""
    text = await asyncio.to_thread(_scrape, port)
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        if family.name == _JUDGING
        for sample in family.samples
        if sample.name.endswith("_sum")
    )


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


_COLUMNS: tuple[Column, ...] = (
    ("mode", "{.mode}"),
    ("tok/s", "{.tokens_per_second:.1f}"),
    ("tok/round", "{.tokens_per_round:.2f}"),
    ("plain", "{.plain_step_ms:.2f} ms"),
    ("verify", "{.verify_step_ms:.2f} ms"),
    ("verify/draft", "{.cost_ratio:.1f}"),
    ("x plain", "{.speedup:.2f}"),
    ("bound", "{.bound:.2f}"),
    ("share", "{.share:.0%}"),
    ("in turn", "{.share_in_turn:.0%}"),
    ("loose", "{.loose_share:.1%}"),
    ("B/round", "{.bytes_per_round:,.0f}"),
    ("judge", "{.judge_ms:.2f} ms"),
    ("same", "{0.same}/{0.generations}"),
    ("as plain", "{0.same_as_plain}/{0.generations}"),
)
PAIR_NOTES = (
    "tok/round: mean tokens a round; plain, verify: the target's forward, a token of plain "
    "decoding and a round; x plain: rate over plain decoding's; bound: tok/round x plain / verify; "
    "share: of it that was reached; in turn: of the bound that counts the draft model's time too; "
    "B/round: bytes of a round's messages; judge: the rule and sampling, a round; same: as in the "
    "run before; as plain: as plain decoding in it"
)


def pair_table(reports: Sequence[PairReport], title: str) -> Table:
    """Modes of one pair."""
    return record_table(_COLUMNS, reports, title)

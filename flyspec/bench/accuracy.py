"""How right, and how likely: texts of each rule, judged by known answers or by the target itself.

Recovery is accuracy under a rule over accuracy of plain decoding. Where no answers are known, the
quality of a text is what the target thinks of it: the mean raw log-probability of its tokens.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flyspec.bench.conditions import CONDITIONS, PLAIN, Condition
from flyspec.bench.prompts import Group, to_request
from flyspec.bench.versus import Versus, compare
from flyspec.client import Client, GenerateOptions, Generation
from flyspec.errors import ConfigError
from flyspec.prompts import normal_number
from flyspec.speculation_length import AUTO, SpeculationLength
from flyspec.values.tokens import SamplingParams
from orchestrator.generation.loop_guard import LoopGuard

if TYPE_CHECKING:
    from flyspec.bench.reference import Reference

Results = Mapping[str, Sequence[Generation]]
"""A generation a prompt, by the condition's name."""

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*\$?({_NUMBER})")
_ANY = re.compile(_NUMBER)
_LAST_LINE = re.compile(rf"(?:\A|\n)#### ({_NUMBER})\s*\Z")


@dataclass(frozen=True)
class EvalOptions:
    """How every text is generated. Prompt i is sampled with `seed` + i, under all conditions."""

    num_speculative_tokens: SpeculationLength = AUTO
    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    drafter: str = ""
    chat: bool | None = None
    concurrency: int = 8


@dataclass(frozen=True)
class ConditionReport:
    """A condition over all prompts.

    `correct`, `accuracy` and `recovery` are None without known answers, then
    `log_likelihood_per_token` has the mean over all output tokens of the target's raw log-prob,
    nats. Gaps are means in nats, None where there was no such token. `loops` counts texts that
    repeat themselves by the loop guard's measure, guarded or not. `mean_accepted_tokens` is tokens
    a round; a plain token is a round.
    """

    condition: str
    problems: int
    tokens: int
    correct: int | None
    accuracy: float | None
    recovery: float | None
    log_likelihood_per_token: float | None
    mean_accepted_tokens: float
    mean_acceptance_length: float
    loose_tokens: int
    loose_share: float
    loose_cost_nats: float
    mean_loose_gap_nats: float | None
    rejected_tokens: int
    mean_rejected_gap_nats: float | None
    rollbacks: int
    loops: int
    distribution_bytes_per_round: float
    round_bytes_per_round: float
    same_as_plain: int
    cut_off: int
    versus: Versus | None = None


def extract_answer(text: str, strict: bool) -> str | None:
    """The answer that a text gives.

    Strict: the last line is `#### N` and nothing else, as the bundled models are taught. Otherwise
    the number after the last `####`, or the last number at all.
    """
    if strict:
        match = _LAST_LINE.search(text)
        return normal_number(match[1]) if match else None
    found = _MARKED.findall(text) or _ANY.findall(text)
    return normal_number(found[-1]) if found else None


def has_answers(group: Group) -> bool:
    """Whether the answers are known; refuses a group of which only some are."""
    unknown = [p for p in group.prompts if p.reference is None]
    if unknown and len(unknown) < len(group.prompts):
        raise ConfigError(f"{unknown[0].where}: no answer to compare with; others have one")
    return not unknown


async def generate_all(
    client: Client,
    group: Group,
    conditions: Sequence[Condition] = CONDITIONS,
    options: EvalOptions | None = None,
    on_result: Callable[[], None] = lambda: None,
) -> dict[str, list[Generation]]:
    """A text a prompt and condition, `options.concurrency` at once; the first error ends all."""
    chosen = options or EvalOptions()
    gate = asyncio.Semaphore(chosen.concurrency)

    async def solve(condition: Condition, index: int) -> Generation:
        request = GenerateOptions(
            sampling=chosen.sampling,
            seed=chosen.seed + index,
            max_tokens=chosen.max_tokens,
            drafter=chosen.drafter,
            rule=condition.rule,
            num_speculative_tokens=condition.requested_k(chosen.num_speculative_tokens),
        )
        async with gate:
            prompt = to_request(group.prompts[index], chosen.chat)
            generation = await client.complete(prompt, request, math.inf)
        on_result()
        return generation

    tasks = {
        c.name: [asyncio.ensure_future(solve(c, i)) for i in range(len(group.prompts))]
        for c in conditions
    }
    every = [task for of in tasks.values() for task in of]
    try:
        await asyncio.gather(*every)
    finally:
        for task in every:
            task.cancel()
        await asyncio.gather(*every, return_exceptions=True)
    return {name: [task.result() for task in of] for name, of in tasks.items()}


async def log_likelihoods(
    reference: Reference, results: Results, on_text: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """log p(output | prompt) under the target, nats, of every text; equal texts are scored once."""
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    scores: dict[str, list[float]] = {}
    for name, generations in results.items():
        scores[name] = []
        for g in generations:
            key = (tuple(g.started.prompt_token_ids), tuple(g.token_ids))
            if key not in known:
                known[key] = await asyncio.to_thread(reference.log_likelihood, *key)
            scores[name].append(known[key])
            on_text()
    return scores


def report(
    group: Group,
    results: Results,
    scores: Mapping[str, Sequence[float]] | None = None,
    first: str = PLAIN,
) -> list[ConditionReport]:
    """One report a condition; `scores` are the texts' log-likelihoods if they were taken.

    Each is compared with the condition named `first`.
    """
    answered = has_answers(group)
    marks = {
        name: [is_right(group, i, g) for i, g in enumerate(of)] if answered else None
        for name, of in results.items()
    }
    right = {name: None if of is None else sum(of) for name, of in marks.items()}
    plain = results.get(PLAIN, ())
    reports = [
        _report_condition(name, of, plain, right[name], right.get(PLAIN), (scores or {}).get(name))
        for name, of in results.items()
    ]
    if first not in results:
        return reports
    return [
        r if r.condition == first
        else replace(r, versus=compare(
            first, results[r.condition], results[first], marks[r.condition], marks[first]
        ))
        for r in reports
    ]  # fmt: skip


def is_right(group: Group, index: int, generation: Generation) -> bool:
    """Whether the text gives the known answer of the prompt at `index`."""
    answer = extract_answer(generation.text, group.strict)
    return answer is not None and answer == group.prompts[index].reference


def to_document(
    reports: Sequence[ConditionReport], samples: Sequence[dict[str, Any]] = (), **facts: Any
) -> dict[str, Any]:
    """The report as JSON; with `samples`, every text as well."""
    document = {**facts, "conditions": [asdict(r) for r in reports]}
    return {**document, "samples": list(samples)} if samples else document


def to_samples(
    group: Group, results: Results, scores: Mapping[str, Sequence[float]] | None = None
) -> list[dict[str, Any]]:
    """Every text as JSON: tokens, origins, what speculation did, and how good it is."""
    answered = has_answers(group)
    return [
        {
            "condition": name,
            "prompt": group.prompts[i].where,
            "rule": _rule_document(g),
            "num_speculative_tokens": g.started.num_speculative_tokens,
            "seed": g.started.seed,
            "text": g.text,
            "token_ids": list(g.token_ids),
            "origins": [origin.name for origin in g.origins],
            "finish_reason": g.completion.finish_reason.name,
            "loop_guard_token_index": g.completion.loop_guard_token_index,
            "correct": is_right(group, i, g) if answered else None,
            "log_likelihood": scores[name][i] if scores else None,
            "speculation": asdict(g.completion.speculation),
        }
        for name, of in results.items()
        for i, g in enumerate(of)
    ]


def _rule_document(generation: Generation) -> dict[str, Any]:
    """The rule with the parameters that it has; enums by name."""
    parameters = asdict(generation.started.rule).items()
    return {k: getattr(v, "name", v) for k, v in parameters if v not in (None, ())}


def _repeats_itself(generation: Generation) -> bool:
    """Whether the guard took effect; or would have, where it is off."""
    if generation.completion.loop_guard_token_index is not None:
        return True
    guard = LoopGuard()
    for token_id in generation.token_ids:
        guard.push(token_id)
    return guard.token_index is not None


def _report_condition(
    name: str,
    of: Sequence[Generation],
    plain: Sequence[Generation],
    right: int | None,
    plain_right: int | None,
    scores: Sequence[float] | None,
) -> ConditionReport:
    metrics = [g.completion.speculation for g in of]
    tokens = sum(g.completion.completion_tokens for g in of)
    rounds = max(1, sum(m.num_rounds for m in metrics))
    steps = max(1, sum(m.num_spec_steps for m in metrics))
    loose = sum(m.num_loose_tokens for m in metrics)
    rejected = sum(m.num_rejected_tokens for m in metrics)
    cost = sum(m.loose_cost_nats for m in metrics)
    return ConditionReport(
        condition=name,
        problems=len(of),
        tokens=tokens,
        correct=right,
        accuracy=None if right is None else right / len(of),
        recovery=right / plain_right if right is not None and plain_right else None,
        log_likelihood_per_token=(
            sum(scores) / max(1, sum(len(g.token_ids) for g in of)) if scores else None
        ),
        mean_accepted_tokens=tokens / rounds,
        mean_acceptance_length=1.0 + sum(m.num_accepted_draft_tokens for m in metrics) / steps,
        loose_tokens=loose,
        loose_share=loose / max(1, tokens),
        loose_cost_nats=cost,
        mean_loose_gap_nats=cost / loose if loose else None,
        rejected_tokens=rejected,
        mean_rejected_gap_nats=(
            sum(m.rejected_cost_nats for m in metrics) / rejected if rejected else None
        ),
        rollbacks=sum(m.num_rollbacks for m in metrics),
        loops=sum(_repeats_itself(g) for g in of),
        distribution_bytes_per_round=sum(m.distribution_bytes for m in metrics) / steps,
        round_bytes_per_round=sum(m.round_bytes for m in metrics) / rounds,
        same_as_plain=sum(g.token_ids == p.token_ids for g, p in zip(of, plain, strict=False)),
        cut_off=sum(g.completion.finish_reason.name == "LENGTH" for g in of),
    )

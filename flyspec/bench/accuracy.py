"""Quality of each rule's outputs, by known answers or by the target's own log-likelihood.

Recovery is accuracy under a rule relative to that of plain decoding. Without known answers, the
quality of a text is the mean raw log-probability that the target gives its tokens.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from flyspec.bench.conditions import PLAIN, Condition, with_plain
from flyspec.bench.options import EvalOptions
from flyspec.bench.prompts import Group
from flyspec.bench.versus import Versus, compare
from flyspec.client import AsyncClient, GenerateOptions, Generation, SpeculationMetrics
from flyspec.concurrency import all_or_first_error, check_reached, until_interrupted
from flyspec.errors import ConfigError
from flyspec.progress import progress
from flyspec.prompts import normal_number
from flyspec.values.tokens import SamplingParams
from orchestrator.generation.loop_guard import LoopGuard

if TYPE_CHECKING:
    from flyspec.bench.reference import Reference

Results = Mapping[str, Sequence[Generation]]
"""One generation per prompt, by the condition's name."""

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*\$?({_NUMBER})")
_ANY = re.compile(_NUMBER)
_LAST_LINE = re.compile(rf"(?:\A|\n)#### ({_NUMBER})\s*\Z")


@dataclass(frozen=True)
class ConditionReport:
    """A condition over all prompts.

    `correct`, `accuracy` and `recovery` are None without known answers; then
    `log_likelihood_per_token` is the mean raw log-probability of the output tokens under the
    target, in nats. Gaps are means in nats, None if there was no such token. `loops` counts texts
    that repeat themselves by the loop guard's criterion, whether it was on or not.
    `mean_accepted_tokens` is tokens per round, where each plain token is a round.
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
    """Return the answer in a text.

    Strict: the last line must be `#### N` and nothing else, as the bundled models are trained.
    Otherwise the number after the last `####`, or else the last number.
    """
    if strict:
        match = _LAST_LINE.search(text)
        return normal_number(match[1]) if match else None
    found = _MARKED.findall(text) or _ANY.findall(text)
    return normal_number(found[-1]) if found else None


def has_answers(group: Group) -> bool:
    """Return whether the answers are known. Raises `ConfigError` if only some are."""
    unknown = [p for p in group.prompts if p.reference is None]
    if unknown and len(unknown) < len(group.prompts):
        raise ConfigError(f"{unknown[0].where}: has no answer, but other prompts have one")
    return not unknown


async def generate_all(
    client: AsyncClient, group: Group, o: EvalOptions
) -> tuple[Group, dict[str, list[Generation]]]:
    """Generate a text per prompt and condition, plain decoding first, `concurrency` at a time.

    Returns the prompts that were answered in all conditions, which are all unless interrupted.
    """
    conditions = with_plain(o.conditions)
    gate = asyncio.Semaphore(o.concurrency)

    texts: dict[tuple[int, str], Generation] = {}

    async def solve(condition: Condition, index: int, advance: Callable[[], None]) -> None:
        request = GenerateOptions(
            sampling=SamplingParams(temperature=o.temperature, top_p=o.top_p),
            seed=o.seed + index,
            max_tokens=o.max_tokens,
            drafter=o.drafter,
            rule=condition.rule,
            num_speculative_tokens=condition.requested_k(o.num_speculative_tokens),
        )
        async with gate:
            prompt = group.prompts[index].to_request(o.chat)
            texts[index, condition.name] = await client.complete(prompt, request, math.inf)
        advance()

    count = len(group.prompts)
    with progress("generating", count * len(conditions)) as advance, until_interrupted():
        await all_or_first_error(
            solve(condition, index, advance) for index in range(count) for condition in conditions
        )
    done = [i for i in range(count) if all((i, c.name) in texts for c in conditions)]
    check_reached(done)
    answered = replace(group, prompts=[group.prompts[i] for i in done])
    return answered, {c.name: [texts[i, c.name] for i in done] for c in conditions}


async def log_likelihoods(reference: Reference, results: Results) -> dict[str, list[float]]:
    """Return log p(output | prompt) under the target, in nats; equal texts are scored once."""
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    scores: dict[str, list[float]] = {}
    with progress("scoring", sum(map(len, results.values()))) as advance:
        for name, generations in results.items():
            scores[name] = []
            for g in generations:
                key = (tuple(g.started.prompt_token_ids), tuple(g.token_ids))
                if key not in known:
                    known[key] = await asyncio.to_thread(reference.log_likelihood, *key)
                scores[name].append(known[key])
                advance()
    return scores


def report(
    group: Group,
    results: Results,
    scores: Mapping[str, Sequence[float]] | None = None,
    first: str = PLAIN,
) -> list[ConditionReport]:
    """Summarize each condition, compared with the one named `first`.

    `scores` are the log-likelihoods of the texts, if known.
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
    """Return whether the text has the known answer of the prompt at `index`."""
    answer = extract_answer(generation.text, group.strict)
    return answer is not None and answer == group.prompts[index].reference


def to_samples(
    group: Group, results: Results, scores: Mapping[str, Sequence[float]] | None = None
) -> list[dict[str, Any]]:
    """Return each text for JSON: tokens, origins, speculation metrics, and quality."""
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
            "speculation": g.completion.speculation,
        }
        for name, of in results.items()
        for i, g in enumerate(of)
    ]


def _rule_document(generation: Generation) -> dict[str, Any]:
    """Return the rule with the parameters it has, and enums by name."""
    parameters = asdict(generation.started.rule).items()
    return {k: getattr(v, "name", v) for k, v in parameters if v not in (None, ())}


def _repeats_itself(generation: Generation) -> bool:
    """Return whether the loop guard took effect, or would have if it was off."""
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
    total = _sum([g.completion.speculation for g in of])
    tokens = sum(g.completion.completion_tokens for g in of)
    rounds, steps = max(1, total.num_rounds), max(1, total.num_spec_steps)
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
        mean_acceptance_length=total.mean_acceptance_length,
        loose_tokens=total.num_loose_tokens,
        loose_share=total.num_loose_tokens / max(1, tokens),
        loose_cost_nats=total.loose_cost_nats,
        mean_loose_gap_nats=total.mean_loose_gap_nats,
        rejected_tokens=total.num_rejected_tokens,
        mean_rejected_gap_nats=total.mean_rejected_gap_nats,
        rollbacks=total.num_rollbacks,
        loops=sum(_repeats_itself(g) for g in of),
        distribution_bytes_per_round=total.distribution_bytes / steps,
        round_bytes_per_round=total.round_bytes / rounds,
        same_as_plain=sum(g.token_ids == p.token_ids for g, p in zip(of, plain, strict=False)),
        cut_off=sum(g.completion.finish_reason.name == "LENGTH" for g in of),
    )


def _sum(metrics: Sequence[SpeculationMetrics]) -> SpeculationMetrics:
    """Add them up, except for the histogram."""
    names = {f.name for f in fields(SpeculationMetrics)} - {"acceptance_histogram"}
    return SpeculationMetrics(**{name: sum(getattr(m, name) for m in metrics) for name in names})

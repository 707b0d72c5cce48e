"""How right: answers of each rule to problems whose answers are known.

Recovery is accuracy under a rule over accuracy of plain decoding.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.prompts import Group, to_request
from flyspec.cli.prompts import normal_number
from flyspec.client import Client, GenerateOptions, Generation
from flyspec.types import Rule

PLAIN = "plain"

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*\$?({_NUMBER})")
_ANY = re.compile(_NUMBER)
_LAST_LINE = re.compile(rf"(?:\A|\n)#### ({_NUMBER})\s*\Z")


@dataclass(frozen=True)
class Condition:
    """A way to generate; without `num_speculative_tokens` with the K of the run."""

    name: str
    rule: Rule
    num_speculative_tokens: int | None = None


CONDITIONS = (
    Condition(PLAIN, Rule("exact"), 0),
    Condition("exact", Rule("exact")),
    Condition("fly", Rule("fly")),
    Condition("fly, W = 0", Rule("fly", fly_window_size=0)),
)


@dataclass(frozen=True)
class AccuracyReport:
    """A condition over all problems."""

    condition: str
    problems: int
    correct: int
    accuracy: float
    recovery: float | None
    mean_accepted_tokens: float
    mean_acceptance_length: float
    loose_share: float
    loose_cost_nats: float
    same_as_plain: int
    cut_off: int


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


async def evaluate(
    client: Client,
    group: Group,
    conditions: Sequence[Condition] = CONDITIONS,
    *,
    num_speculative_tokens: int = 15,
    max_tokens: int = 256,
    drafter: str = "",
    chat: bool | None = None,
    concurrency: int = 8,
    on_result: Callable[[], None] = lambda: None,
) -> list[AccuracyReport]:
    """Solve every problem under every condition, `concurrency` at once."""
    gate = asyncio.Semaphore(concurrency)

    async def solve(condition: Condition, index: int) -> Generation:
        k = condition.num_speculative_tokens
        options = GenerateOptions(
            max_tokens=max_tokens,
            drafter=drafter,
            rule=condition.rule,
            num_speculative_tokens=num_speculative_tokens if k is None else k,
        )
        async with gate:
            generation = await client.complete(to_request(group.prompts[index], chat), options)
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
    return _report(group, {name: [task.result() for task in of] for name, of in tasks.items()})


def to_document(reports: Sequence[AccuracyReport], **facts: Any) -> dict[str, Any]:
    """The report as JSON."""
    return {**facts, "conditions": [asdict(r) for r in reports]}


def _report(group: Group, results: dict[str, list[Generation]]) -> list[AccuracyReport]:
    def is_right(index: int, generation: Generation) -> bool:
        answer = extract_answer(generation.text, group.strict)
        return answer is not None and answer == group.prompts[index].reference

    right = {name: sum(is_right(i, g) for i, g in enumerate(of)) for name, of in results.items()}
    plain = results.get(PLAIN)
    reports = []
    for name, of in results.items():
        metrics = [g.completion.speculation for g in of]
        tokens = sum(g.completion.completion_tokens for g in of)
        steps = sum(m.num_spec_steps for m in metrics)
        reports.append(
            AccuracyReport(
                condition=name,
                problems=len(of),
                correct=right[name],
                accuracy=right[name] / len(of),
                recovery=right[name] / right[PLAIN] if right.get(PLAIN) else None,
                mean_accepted_tokens=tokens / max(1, sum(m.num_rounds for m in metrics)),
                mean_acceptance_length=1.0
                + sum(m.num_accepted_draft_tokens for m in metrics) / max(1, steps),
                loose_share=sum(m.num_loose_tokens for m in metrics) / max(1, tokens),
                loose_cost_nats=sum(m.loose_cost_nats for m in metrics) / len(of),
                same_as_plain=sum(
                    g.token_ids == p.token_ids for g, p in zip(of, plain or [], strict=False)
                ),
                cut_off=sum(g.completion.finish_reason.name == "LENGTH" for g in of),
            )
        )
    return reports

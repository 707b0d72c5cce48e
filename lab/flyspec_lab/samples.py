"""A sample: one text of a condition, with how it was made, what it is worth and what it cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from flyspec.client import Generation
from flyspec.values.generation import GenerationTimings, SpeculationMetrics
from orchestrator.generation.loop_guard import LoopGuard

KEY = (
    "task", "prompt_id", "rule", "num_speculative_tokens", "drafter", "seed", "weights_fingerprint",
)  # fmt: skip
"""The columns that say which sample a row is. Of rows with an equal key the last one counts."""


@dataclass(frozen=True)
class TaskSample:
    """One row. Its columns are these fields, and those of the dataclasses among them.

    `rule` is JSON with all parameters; `num_speculative_tokens` the requested K, null if it adapts.
    `repeat` counts the seeds of a problem; `version` is flyspec's. `error` is why
    there is no text, null if there is one; the columns after it then have no meaning. `score` is
    null where no answer is known. `log_likelihood`: raw log p(text | prompt) under the target,
    nats, if it was asked for. `loop_token_index`: number of tokens when the first loop was complete
    by the loop guard's criterion, whether the guard was on or not; null if there is none.

    `loose_gaps_nats` are the costs of a text's loosely accepted tokens, in order: raw log p(most
    likely) - log p(token), in nats. Their places are those of `origins`.
    """

    task: str
    prompt_id: str
    rule: str
    num_speculative_tokens: int | None
    drafter: str
    seed: int
    weights_fingerprint: str
    condition: str
    repeat: int
    category: str
    model: str
    version: str
    error: str | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    loop_guard_token_index: int | None = None
    score: float | None = None
    answer: str | None = None
    detail: str = ""
    log_likelihood: float | None = None
    num_tokens: int = 0
    loop_token_index: int | None = None
    loose_gaps_nats: list[float] = field(default_factory=list)
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    timings: GenerationTimings = field(default_factory=GenerationTimings)

    def row(self) -> dict[str, Any]:
        """Return the values by column."""
        found: dict[str, Any] = {}
        for name in (item.name for item in fields(self)):
            value: Any = getattr(self, name)
            nested = is_dataclass(value) and not isinstance(value, type)
            found |= asdict(value) if nested else {name: value}
        return found


def latest(rows: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the rows that count, by key."""
    return {tuple(row[name] for name in KEY): row for row in rows}


def describe(generation: Generation) -> dict[str, Any]:
    """Return the fields of a `TaskSample` that a generation tells."""
    completion = generation.completion
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "origins": [origin.name for origin in generation.origins],
        "prompt_token_ids": list(generation.started.prompt_token_ids),
        "finish_reason": completion.finish_reason.name,
        "loop_guard_token_index": completion.loop_guard_token_index,
        "loop_token_index": loop_token_index(generation.token_ids),
        "num_tokens": completion.completion_tokens,
        "loose_gaps_nats": list(generation.loose_gaps_nats),
        "speculation": completion.speculation,
        "timings": completion.timings,
    }


def loop_token_index(token_ids: Iterable[int]) -> int | None:
    """Return after how many tokens the first loop was complete, by the loop guard's criterion."""
    guard = LoopGuard()
    for token_id in token_ids:
        guard.push(token_id)
        if guard.token_index is not None:
            break
    return guard.token_index

"""A sample: one text of a condition, with how it was made, what it is worth and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from flyspec.client import Generation
from flyspec.values.generation import GenerationTimings, SpeculationMetrics
from flyspec.values.rounds import Decision, Outcome
from flyspec.values.tokens import Origin
from flyspec_lab import describe as descriptions
from flyspec_lab.describe import TextDescription
from flyspec_lab.row_files import RowFiles

KEY = (
    "task", "prompt_id", "rule", "num_speculative_tokens", "drafter", "seed", "weights_fingerprint",
)  # fmt: skip
"""The columns that say which sample a row is. Of rows with an equal key the last one counts."""

_UNDESCRIBED = TextDescription(None, None, None, None, None)
_UNKNOWN = Decision(Outcome.LOOSE)


@dataclass(frozen=True)
class LooseTokens:
    """The loosely accepted tokens of a text, in order; a column each.

    Positions count output tokens. Gaps are costs in nats: raw log p(most likely) - log p(token).
    `loose_entropies` are in the rule's own measure, NaN where it has none, and
    `loose_target_token_ids` the target's own tokens there, -1 if unknown.
    """

    loose_positions: list[int] = field(default_factory=list)
    loose_gaps_nats: list[float] = field(default_factory=list)
    loose_entropies: list[float] = field(default_factory=list)
    loose_target_token_ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, generation: Generation) -> LooseTokens:
        """Return those of a generation; the last round that accepted a position loosely counts."""
        start = len(generation.started.prompt_token_ids)
        judged = {
            record.start_length + offset - start: decision
            for record in generation.rounds
            for offset, decision in enumerate(record.decisions)
            if decision.outcome in (Outcome.LOOSE, Outcome.PROVISIONAL)
        }
        positions = [i for i, o in enumerate(generation.origins) if o is Origin.LOOSE]
        decisions = [judged.get(position, _UNKNOWN) for position in positions]
        measures = [d.measure if d.entropy is None else d.entropy for d in decisions]
        return cls(
            positions,
            list(generation.loose_gaps_nats),
            [float("nan") if m is None else m for m in measures],
            [-1 if d.target_token_id is None else d.target_token_id for d in decisions],
        )


@dataclass(frozen=True)
class TaskSample:
    """One row. Its columns are these fields, and those of the dataclasses among them.

    `rule` is JSON with all parameters; `num_speculative_tokens` the requested K, null if it adapts.
    `repeat` counts the seeds of a problem; `version` is flyspec's with its commit. `error` is why
    there is no text, null if there is one; the columns after it then have no meaning. `score` is
    null where no answer is known. `log_likelihood`: raw log p(text | prompt) under the target,
    nats, if it was asked for. `rejected_gaps_nats` are those of rejected mismatches.
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
    description: TextDescription = _UNDESCRIBED
    loose: LooseTokens = field(default_factory=LooseTokens)
    rejected_gaps_nats: list[float] = field(default_factory=list)
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


def schema_of(row_type: Any) -> pa.Schema:
    """Return the columns of a dataclass of rows; what is null in one row may be null in all."""
    columns: list[pa.Field] = []
    for name, hint in get_type_hints(row_type).items():
        if is_dataclass(hint):
            columns += schema_of(hint)
        else:
            columns.append(pa.field(name, pa.uint64() if name == "seed" else _arrow(hint)))
    return pa.schema(columns)


def _arrow(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        (hint,) = set(get_args(hint)) - {NoneType}
    if get_origin(hint) is Literal:
        return pa.string()
    if get_origin(hint) is list:
        return pa.list_(_arrow(get_args(hint)[0]))
    return {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}[hint]


SCHEMA = schema_of(TaskSample)


def latest(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the rows that count, by key."""
    return {tuple(row[name] for name in KEY): row for row in rows}


def made(files: RowFiles) -> set[tuple[Any, ...]]:
    """Return the keys of the samples that are there, without those that failed."""
    rows = latest(files.read([*KEY, "error"]).to_pylist())
    return {key for key, row in rows.items() if row["error"] is None}


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
        "description": descriptions.describe(generation.text, generation.token_ids),
        "num_tokens": completion.completion_tokens,
        "loose": LooseTokens.of(generation),
        "rejected_gaps_nats": [
            decision.gap_nats
            for record in generation.rounds
            for decision in record.decisions
            if decision.outcome is Outcome.REJECTED and decision.gap_nats is not None
        ],
        "speculation": completion.speculation,
        "timings": completion.timings,
    }

"""A sample tells what its generation told, and loops; its columns are declared by its fields."""

from __future__ import annotations

import json
from dataclasses import fields

from flyspec.client import Chunk, Completion, Generation, GenerationTimings, Started
from flyspec.client import SpeculationMetrics as Metrics
from flyspec.rules import Rule
from flyspec.values.generation import FinishReason
from flyspec.values.tokens import Origin
from flyspec_lab.samples import KEY, TaskSample, describe, latest, loop_token_index

EXACT, LOOSE = Origin.EXACT_MODEL, Origin.LOOSE


def generation(origins: list[Origin], gaps: list[float], tokens: list[int]) -> Generation:
    return Generation(
        Started("id", "target", "model", 3, [1, 2], Rule("fly"), 15),
        [Chunk("text", tokens, origins, loose_gaps_nats=gaps)],
        Completion(
            FinishReason.STOP, None, 2, len(tokens), Metrics(num_rounds=2, num_loose_tokens=1),
            GenerationTimings(total_ns=7),
        ),
        [],
    )  # fmt: skip


def sample(**known: object) -> TaskSample:
    facts = dict.fromkeys((*KEY, "condition", "category", "model", "version"), "")
    return TaskSample(**facts | {"seed": 2**64 - 1, "repeat": 0} | known)  # type: ignore[arg-type]


def test_a_row_has_every_column_and_can_be_stored() -> None:
    told = generation([EXACT, LOOSE], [0.3], [5, 8])
    row = json.loads(json.dumps(sample(score=1.0, **describe(told)).row()))
    assert row["seed"] == 2**64 - 1
    assert (row["origins"], row["loose_gaps_nats"]) == (["EXACT_MODEL", "LOOSE"], [0.3])
    assert (row["num_rounds"], row["total_ns"], row["num_loose_tokens"]) == (2, 7, 1)
    assert row["prompt_token_ids"] == [1, 2]
    declared = {f.name for kind in (Metrics, GenerationTimings) for f in fields(kind)}
    assert {*KEY, *declared} <= set(row)
    assert list(sample(error="lost").row()) == list(row)


def test_of_equal_keys_the_last_row_counts() -> None:
    rows = [sample(error="lost").row(), sample(prompt_id="b").row(), sample().row()]
    assert [row["error"] for row in latest(rows).values()] == [None, None]


def test_loops_are_found_where_they_are_complete() -> None:
    assert loop_token_index([5] * 100) == 48
    assert loop_token_index(list(range(20)) + [1, 2, 3, 4] * 20) == 20 + 48
    assert loop_token_index(list(range(32)) * 4) == 128
    assert loop_token_index(list(range(32)) * 3) is None
    assert loop_token_index([]) is None

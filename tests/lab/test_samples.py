"""A sample tells what its generation told, and loops; its columns are declared by its fields."""

from __future__ import annotations

import json
from dataclasses import fields

from flyspec.client import Chunk, Completion, Generation, GenerationTimings, Started
from flyspec.client import SpeculationMetrics as Metrics
from flyspec.rules import Rule
from flyspec.values.generation import FinishReason, RoundRecord
from flyspec.values.rounds import Decision, Outcome
from flyspec.values.tokens import Origin
from flyspec_lab.samples import KEY, TaskSample, describe, latest, loop_token_index

EXACT, LOOSE = Origin.EXACT_MODEL, Origin.LOOSE


def record(start: int, drafts: list[int], decisions: list[Decision]) -> RoundRecord:
    return RoundRecord(start, "model", drafts, decisions, start, 0, start)


def generation(
    origins: list[Origin], gaps: list[float], rounds: list[RoundRecord], tokens: list[int]
) -> Generation:
    return Generation(
        Started("id", "target", "model", 3, [1, 2], Rule("fly"), 15),
        [Chunk("text", tokens, origins, loose_gaps_nats=gaps)],
        Completion(
            FinishReason.STOP, None, 2, len(tokens), Metrics(num_rounds=2, num_loose_tokens=1),
            GenerationTimings(total_ns=7),
        ),
        rounds,
    )  # fmt: skip


def match(token: int) -> Decision:
    return Decision(Outcome.EXACT, token)


def loose(found: dict[str, object]) -> tuple[object, ...]:
    names = "positions", "gaps_nats", "entropies", "target_token_ids"
    return tuple(found[f"loose_{name}"] for name in names)


def test_loose_tokens_are_found_in_their_rounds() -> None:
    # The prompt has 2 tokens. Round 1 accepts 5, rejects 6; round 2 accepts 8 loosely, then 9.
    rounds = [
        record(2, [5, 6], [match(5), Decision(Outcome.REJECTED, 7, 0.1, 4.5)]),
        record(4, [8, 9], [Decision(Outcome.LOOSE, 11, 0.6, 0.2), match(9)]),
    ]
    found = describe(
        generation([EXACT, Origin.CORRECTION, LOOSE, EXACT], [0.2], rounds, [5, 7, 8, 9])
    )
    assert loose(found) == ([2], [0.2], [0.6], [11])
    assert found["rejected_gaps_nats"] == [4.5]


def test_the_round_that_decided_last_counts() -> None:
    # Position 3 was provisional, rolled back with its window, and accepted again later.
    rounds = [
        record(2, [5, 6], [match(5), Decision(Outcome.PROVISIONAL, 7, None, 0.1, measure=0.1)]),
        record(3, [8, 9], [Decision(Outcome.PROVISIONAL, 7, None, 0.3, measure=0.3), match(9)]),
    ]
    found = describe(generation([EXACT, LOOSE, EXACT], [0.3], rounds, [5, 8, 9]))
    assert loose(found) == ([1], [0.3], [0.3], [7])


def test_what_no_round_tells_is_unknown() -> None:
    found = describe(generation([LOOSE], [0.3], [], [8]))
    assert loose(found) == ([0], [0.3], [None], [None])


def sample(**known: object) -> TaskSample:
    facts = dict.fromkeys((*KEY, "condition", "category", "model", "version"), "")
    return TaskSample(**facts | {"seed": 2**64 - 1, "repeat": 0} | known)  # type: ignore[arg-type]


def test_a_row_has_every_column_and_can_be_stored() -> None:
    told = generation([EXACT, LOOSE], [0.3], [], [5, 8])
    row = json.loads(json.dumps(sample(score=1.0, **describe(told)).row()))
    assert row["seed"] == 2**64 - 1
    assert row["origins"] == ["EXACT_MODEL", "LOOSE"]
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

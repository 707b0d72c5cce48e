"""`flyspec bench round`: the parts of a round, from spans and from a stack."""

from __future__ import annotations

import pytest

from flyspec_lab.bench.rounds import PARTS, TracedSpan, summary, timed_rounds
from tests.cli.processes import invoke


def span(name: str, own: str, parent: str, begin: float, end: float, **facts: object) -> TracedSpan:
    attributes = {f"flyspec.{key}": value for key, value in facts.items()}
    return TracedSpan(name, "trace", own, parent, begin, end, attributes)


SPANS = [
    span("round", "a", "chat", 0, 50, num_draft_tokens=4),
    span("round", "b", "chat", 40, 150, num_draft_tokens=8),
    # Begun before the round, so that only its end is a part of it.
    span("draft", "b1", "b", 40, 70),
    span("propose", "b2", "b1", 42, 66, model_s=0.010, queue_s=0.002),
    span("verify", "b3", "b", 72, 148),
    span("check", "b4", "b3", 75, 145, forward_s=0.060, judge_s=0.003, queue_s=0.001),
    span("round", "c", "chat", 60, 150, abandoned=True),
]


def test_a_round_begins_with_the_end_of_the_one_before_and_its_parts_add_up() -> None:
    (round_,) = timed_rounds(SPANS)
    assert (round_.num_drafts, round_.ms) == (8, 100)
    parts = dict(zip(PARTS, round_.parts, strict=True))
    assert parts == pytest.approx(
        {"draft model": 10, "target model": 60, "judging": 3, "messages": 10,
         "waiting for a model": 3, "other": 14}
    )  # fmt: skip
    found = summary([round_])
    assert found["messages"] == {"median_ms": 10, "p90_ms": 10, "share": pytest.approx(0.1)}
    assert found["round"]["median_ms"] == sum(parts.values())


def test_of_drafts_made_ahead_only_what_the_round_waited_for_counts() -> None:
    ahead = [
        *SPANS[:2],
        span("draft", "b1", "b", 20, 55),
        span("propose", "b2", "b1", 20, 53, model_s=0.030),
    ]
    (round_,) = timed_rounds(ahead)
    assert round_.parts[PARTS.index("draft model")] == 3
    assert round_.parts[PARTS.index("messages")] == 2


@pytest.mark.slow
def test_the_command_ends_without_a_traceback_under_a_rule_with_windows() -> None:
    done = invoke("bench", "round", "--rule", "fly", "--problems", "2", "--json")
    assert (done.code, "Traceback" in done.err) == (0, False)
    (document,) = done.documents
    assert document["num_rounds"] > 0
    assert [*document["parts"]] == [*PARTS, "round"]


def test_flags_belong_behind_the_name() -> None:
    refused = invoke("bench", "--max-tokens", "5", "round")
    assert refused.code == 2
    assert "put flags behind `round`" in refused.err

"""Classes of tokens, and reports of forks; making them is tested with `flyspec eval`."""

from __future__ import annotations

from typing import Any

import pytest

from flyspec_lab.forks import report, token_class
from flyspec_lab.statistics import exact_interval


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" 12", "digit"), ("3rd", "digit"), (" the", "word"), ("Ł", "word"), ("数学", "word"),
        ("'s", "word"), (".\n", "punctuation"), (" + ", "punctuation"), ("$", "punctuation"),
        ("\n\n", "whitespace"), (" ", "whitespace"), ("", "other"), ("\x00", "other"),
        ("😀", "punctuation"),
    ],
)  # fmt: skip
def test_a_token_has_the_class_of_its_most_telling_character(text: str, kind: str) -> None:
    assert token_class(text) == kind


def fork(score: float, target_score: float, **known: Any) -> dict[str, Any]:
    facts = {"condition": "fly", "token_class": "word", "gap_nats": 0.1, "entropy": 0.5,
             "same_rest": False}  # fmt: skip
    return {**facts, "score": score, "target_score": target_score, **known}


def test_flips_are_counted_by_group() -> None:
    forks = [
        fork(0.0, 1.0, token_class="digit", gap_nats=2.0, entropy=1.0),
        fork(1.0, 1.0, gap_nats=0.1, same_rest=True),
        fork(1.0, 0.0, gap_nats=0.2),
        fork(0.0, 0.0, gap_nats=0.3, entropy=float("nan")),
    ]
    found = report(forks)
    every = found[0]
    assert (every.group, every.forks, every.harmful, every.helpful) == ("all", 4, 1, 1)
    assert every.other_rest == 0.75
    assert (every.low, every.high) == exact_interval(1, 4)
    by = {(r.by, r.group): r for r in found}
    assert by["class", "digit"].harmful_rate == 1.0
    assert (by["class", "word"].forks, by["class", "word"].harmful) == (3, 0)
    gaps = [r for r in found if r.by == "gap, nats"]
    assert [r.forks for r in gaps] == [1, 1, 1, 1]
    assert [r.harmful for r in gaps] == [0, 0, 0, 1]
    assert not [r for r in found if r.by == "entropy"]  # three are too few for quarters
    assert not [r for r in found if r.by == "condition"]  # there is one


def test_no_forks_say_nothing() -> None:
    assert report([]) == []

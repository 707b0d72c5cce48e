"""Shell completion: rules, drafters of a running stack, nothing where none answers."""

from __future__ import annotations

import time

import pytest

from flyspec.cli.stack import Stack
from flyspec.drafter_names import DRAFTER_KINDS, NEED_DATASTORE
from tests.cli.processes import ENVIRONMENT, forked


def completed(line: str) -> list[str]:
    """Return what bash is told after this line, by a process without torch."""
    words = f"flyspec {line}"
    known = {"_FLYSPEC_COMPLETE": "complete_bash", "COMP_WORDS": words,
             "COMP_CWORD": str(len(words.split(" ")) - 1)}  # fmt: skip
    done = forked(environment=ENVIRONMENT | known)
    assert not done.err
    return done.out.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ch", ["chat"]),
        ("generate --rule fly", ["fly", "fly-paper", "fly-reference"]),
        ("eval --rules exact,fu", ["exact,fuzzy", "exact,fuzzy-reference"]),
        ("eval --rules exact,ex", []),
        ("chat --color a", ["auto", "always"]),
        ("bench --rep", ["--repeats"]),
    ],
)
def test_commands_flags_and_rules(line: str, found: list[str]) -> None:
    assert completed(line) == found


def test_drafters_are_asked_of_the_server(stack: Stack) -> None:
    line = f"generate --address {stack.address} --drafter "
    assert set(completed(line)) == set(DRAFTER_KINDS) - NEED_DATASTORE
    line = f"drafters activate --admin-address {stack.admin_address} mu"
    assert completed(line) == ["multi_level"]


def test_where_nothing_answers_there_is_nothing() -> None:
    began = time.perf_counter()
    assert completed("generate --address 127.0.0.1:1 --drafter ") == []
    assert completed("generate --address 203.0.113.1:1 --drafter ") == []  # never answers
    assert time.perf_counter() - began < 60

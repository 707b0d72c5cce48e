"""Drafters without a model: what their sources guess, learn and share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.retrieval import RetrievalSession
from draft_service.server import offered
from flyspec.datastore.build import build
from flyspec.datastore.store import Datastore
from flyspec.lookup import recycling, shared
from flyspec.lookup.recycling import Recycled
from flyspec.lookup.shared import FinishedTexts, Scopes
from flyspec.values.rounds import DraftOpen, TopTokens
from flyspec.values.tokens import Drafted, Origin, SamplingParams

GREEDY = SamplingParams()


def opened(
    kind: str, tokens: Sequence[int], datastore: Datastore | None = None, scope: str = ""
) -> RetrievalSession:
    found = {d.info.name: d for d in offered(None, (), datastore, 0)}[kind]
    session = found.open(DraftOpen(tokens, GREEDY, 0, sharing_scope=scope))
    assert isinstance(session, RetrievalSession)
    return session


def proposed(session: RetrievalSession, most: int) -> list[int]:
    items = [*session.propose(most)]
    assert len(items) <= 1
    return [*items[0].token_ids] if items and isinstance(items[0], Drafted) else []


# --- token recycling ------------------------------------------------------------------------


def test_recycling_follows_the_targets_first_candidates() -> None:
    session = opened("token_recycling", [1, 2, 3])
    session.learn(TopTokens([2, 3, 4, 5], [4, 9, 5, 8, 6, 7]))
    assert proposed(session, 8) == [4, 5, 6]
    session.move(3, [7])
    assert proposed(session, 8) == []
    session.learn(TopTokens([3, 7], [3, 1]))
    session.move(4, [])
    assert proposed(session, 3) == [3, 7, 1]  # the text itself had 7 after 3


def test_recycling_takes_the_next_candidate_where_it_has_been() -> None:
    recycled = Recycled()
    recycled.learn(TopTokens([0, 1, 2], [2, 3, 1, 4]))
    assert recycled.chain([0, 1], 6) == ([2, 1, 2, 4], (), 2)
    assert recycled.chain([5, 1], 3) == ([2, 1, 2], (), 1)
    assert recycled.chain([9], 3) == recycled.chain([], 3) == ([], (), 0)


def test_recycling_learns_from_texts_and_forgets_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recycling, "MAX_CONTEXTS", 8)
    recycled = Recycled()
    recycled.read([1, 2, 3, 4, 5])
    assert recycled.chain([1, 2], 2)[0] == [3, 4]
    recycled.read([*range(10, 20)])
    assert recycled.chain([1, 2], 2)[0] == []
    assert recycled.chain([17, 18], 2)[0] == [19]


@given(st.lists(st.integers(0, 5), max_size=60))
def test_recycling_of_a_text_is_its_latest_pair(tokens: list[int]) -> None:
    """The first token of a chain is what last followed these two tokens, else the last one."""
    recycled = Recycled()
    recycled.read(tokens)
    for before in range(6):
        for token in range(6):
            after_both = [
                tokens[i + 2]
                for i, pair in enumerate(pairwise(tokens[:-1]))
                if pair == (before, token)
            ]
            after_one = [tokens[i + 1] for i in range(1, len(tokens) - 1) if tokens[i] == token]
            expected = after_both[-1:] or after_one[-1:]
            assert recycled.chain([before, token], 1)[0] == expected


# --- sharing --------------------------------------------------------------------------------


def test_outputs_of_a_scope_serve_its_other_sessions() -> None:
    drafters = {d.info.name: d for d in offered(None, (), None, 0)}

    def run(scope: str, tokens: Sequence[int], output: Sequence[int]) -> list[int]:
        session = drafters["prompt_lookup"].open(DraftOpen(tokens, GREEDY, 0, sharing_scope=scope))
        assert isinstance(session, RetrievalSession)
        found = proposed(session, 4)
        session.move(len(tokens), output)
        proposed(session, 4)
        session.close()
        return found

    assert run("a", [90, 91], [1, 2, 3, 4, 5, 6, 7, 8]) == []
    assert run("a", [50, 2, 3, 4, 5], [60]) == [6, 7, 8]
    assert run("b", [50, 2, 3, 4, 5], [60]) == run("", [50, 2, 3, 4, 5], [60]) == []
    assert run("a", [90, 91], [61]) == []  # a prompt is nobody else's
    assert run("a", [2, 3, 4, 5, 9, 2, 3, 4, 5], []) == [9, 2, 3, 4]  # no longer than its own


def test_shared_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_TEXT_TOKENS", 40)
    texts = FinishedTexts()
    for first in range(0, 400, 10):
        texts.add(range(first, first + 10))
    assert texts.find([390, 391, 392, 393], 3) == ([394, 395, 396], 4)
    assert texts.find([380, 381, 382, 383, 384, 385, 386, 387], 8) == ([388, 389], 8)
    assert texts.find([0, 1, 2, 3], 3) == ([], 0)
    monkeypatch.setattr(shared, "MAX_SCOPES", 2)
    scopes = Scopes()
    first = scopes.get("a")
    assert scopes.get("a") is first
    assert scopes.get("") is None
    scopes.get("b")
    assert scopes.get("a") is first
    scopes.get("c")
    assert scopes.get("b") is not None
    assert scopes.get("a") is not first  # b's return displaced it


# --- a datastore ----------------------------------------------------------------------------


def test_rest_drafts_from_its_datastore(tmp_path: Path) -> None:
    texts = [[1, 2, 3, 4, 5], [9, 2, 3, 4, 6], [8, 2, 3, 4, 6]]
    build(tmp_path / "store", texts, "print", 100)
    store = Datastore(tmp_path / "store")
    session = opened("rest", [7, 2, 3], store)
    (drafted,) = session.propose(8)
    assert isinstance(drafted, Drafted)
    assert drafted.token_ids == [4, 6]
    assert drafted.origins == [Origin.EXACT_LOOKUP] * 2
    assert [*drafted.confidences] == [0.75, 2 / 4]
    session.move(3, [])
    (drafted,) = session.propose(8, 0.7)
    assert drafted.token_ids == [4, 6]  # up to the token that makes it too unsure
    session.move(3, [])
    (drafted,) = session.propose(8, 0.8)
    assert drafted.token_ids == [4]
    (composed,) = [d for d in offered(None, (), store, 0) if d.info.kind == "composed"]
    assert composed.info.tokenizer_fingerprint == "print"

"""Prompt lookup against a search written from the definition."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flyspec.lookup import PromptLookup
from flyspec.lookup.ngrams import MAX_PLACES


def brute_force(tokens: list[int], max_tokens: int, low: int, high: int) -> list[int]:
    """Longest suffix n-gram first, latest earlier place first, copying token by token.

    Of the latest places of the longest n-gram, the one with the most agreeing tokens before it.
    """
    for n in range(high, low - 1, -1):
        places = [p for p in range(len(tokens) - 1, n - 1, -1) if tokens[p - n : p] == tokens[-n:]]
        if n < len(tokens) and places:
            best = places[0]
            if n == high:
                best = max(places[:MAX_PLACES], key=lambda place: agreement(tokens, place))
            text = list(tokens)
            for i in range(max_tokens):
                text.append(text[best + i])
            return text[len(tokens) :]
    return []


def agreement(tokens: list[int], place: int) -> int:
    pairs = zip(reversed(tokens[:place]), reversed(tokens), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


token_lists = st.lists(st.integers(0, 3), max_size=40)


@given(token_lists, st.integers(0, 20), st.integers(1, 3), st.integers(0, 3))
def test_equals_brute_force(tokens: list[int], k: int, low: int, more: int) -> None:
    lookup = PromptLookup(tokens, min_ngram=low, max_ngram=low + more)
    assert lookup.propose(k) == brute_force(tokens, k, low, low + more)


class Rollback(RuleBasedStateMachine):
    """Any order of appending and truncating leaves what building from scratch gives."""

    @initialize(tokens=token_lists, low=st.integers(1, 2), more=st.integers(0, 3))
    def build(self, tokens: list[int], low: int, more: int) -> None:
        self.tokens, self.low, self.high = tokens, low, low + more
        self.lookup = PromptLookup(tokens, min_ngram=low, max_ngram=self.high)

    @rule(tokens=token_lists)
    def extend(self, tokens: list[int]) -> None:
        self.tokens = self.tokens + tokens
        self.lookup.extend(tokens)

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        length = round(share * len(self.tokens))
        self.tokens = self.tokens[:length]
        self.lookup.truncate(length)

    @rule(k=st.integers(0, 12))
    def propose(self, k: int) -> None:
        assert self.lookup.propose(k) == brute_force(self.tokens, k, self.low, self.high)

    @invariant()
    def index_is_that_of_a_fresh_one(self) -> None:
        if hasattr(self, "lookup"):
            fresh = PromptLookup(self.tokens, min_ngram=self.low, max_ngram=self.high)
            assert vars(self.lookup._index) == vars(fresh._index)
            assert list(self.lookup.token_ids) == self.tokens
            assert len(self.lookup) == len(self.tokens)


TestRollback = Rollback.TestCase


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="min_ngram"):
        PromptLookup(min_ngram=3, max_ngram=2)
    with pytest.raises(ValueError, match="cannot keep 3 of 2"):
        PromptLookup([1, 2]).truncate(3)

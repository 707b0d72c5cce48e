"""Prompt lookup against a search written from the definition."""

import itertools

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flyspec.lookup import PromptLookup
from flyspec.lookup.ngrams import MAX_NGRAM, MAX_PLACES
from flyspec.lookup.prompt import MIN_NGRAM


def brute_force(tokens: list[int], max_tokens: int) -> list[int]:
    """Longest suffix n-gram first, latest earlier place first, copying token by token.

    Of the latest places of the longest n-gram, the one with the most agreeing tokens before it.
    """
    for n in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        places = [p for p in range(len(tokens) - 1, n - 1, -1) if tokens[p - n : p] == tokens[-n:]]
        if n < len(tokens) and places:
            best = places[0]
            if n == MAX_NGRAM:
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


@given(token_lists, st.integers(0, 20))
def test_equals_brute_force(tokens: list[int], k: int) -> None:
    assert PromptLookup(tokens).propose(k) == brute_force(tokens, k)


class Rollback(RuleBasedStateMachine):
    """Any order of appending and truncating leaves what building from scratch gives."""

    @initialize(tokens=token_lists)
    def build(self, tokens: list[int]) -> None:
        self.tokens, self.lookup = tokens, PromptLookup(tokens)

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
        assert self.lookup.propose(k) == brute_force(self.tokens, k)

    @invariant()
    def index_is_that_of_a_fresh_one(self) -> None:
        if hasattr(self, "lookup"):
            assert vars(self.lookup) == vars(PromptLookup(self.tokens))
            assert self.lookup.token_ids == self.tokens
            assert len(self.lookup) == len(self.tokens)


TestRollback = Rollback.TestCase

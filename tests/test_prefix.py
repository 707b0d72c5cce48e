"""A truncated sequence hashes like one that was never longer."""

from hypothesis import given
from hypothesis import strategies as st

from flyspec.prefix import TokenSequence

tokens = st.lists(st.integers(0, 200_000), max_size=30)


@given(tokens, tokens, st.data())
def test_hash_depends_on_content_only(first, second, data):
    sequence = TokenSequence(first)
    keep = data.draw(st.integers(0, len(first)))
    sequence.keep(keep)
    sequence.extend(second)
    fresh = TokenSequence([*first[:keep], *second])
    assert sequence.tokens == fresh.tokens
    assert sequence.hash == fresh.hash != 0
    assert len(sequence) == keep + len(second)


@given(tokens, tokens)
def test_other_content_hashes_otherwise(first, second):
    assert (TokenSequence(first).hash == TokenSequence(second).hash) == (first == second)

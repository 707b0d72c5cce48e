"""Streamed text equals the whole text: nothing is split, leaked or lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flyspec.values.generation import FinishReason
from flyspec.values.tokens import Origin
from orchestrator.generation.output import Output, held_back
from orchestrator.generation.plan import OutputLimits
from orchestrator.generation.window import Commit, Token
from tests.examples import examples
from tests.orchestrator.tokenizer import TOKENIZER


def run(token_ids, splits, max_tokens=1000, stop=(), ignore_eos=False):
    """Push in the pieces that `splits` cuts; texts of all pieces, tokens sent, the output."""
    limits = OutputLimits(max_tokens, stop=tuple(stop), ignore_eos=ignore_eos)
    output = Output(TOKENIZER, limits)
    texts, sent, at = [], [], 0
    for end in [*splits, len(token_ids)]:
        if end > at and output.finish_reason is None:
            update = output.apply([Commit([Token(t, Origin.PLAIN) for t in token_ids[at:end]])])
            assert len(update.texts) == len(update.tokens)
            assert update.final == update.tokens
            assert update.retraction is None
            texts += update.texts
            sent += [token.token_id for token in update.tokens]
            at = end
    return texts, sent, output


ids = st.lists(st.integers(3, 399), min_size=1, max_size=60)
texts = st.text(min_size=1, max_size=40)


@given(texts, st.data())
def test_characters_are_never_split(text, data):
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    splits = sorted(data.draw(st.lists(st.integers(0, len(token_ids)))))
    pieces, sent, output = run([*token_ids, 1], splits)
    assert "".join(pieces) == text
    assert all("\ufffd" not in p for p in pieces) or "\ufffd" in text
    assert sent == [*token_ids, 1]
    assert output.finish_reason is FinishReason.STOP


@given(ids, st.data())
def test_any_tokens_give_the_decoded_text(token_ids, data):
    splits = sorted(data.draw(st.lists(st.integers(0, len(token_ids)))))
    limit = data.draw(st.integers(1, len(token_ids)))  # in the middle of a character, or not
    pieces, sent, output = run(token_ids, splits, max_tokens=limit)
    assert "".join(pieces) == TOKENIZER.decode(token_ids[:limit])
    assert sent == token_ids[:limit]
    assert output.finish_reason is FinishReason.LENGTH


@settings(max_examples=examples(100))
@given(
    st.text(alphabet="abc ", min_size=1, max_size=40),
    st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_stop_strings_anywhere(text, stop, data):
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    splits = sorted(data.draw(st.lists(st.integers(0, len(token_ids)))))
    pieces, _, output = run([*token_ids, 1], splits, stop=stop)
    # The stop string that is complete first ends the output; ties go to the earliest start.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    streamed = "".join(pieces)
    if not ends:
        assert streamed == text
        assert output.stop_reason is None
    else:
        assert output.finish_reason is FinishReason.STOP
        assert output.stop_reason in stop
        assert text.startswith(streamed + output.stop_reason)
        assert not any(s in streamed for s in stop)


@given(
    st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1), max_size=3)
)
def test_held_back_is_the_longest_beginning_of_a_stop_string(text, stop):
    proper = [
        n
        for n in range(len(text) + 1)
        for s in stop
        if n < len(s) and s[:n] == text[len(text) - n :]
    ]
    assert held_back(text, stop) == max(proper, default=0)


def test_nothing_after_the_end_of_sequence():
    token_ids = TOKENIZER.encode("The cat", add_special_tokens=False)
    pieces, sent, output = run([*token_ids, 1, *token_ids], [2])
    assert "".join(pieces) == "The cat"
    assert sent == [*token_ids, 1]
    assert output.finish_reason is FinishReason.STOP
    pieces, sent, output = run([*token_ids, 1, *token_ids], [2], ignore_eos=True)
    assert "".join(pieces) == "The catThe cat"
    assert output.finish_reason is None

"""Random moves and proposals of a translated session equal recomputing everything.

The draft's session holds what it was told, and that says what the target's tokens say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draft_service.drafters.base import Drafting
from draft_service.drafters.translated import TranslatedSession
from draft_service.translation import Alignment
from draft_service.translation.stream import CONTROL
from flyspec.values.admin import DrafterInfo, ModelInfo
from flyspec.values.rounds import DistributionSpec, DraftOpen
from flyspec.values.tokens import Drafted, Origin, SamplingParams, TokenDistribution
from tests.draft_service.tokenizer_zoo import (
    translator,
    units_of_draft,
    units_of_target,
    vocabulary,
)
from tests.examples import examples

WORDS = [
    "apples ",
    " =",
    "9",
    "😀",
    "e\u0301",
    "數",
    "\n\n",
    "  ",
    "Tom",
    "'s",
    "<|end|>",
    ".",
    "\x00",
]
PAIRS = [
    ("target", "bytes"),
    ("bytes", "target"),
    ("target", "byte-level"),
    ("target", "byte-fallback"),
    ("byte-fallback", "nfc"),
]


PHASES = [Phase.generate]


class Script:
    """A drafter that drafts exactly what the script says, in runs of the scripted length."""

    needs_model = True

    def __init__(self, context_length: int, vocab_size: int) -> None:
        model = ModelInfo("script", "", vocab_size, context_length)
        self.info = DrafterInfo("model", "model", model)
        self.tokens: list[int] = []
        self.drafts: list[list[int]] = []
        self.most, self.max_length = 0, context_length

    def open(self, open_: DraftOpen) -> Script:
        assert open_.token_ids
        assert open_.distribution is None
        self.tokens = list(open_.token_ids)
        return self

    @property
    def token_ids(self) -> Sequence[int]:
        return self.tokens

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        assert 0 <= keep_length <= len(self.tokens)
        del self.tokens[keep_length:]
        self.tokens += append_token_ids
        assert self.tokens

    def propose(self, max_tokens: int) -> Drafting:
        assert self.info.model is not None
        assert len(self.tokens) + max_tokens <= self.info.model.context_length
        for run in self.drafts:
            kept = run[:max_tokens]
            max_tokens -= len(kept)
            self.tokens += kept
            if kept:
                yield Drafted(kept, [Origin.EXACT_MODEL] * len(kept))

    def close(self) -> None:
        self.tokens = []


class Session(RuleBasedStateMachine):
    """A target's sequence moves and gets proposals; `target`, `draft`, `limit` are the pair's."""

    target, draft, limit = "target", "bytes", 1 << 16

    @initialize(data=st.data())
    def open(self, data: Any) -> None:
        self.pair = translator(self.target, self.draft)
        known = vocabulary(self.draft)
        self.script = Script(self.limit, known.vocab_size)
        self.model: list[int] = data.draw(self.some_tokens())
        self.session = TranslatedSession(
            self.script,
            Alignment(self.pair, self.model, self.script.max_length),
            DraftOpen(self.model, SamplingParams(), 0, distribution=DistributionSpec()),
        )
        self.held = len(self.model)

    def some_tokens(self, least: int = 1) -> Any:
        """Any tokens the target may emit: of a text, of any bytes, control tokens."""
        known = vocabulary(self.target)
        of_text = st.lists(st.sampled_from(WORDS), max_size=5).map(
            lambda words: known.encode("".join(words).encode()).ids
        )
        of_bytes = st.binary(max_size=5).map(lambda data: known.encode(data).ids)
        any_ids = st.lists(st.integers(0, known.vocab_size - 1), max_size=4)
        control = st.sampled_from([*known.control]).map(lambda i: [i])
        part = st.one_of(of_text, of_text, of_bytes, any_ids, control)
        return st.lists(part, min_size=1, max_size=3).map(
            lambda parts: [i for p in parts for i in p] or [0] * least
        )

    @rule(data=st.data())
    def move(self, data: Any) -> None:
        """Move anywhere: into the last proposal, or far back."""
        most = len(self.model)
        keep = data.draw(
            st.one_of(st.integers(0, most), st.integers(max(self.held - 2, 0), most), st.just(most))
        )
        append = data.draw(self.some_tokens(0))
        if keep + len(append) == 0:
            append = [0]
        self.session.move(keep, append)
        self.model[keep:] = append
        self.held = len(self.model)

    @rule(data=st.data(), limit=st.integers(1, 12))
    def propose(self, data: Any, limit: int) -> None:
        """Any output of the draft: text, halves of characters, control tokens, nonsense."""
        self.check_aligned()
        known = vocabulary(self.draft)
        of_text = st.lists(st.sampled_from(WORDS), max_size=6).map(
            lambda words: known.encode("".join(words).encode()).ids
        )
        any_ids = st.lists(st.integers(0, known.vocab_size + 3), max_size=6)
        self.script.drafts = data.draw(
            st.lists(st.one_of(of_text, of_text, any_ids), min_size=1, max_size=4)
        )
        drafted = [i for run in self.script.drafts for i in run]
        context = list(self.model)
        proposed: list[int] = []
        for item in self.session.propose(limit):
            assert isinstance(item, Drafted)
            assert len(item.token_ids) == len(item.origins) == len(item.distributions)
            assert set(item.distributions) == {TokenDistribution()}
            proposed += item.token_ids
        self.check_proposal(proposed, drafted, limit)
        self.model = context + proposed
        self.held = len(context)

    def check_proposal(self, proposed: list[int], drafted: list[int], limit: int) -> None:
        """It is no longer than requested, drafted text, with a control token only at the end."""
        target, draft = self.pair.target, self.pair.draft
        assert len(proposed) <= limit
        if proposed and proposed[-1] in target.control:
            assert proposed[-1] in target.eos
            proposed = proposed[:-1]
        assert all(token in target.bytes for token in proposed)
        said = b"".join(target.bytes[i] for i in proposed)
        assert b"".join(draft.bytes.get(i, b"\0") for i in drafted).startswith(said)

    @precondition(lambda self: hasattr(self, "session"))
    @invariant()
    def same_sequence(self) -> None:
        assert list(self.session.token_ids) == self.model

    def check_aligned(self) -> None:
        """The draft's session has the target's text, tokenized as a new session would."""
        assert not [*self.session.propose(0)]
        self.script.drafts = []
        assert not [*self.session.propose(1)]
        said = units_of_draft(self.pair, self.script.tokens)
        expected = units_of_target(self.pair.target, self.model)
        head = units_of_draft(self.pair, self.pair.draft.head)
        fresh = Alignment(self.pair, self.model, self.limit)
        _, made = fresh.sync(16)
        if self.limit >= 1 << 16:
            assert without_control(said) == without_control(expected)
            if self.target in ("target", "bytes") and self.draft in ("target", "bytes"):
                whole = expected if expected[:1] == head else head + expected
                assert said == whole
                if self.draft == "bytes":
                    assert self.script.tokens == made
            assert said == units_of_draft(self.pair, made)
        else:
            assert len(self.script.tokens) <= self.limit
            tail = said[len(head) :]
            assert expected[len(expected) - len(tail) :] == tail
            assert len(tail) >= min(len(expected) - 1, self.limit // 4 - 1)


def without_control(units: Sequence[int]) -> list[int]:
    """The text; new lines stand for control tokens in a draft that has none of the name."""
    return [u for u in units if 0 <= u < CONTROL and u != 0x0A]


def run(target_: str, draft_: str, limit_: int, examples: int) -> None:
    class Case(Session):
        target, draft, limit = target_, draft_, limit_

    checks = settings(
        max_examples=examples,
        stateful_step_count=20,
        suppress_health_check=list(HealthCheck),
        phases=PHASES,
    )
    Case.TestCase.settings = checks
    Case.TestCase("runTest").runTest()


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_any_moves_and_proposals(target: str, draft: str) -> None:
    run(target, draft, 1 << 16, examples(10))


@pytest.mark.parametrize(("target", "draft"), PAIRS[:2])
def test_in_a_context_that_is_too_short(target: str, draft: str) -> None:
    run(target, draft, 96, examples(10))


def test_a_draft_that_knows_little() -> None:
    """Nothing that the draft cannot express breaks anything."""

    class Case(Session):
        target, draft = "target", "printable"

        def check_aligned(self) -> None:
            self.script.drafts = []
            assert not [*self.session.propose(1)]
            known = self.pair.draft.bytes
            assert all(i in known or i in self.pair.draft.control for i in self.script.tokens)

    Case.TestCase.settings = settings(
        max_examples=examples(10), stateful_step_count=20,
        suppress_health_check=list(HealthCheck), phases=PHASES,
    )  # fmt: skip
    Case.TestCase("runTest").runTest()

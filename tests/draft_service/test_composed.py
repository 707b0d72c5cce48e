"""The composed drafter: what it chooses, what it learns, and that its session stays in order."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from draft_service.drafters import choosing
from draft_service.drafters.base import Scored
from draft_service.drafters.choosing import Chooser, expected
from draft_service.drafters.composed import MODEL, ComposedDrafter, ComposedSession
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.sources import Guess, LookupSource
from draft_service.server import offered
from flyspec.engine.loading import LoadedModel
from flyspec.engine.model import Draw
from flyspec.recent import PATIENCE, RARELY, Share
from flyspec.values.rounds import DraftOpen, TopTokens
from flyspec.values.tokens import Drafted, Origin
from tests.draft_service.draft_harness import (
    CONTEXT_LENGTH,
    EOS,
    GREEDY,
    SAMPLINGS,
    SPECS,
    VOCAB_SIZE,
    CountingRunner,
    drive,
    drive_all,
)
from tests.examples import examples


def composed(runner: CountingRunner | None) -> ComposedDrafter:
    found = {d.info.name: d for d in offered(runner, (EOS,), None, CONTEXT_LENGTH)}["composed"]
    assert isinstance(found, ComposedDrafter)
    return found


# --- what is learned ------------------------------------------------------------------------


def test_expected_tokens() -> None:
    assert expected(0.5, 3) == pytest.approx(0.5 + 0.25 + 0.125)
    assert expected(1.0, 3) == 3.0
    assert expected(0.0, 3) == expected(0.7, 0) == 0.0


def test_a_chooser_learns_from_its_sequence_and_from_others() -> None:
    others: choosing.Evidence = {}
    first = Chooser(others)
    assert first.chance("a") == choosing.PRIOR
    for _ in range(50):
        first.followed("a", [1, 2, 3], [1, 2, 3, 4])
        first.followed("b", [1, 2, 3], [9])
        first.followed("c", [1, 2, 3], [])  # nothing is known of it
    assert first.chance("a") > 0.95 > 0.1 > first.chance("b")
    assert first.chance("c") == choosing.PRIOR
    second = Chooser(others)
    assert second.chance("a") > 0.9
    for _ in range(20):
        second.followed("a", [1], [2])
    assert second.chance("a") < 0.6 < 0.8 < Chooser(others).chance("a")  # its own sequence counts


def test_a_rounds_worth_counts_the_models_time() -> None:
    chooser = Chooser({})
    assert chooser.worth(2.0, 8) > chooser.worth(1.0, 0)  # no times are known
    chooser.rested(4_000)
    chooser.drafted(8, 16_000)
    assert (chooser.rest_ns, chooser.token_ns) == (4_000, 2_000)
    assert chooser.worth(3.0, 0) == pytest.approx(4 / 4_000)
    assert chooser.worth(3.0, 8) == pytest.approx(4 / 20_000)
    chooser.drafted(0, 5)
    chooser.rested(9_000)
    assert chooser.rest_ns == pytest.approx(5_000)


# --- what is chosen -------------------------------------------------------------------------


def rounds(
    runner: CountingRunner, session: Any, text: Sequence[int], start: int, most: int
) -> list[list[Origin]]:
    """Let the session draft a text that it is told after each proposal; return all origins."""
    told, chosen = start, []
    while told < len(text):
        tokens, origins = drive(runner, session, most)
        right = 0
        while right < len(tokens) and text[told + right : told + right + 1] == [tokens[right]]:
            right += 1
        chosen.append(origins)
        session.move(told + right, text[told + right : told + right + 1])
        told += right + 1
    return chosen


def test_it_copies_where_the_text_repeats_and_draws_where_the_model_is_right(
    runner: CountingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing.Chooser, "worth", lambda self, accepted, drawn: accepted)
    drafter, period = composed(runner), [11, 12, 13, 14, 15, 16, 17, 18]
    session = drafter.open(DraftOpen(period * 2, GREEDY, 0))
    chosen = rounds(runner, session, period * 12, len(period) * 2, 6)
    assert all(set(origins) == {Origin.EXACT_LOOKUP} for origins in chosen[5:])
    session.close()
    prompt = [40, 41, 42]
    fresh = ModelDrafter(runner, []).open(DraftOpen(prompt, GREEDY, 0))
    text = [*prompt, *drive(runner, fresh, 60)[0]]
    fresh.close()
    drafter = composed(runner)
    drafter._sources = []
    session = drafter.open(DraftOpen(prompt, GREEDY, 0))
    chosen = rounds(runner, session, text, len(prompt), 6)
    assert all(set(origins) == {Origin.EXACT_MODEL} for origins in chosen)
    assert len(chosen) <= 11
    session.close()
    assert runner.cache.num_free == runner.cache.num_slots


def test_a_guess_may_be_followed_by_the_model(
    runner: CountingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = composed(runner)
    drafter._evidence.update({("token_recycling", 2): Share(1e6, 1e6)})
    drafter._sources = drafter._sources[1:]
    session = drafter.open(DraftOpen([40, 41, 42], GREEDY, 0))
    session.learn(TopTokens([41, 42, 50, 51], [50, 51, 52]))
    monkeypatch.setattr(choosing.Chooser, "worth", lambda self, accepted, drawn: accepted)
    tokens, origins = drive(runner, session, 8)
    assert tokens[:3] == [50, 51, 52]
    assert origins == [Origin.EXACT_LOOKUP] * 3 + [Origin.EXACT_MODEL] * 5
    fresh = ModelDrafter(runner, []).open(DraftOpen([40, 41, 42, 50, 51, 52], GREEDY, 0))
    assert drive(runner, fresh, 5)[0] == tokens[3:]
    fresh.close()
    session.close()


def test_without_a_model_it_needs_no_engine() -> None:
    drafter = composed(None)
    assert not drafter.needs_model
    assert drafter.info.model is None
    session = drafter.open(DraftOpen([1, 2, 3, 1, 2], GREEDY, 0))
    (drafted,) = session.propose(3)
    assert isinstance(drafted, Drafted)
    assert drafted.token_ids == [3, 1, 2]
    assert len(drafted.confidences) == 3
    session.close()


def test_scores_are_the_models(runner: CountingRunner) -> None:
    session = composed(runner).open(DraftOpen([40, 41], GREEDY, 0))
    session.move(2, [42, 43])
    work = session.propose(2, 0.0, 2)
    item: Any = next(work)
    while not isinstance(item, Scored):
        assert isinstance(item, Draw)
        item = work.send(runner.draw([item])[0])
    own = []
    for tokens in ([40, 41], [40, 41, 42]):
        fresh = ModelDrafter(runner, []).open(DraftOpen(tokens, GREEDY, 0))
        own += drive(runner, fresh, 1)[0]
        fresh.close()
    assert list(item.agreements) == [own[0] == 42, own[1] == 43]
    work.close()
    session.close()


# --- any rounds -----------------------------------------------------------------------------


class AnyRounds(RuleBasedStateMachine):
    """Whatever is chosen, the model's part is what the model proposes for that sequence."""

    runner: CountingRunner
    drafter: ComposedDrafter
    session: ComposedSession

    @initialize(
        tokens=st.lists(st.integers(0, 9), min_size=1, max_size=30),
        sampling=st.sampled_from(SAMPLINGS),
        spec=st.sampled_from([None, SPECS[0]]),
    )
    def open(self, tokens: list[int], sampling: Any, spec: Any) -> None:
        self.tokens, self.key = tokens, (sampling, 5, "", 1, spec)
        session = self.drafter.open(DraftOpen(tokens, *self.key))
        assert isinstance(session, ComposedSession)
        self.session = session

    @rule(
        drop=st.integers(0, 12),
        append=st.lists(st.integers(0, 9) | st.integers(0, VOCAB_SIZE - 1), max_size=9),
        most=st.integers(0, 9),
        favour=st.sampled_from(["", MODEL, "prompt_lookup", "token_recycling"]),
        top=st.lists(st.integers(0, 9), min_size=3, max_size=6),
    )
    def advance(self, drop: int, append: list[int], most: int, favour: str, top: list[int]) -> None:
        self.session.learn(TopTokens(top, top[1:]))
        keep = max(1, len(self.tokens) - drop)
        self.session.move(keep, append)
        self.tokens = [*self.tokens[:keep], *append]
        self.session._chooser.own.clear()
        for length in range(14):
            if favour:
                for kind in (MODEL, ("prompt_lookup", length), ("token_recycling", length)):
                    right = 1e6 if favour in (kind, kind[0]) else 0.0
                    tally = Share(1e6, right)
                    self.session._chooser.own[kind] = tally
        tokens, origins, distributions = drive_all(self.runner, self.session, most)
        assert len(tokens) == len(origins) <= most
        assert len(distributions) == (0 if self.key[-1] is None else len(tokens))
        copied = origins.count(Origin.EXACT_LOOKUP)
        assert origins[copied:] == [Origin.EXACT_MODEL] * (len(tokens) - copied)
        if drawn := tokens[copied:]:
            prompt = [*self.tokens, *tokens[:copied]]
            fresh = ModelDrafter(self.runner, [EOS]).open(DraftOpen(prompt, *self.key))
            assert drive(self.runner, fresh, len(drawn))[0] == drawn
            fresh.close()
        self.tokens += tokens
        assert list(self.session.token_ids) == self.tokens

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.close()


def test_any_rounds(loaded: LoadedModel) -> None:
    runner = CountingRunner(replace(loaded, model=copy.deepcopy(loaded.model)), num_slots=2)

    class Machine(AnyRounds):
        pass

    Machine.runner, Machine.drafter = runner, composed(runner)
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples(15), stateful_step_count=10)
    )
    assert runner.cache.num_free == 2


def test_a_source_that_is_not_chosen_is_asked_now_and_then_only() -> None:
    asked: list[int] = []

    class Wrong(LookupSource):
        def guess(self, tokens: Sequence[int], max_tokens: int) -> Guess:
            asked.append(len(tokens))
            return Guess(())

    drafter = ComposedDrafter([lambda open_: Wrong()], None, 0)
    for length in range(2, 2 + PATIENCE + 3 * RARELY):  # sequences share what was learned
        session = drafter.open(DraftOpen(token_ids=[1] * length, sampling=GREEDY, seed=0))
        assert not list(session.propose(4))
    assert len(asked) == PATIENCE + 3

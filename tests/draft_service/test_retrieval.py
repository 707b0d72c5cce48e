"""Drafters that look tokens up, and the one that chooses between them and the model."""

import copy
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from draft_service.drafters.base import Scored
from draft_service.drafters.composed import MODEL, Chooser, ComposedDrafter, ComposedSession
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.retrieval import Guess, LookupSource, RetrievalSession
from draft_service.server import offered
from flyspec.datastore.build import build
from flyspec.datastore.store import Datastore
from flyspec.engine.model import Draw
from flyspec.lookup import recycling, shared
from flyspec.lookup.recycling import Recycled
from flyspec.lookup.shared import FinishedTexts, Scopes
from flyspec.recent import PATIENCE, RARELY, Share
from flyspec.values.rounds import DraftOpen, TopTokens
from flyspec.values.tokens import Drafted, Origin
from tests.draft_service.draft_harness import (
    EOS,
    GREEDY,
    SAMPLINGS,
    SPECS,
    CountingRunner,
    drive,
    drive_all,
)
from tests.examples import examples
from tests.tiny import CONTEXT_LENGTH, VOCAB_SIZE


def opened(kind, tokens, datastore=None, scope=""):
    found = {d.info.name: d for d in offered(None, (), datastore, 0)}[kind]
    session = found.open(DraftOpen(tokens, GREEDY, 0, sharing_scope=scope))
    assert isinstance(session, RetrievalSession)
    return session


def proposed(session, most):
    items = [*session.propose(most)]
    assert len(items) <= 1
    return [*items[0].token_ids] if items and isinstance(items[0], Drafted) else []


# --- token recycling ------------------------------------------------------------------------


def test_recycling_follows_the_targets_first_candidates():
    session = opened("token_recycling", [1, 2, 3])
    session.learn(TopTokens([2, 3, 4, 5], [4, 9, 5, 8, 6, 7]))
    assert proposed(session, 8) == [4, 5, 6]
    session.move(3, [7])
    assert proposed(session, 8) == []
    session.learn(TopTokens([3, 7], [3, 1]))
    session.move(4, [])
    assert proposed(session, 3) == [3, 7, 1]  # the text itself had 7 after 3


def test_recycling_takes_the_next_candidate_where_it_has_been():
    recycled = Recycled()
    recycled.learn(TopTokens([0, 1, 2], [2, 3, 1, 4]))
    assert recycled.chain([0, 1], 6) == ([2, 1, 2, 4], (), 2)
    assert recycled.chain([5, 1], 3) == ([2, 1, 2], (), 1)
    assert recycled.chain([9], 3) == recycled.chain([], 3) == ([], (), 0)


def test_recycling_learns_from_texts_and_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(recycling, "MAX_CONTEXTS", 8)
    recycled = Recycled()
    recycled.read([1, 2, 3, 4, 5])
    assert recycled.chain([1, 2], 2)[0] == [3, 4]
    recycled.read([*range(10, 20)])
    assert recycled.chain([1, 2], 2)[0] == []
    assert recycled.chain([17, 18], 2)[0] == [19]


@given(st.lists(st.integers(0, 5), max_size=60))
def test_recycling_of_a_text_is_its_latest_pair(tokens):
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


def test_outputs_of_a_scope_serve_its_other_sessions():
    drafters = {d.info.name: d for d in offered(None, (), None, 0)}

    def run(scope, tokens, output):
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


def test_shared_texts_are_bounded(monkeypatch):
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


def test_rest_drafts_from_its_datastore(tmp_path):
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


def composed(runner):
    found = {d.info.name: d for d in offered(runner, (EOS,), None, CONTEXT_LENGTH)}["composed"]
    assert isinstance(found, ComposedDrafter)
    return found


# --- what is learned ------------------------------------------------------------------------


# --- what is chosen -------------------------------------------------------------------------


def rounds(runner, session, text, start, most):
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


def test_it_copies_where_the_text_repeats_and_draws_where_the_model_is_right(runner, monkeypatch):
    monkeypatch.setattr(Chooser, "worth", lambda self, accepted, drawn: accepted)
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


def test_a_guess_may_be_followed_by_the_model(runner, monkeypatch):
    drafter = composed(runner)
    drafter._evidence.update({("token_recycling", 2): Share(1e6, 1e6)})
    drafter._sources = drafter._sources[1:]
    session = drafter.open(DraftOpen([40, 41, 42], GREEDY, 0))
    session.learn(TopTokens([41, 42, 50, 51], [50, 51, 52]))
    monkeypatch.setattr(Chooser, "worth", lambda self, accepted, drawn: accepted)
    tokens, origins = drive(runner, session, 8)
    assert tokens[:3] == [50, 51, 52]
    assert origins == [Origin.EXACT_LOOKUP] * 3 + [Origin.EXACT_MODEL] * 5
    fresh = ModelDrafter(runner, []).open(DraftOpen([40, 41, 42, 50, 51, 52], GREEDY, 0))
    assert drive(runner, fresh, 5)[0] == tokens[3:]
    fresh.close()
    session.close()


def test_without_a_model_it_needs_no_engine():
    drafter = composed(None)
    assert not drafter.needs_model
    assert drafter.info.model is None
    session = drafter.open(DraftOpen([1, 2, 3, 1, 2], GREEDY, 0))
    (drafted,) = session.propose(3)
    assert isinstance(drafted, Drafted)
    assert drafted.token_ids == [3, 1, 2]
    assert len(drafted.confidences) == 3
    session.close()


def test_scores_are_the_models(runner):
    session = composed(runner).open(DraftOpen([40, 41], GREEDY, 0))
    session.move(2, [42, 43])
    work = session.propose(2, 0.0, 2)
    item = next(work)
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

    @initialize(
        tokens=st.lists(st.integers(0, 9), min_size=1, max_size=30),
        sampling=st.sampled_from(SAMPLINGS),
        spec=st.sampled_from([None, SPECS[0]]),
    )
    def open(self, tokens, sampling, spec):
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
    def advance(self, drop, append, most, favour, top):
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

    def teardown(self):
        if hasattr(self, "session"):
            self.session.close()


def test_any_rounds(loaded):
    runner = CountingRunner(replace(loaded, model=copy.deepcopy(loaded.model)), num_slots=2)

    class Machine(AnyRounds):
        pass

    Machine.runner, Machine.drafter = runner, composed(runner)
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples(7), stateful_step_count=10)
    )
    assert runner.cache.num_free == 2


def test_a_source_that_is_not_chosen_is_asked_now_and_then_only():
    asked = []

    class Wrong(LookupSource):
        def guess(self, tokens, max_tokens):
            asked.append(len(tokens))
            return Guess(())

    drafter = ComposedDrafter([lambda open_: Wrong()], None, 0)
    for length in range(2, 2 + PATIENCE + 3 * RARELY):  # sequences share what was learned
        session = drafter.open(DraftOpen(token_ids=[1] * length, sampling=GREEDY, seed=0))
        assert not list(session.propose(4))
    assert len(asked) == PATIENCE + 3

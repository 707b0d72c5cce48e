"""Steps of proposals that run before their rounds: rows are found again, or the step runs anew."""

from __future__ import annotations

import pytest
import torch

from flyspec.engine.model import Rows, Step
from flyspec.values.rounds import HeadRequest, VerifyRound
from tests.scripted_heads import ScriptedHead
from tests.verify_service.sessions import PROMPT, answers, opening
from tests.waiting import until
from verify_service.early_steps import EarlySteps
from verify_service.heads import Heads

HEAD = HeadRequest("head", 4)
RAN = Step(2, 10, [5, 6, 7, 8], 4)
WITH_HIDDEN = RAN._replace(hidden_layers=(1,), num_hidden=4)


@pytest.fixture
def kept():
    steps = EarlySteps()
    for step in (RAN, WITH_HIDDEN._replace(slot=3)):
        hidden = tuple(torch.arange(8.0).reshape(4, 2) for _ in step.hidden_layers)
        steps.keep(step, Rows(torch.arange(12.0).reshape(4, 3), hidden), 77)
    return steps


def test_the_same_step_gets_its_rows_once(kept):
    rows = kept.take(RAN)
    assert rows is not None
    assert torch.equal(rows.logits, torch.arange(12.0).reshape(4, 3))
    assert (kept.time_ns(2), kept.time_ns(2)) == (77, 0)
    assert kept.take(RAN) is None


def test_a_step_with_fewer_drafts_gets_the_first_rows(kept):
    rows = kept.take(RAN._replace(token_ids=[5, 6], num_logits=2))
    assert rows is not None
    assert rows.logits.shape == (2, 3)
    own = WITH_HIDDEN._replace(slot=3, token_ids=[5, 6, 7], num_logits=3, num_hidden=3)
    rows = kept.take(own)
    assert rows is not None
    assert torch.equal(rows.hidden[0], torch.arange(6.0).reshape(3, 2))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [5, 6, 7, 9]}, {"token_ids": [5, 6, 7, 8, 9], "num_logits": 5},
        {"start": 9}, {"slot": 1}, {"hidden_layers": (1,)}, {"num_logits": 1},
    ],
)  # fmt: skip
def test_another_step_gets_nothing(kept, change):
    assert kept.take(RAN._replace(**change)) is None
    assert kept.time_ns(2) == 0


def test_a_forgotten_slot_has_nothing(kept):
    kept.forget(2)
    assert kept.take(RAN) is None


@pytest.fixture
def watched(engine, greedy):
    """An engine with a head that is always right, and the steps of all its forwards."""
    steps: list[Step] = []
    text = [*PROMPT, *greedy(PROMPT, 40)]
    head = ScriptedHead(lambda tokens: text[len(tokens)], 4)
    engine.heads = Heads({"head": head}, engine.info.vocab_size, engine.info.context_length, [1])
    forward = engine.model.forward

    def recorded(of):
        steps.extend(of)
        return forward(of)

    engine.model.forward = recorded
    yield engine, steps, text
    engine.model.forward = forward


async def rounds(engine, session, drafts_of, number):
    """Run rounds whose drafts are `drafts_of` each proposal; return the sequence."""
    tokens, drafts = list(PROMPT), ()
    for round_id in range(1, number + 1):
        (verdict,) = await answers(
            engine, session, VerifyRound(round_id, len(tokens), (), drafts, head=HEAD)
        )
        accepted = verdict.keep_length - len(tokens)
        tokens += [*drafts[:accepted], verdict.next_token_id]
        drafts = drafts_of(verdict.proposal.token_ids)
    return tokens


async def test_a_proposals_step_runs_once_and_before_its_round(watched):
    engine, steps, text = watched
    session = engine.open(opening(PROMPT))
    got = await rounds(engine, session, lambda drafts: drafts, 4)
    assert got == text[: len(PROMPT) + 1 + 3 * 5]
    await until(lambda: len(steps) == 5)  # the last proposal's, for a round that does not come
    assert [step.start for step in steps[1:]] == [len(PROMPT) + 5 * i for i in range(4)]
    engine.close(session)


async def test_a_round_with_other_drafts_runs_its_own_step(watched):
    engine, steps, text = watched
    session = engine.open(opening(PROMPT))
    got = await rounds(engine, session, lambda drafts: [drafts[0], 399, *drafts[2:]], 4)
    assert got == text[: len(PROMPT) + 1 + 3 * 2]
    assert len(steps) >= 1 + 3
    engine.close(session)


async def test_with_several_sessions_no_step_runs_early(watched):
    engine, steps, text = watched
    session, other = engine.open(opening(PROMPT)), engine.open(opening(PROMPT))
    got = await rounds(engine, session, lambda drafts: drafts, 3)
    assert got == text[: len(PROMPT) + 1 + 2 * 5]
    assert len(steps) == 3
    engine.close(session)
    engine.close(other)

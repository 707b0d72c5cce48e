"""A step waits for its device once, whoever is in it and whatever they ask for."""

from dataclasses import replace

import pytest

from flyspec.engine.cache_table import Claim
from flyspec.engine.loading import load_model
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.rules import Rule
from flyspec.values.rounds import VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.engine.test_captured_graphs import capture
from tests.stand_in import NAME, register
from tests.stand_in_counts import counting
from tests.verify_service.sessions import opening
from verify_service.engine import PendingRound, VerifyEngine

SESSIONS = {
    "exact": opening([5, 6, 7]),
    "fly, sampled": opening([9, 8], rule=Rule("fly"), sampling=SamplingParams(temperature=0.8)),
    "typical, truncated": opening(
        [4, 4, 4], rule=Rule("typical"), sampling=SamplingParams(temperature=1.1, top_p=0.9)
    ),
    "margin, with log-probabilities": replace(opening([3, 1], rule=Rule("margin")), logprobs=5),
    "penalised": opening([7, 7], sampling=SamplingParams(temperature=0.5, presence_penalty=0.5)),
}


@pytest.fixture(scope="module")
def engine(target_dir, loaded):
    register()
    runner = ModelRunner(
        load_model(target_dir, NAME, "float64"), 16, paging=Paging(16, attention="sdpa")
    )
    runner.accelerate(capture, compiled=False)
    runner.cache.forget()
    engine = VerifyEngine(runner, loaded.tokenizer, 64)
    engine.start()
    yield engine
    engine.stop()


def rounds_of(engine, names):
    """The work that the engine's thread runs together: a round of each session."""
    wants = []
    for number, name in enumerate(names):
        open_ = SESSIONS[name]
        session = engine.open(open_)
        drafts = [11, 12, 13, 14][: 2 + number % 3]
        round_ = VerifyRound(1, len(open_.token_ids), [], drafts)
        work = engine._rounds(session, PendingRound(round_, 0), lambda answer: None)
        wants.append((next(work), work))
    return wants


@pytest.mark.parametrize(
    "names", [["exact"] * 4, [*SESSIONS], ["margin, with log-probabilities"] * 3]
)
def test_a_step_of_rounds_waits_once(engine, names):
    wants = rounds_of(engine, names)
    steps = [want for want, _ in wants]
    cache = engine.model.cache
    claims = [Claim(want.step.slot, want.step.start, len(want.step.token_ids)) for want in steps]
    assert all(cache.make_room(claims))
    engine.run_batch(steps)  # captures
    with counting() as counts:
        found = engine.run_batch(steps)
    assert counts.reads == counts.synchronizations == 1, counts.where
    assert all(judged.verdict.start_length for judged in found)
    for _, work in wants:
        work.close()


def test_plain_decoding_waits_once_for_several_tokens(engine):
    session = engine.open(SESSIONS["exact"])
    work = engine._rounds(
        session, PendingRound(VerifyRound(1, 3, [], [], max_plain_tokens=8), 0), lambda answer: None
    )
    want = next(work)._replace(max_tokens=8)
    engine.run_batch([want])
    with counting() as counts:
        (drafted,) = engine.run_batch([want])
    assert len(drafted.token_ids) > 1
    assert counts.reads == counts.synchronizations == 1, counts.where
    work.close()

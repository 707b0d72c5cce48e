"""Several steps in one call equal the same steps one by one, wherever sequences end."""

from __future__ import annotations

import math

import pytest
import torch

from flyspec.engine.model import Draw, History, Interrupt, Step
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import Drafted, Origin, SamplingParams
from tests.engine.random_models import make_model, make_runner
from tests.scripted import ScriptedModel

GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.8, top_p=0.9)
PENALIZED = SamplingParams(0.9, repetition_penalty=1.5, presence_penalty=0.5, min_tokens=4)
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [11, 12], [21, 22, 23]]
EOS = 1


def draws(samplings: list[SamplingParams], max_tokens: int) -> list[Draw]:
    return [
        Draw(
            Step(slot, 0, prompt),
            sampling,
            seed=slot,
            history=History(prompt, len(prompt), [EOS]) if sampling.needs_history else None,
            distribution=DistributionSpec(4) if slot % 2 else None,
            max_tokens=max_tokens,
        )
        for slot, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
    ]


def one_by_one(runner, draw: Draw) -> Drafted:
    """The same draw, its tokens fed back by hand."""
    tokens, found = list(draw.step.token_ids), Drafted([], [], [])
    for _ in range(draw.max_tokens):
        fed = tokens[-1:] if found.token_ids else tokens
        history = draw.history and draw.history._replace(token_ids=list(tokens))
        step = Step(draw.step.slot, len(tokens) - len(fed), list(fed))
        (drawn,) = runner.draw([draw._replace(step=step, history=history, max_tokens=1)])
        found = Drafted(*([*a, *b] for a, b in zip(found, drawn, strict=True)))
        tokens += drawn.token_ids
    return found


@pytest.mark.parametrize("samplings", [[GREEDY] * 3, [SAMPLED] * 3, [PENALIZED, GREEDY, SAMPLED]])
def test_a_batch_of_sequences_draws_what_each_draws_step_by_step(samplings) -> None:
    model = make_model("llama")
    together = make_runner(model).draw(draws(samplings, 9))
    for draw, found in zip(draws(samplings, 9), together, strict=True):
        expected = one_by_one(make_runner(model), draw)
        assert (found.token_ids, found.origins) == (expected.token_ids, expected.origins)
        assert found.origins == [Origin.EXACT_MODEL] * 9
        assert [q.token_ids for q in found.distributions] == [
            q.token_ids for q in expected.distributions
        ]
        assert len(found.distributions) == (9 if draw.distribution else 0)


def test_sequences_end_by_themselves_and_leave_the_batch() -> None:
    model = ScriptedModel()
    wants = [
        Draw(Step(0, 0, [3]), GREEDY, max_tokens=6),
        Draw(Step(1, 0, [3]), GREEDY, max_tokens=6, stop_token_ids={5}),
        Draw(Step(2, 0, [9]), GREEDY, max_tokens=1),
        Draw(Step(3, 0, [1, 2, 3], 0), None),
    ]
    found = [list(drawn.token_ids) for drawn in model.draw(wants)]
    assert found == [[4, 5, 6, 7, 8, 9], [4, 5], [10], []]
    assert [len(steps) for steps in model.calls] == [4, 2, 1, 1, 1, 1]
    # The last token drawn was not run.
    assert model.cache.held(0) == [3, 4, 5, 6, 7, 8]


def test_an_unsure_draft_ends_behind_the_token_that_made_it_so() -> None:
    model = ScriptedModel()
    sure = math.exp(2) / (math.exp(2) + math.exp(1) + 30)  # of each token
    for bound, expected in ((sure**3 * 1.01, 3), (sure**3 * 0.99, 4), (1.0, 1), (0.0, 6)):
        draw = Draw(Step(0, 0, [3]), GREEDY, max_tokens=6, min_confidence=bound)
        (drawn,) = model.draw([draw])
        assert len(drawn.token_ids) == expected


def test_a_call_ends_when_it_may_not_go_on() -> None:
    model, interrupt = ScriptedModel(), Interrupt()
    draw = Draw(Step(0, 0, [3]), GREEDY, max_tokens=9)
    interrupt.set()
    (drawn,) = model.draw([draw], interrupt)
    assert drawn.token_ids == [4]
    interrupt.clear()
    (drawn,) = model.draw([draw], interrupt)
    assert drawn.token_ids == [4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_a_model_describes_itself() -> None:
    one, two = (make_runner(make_model("llama")) for _ in range(2))
    assert one.bytes_per_token == 0
    one.forward([Step(0, 0, [1, 2])])
    assert one.bytes_per_token * one.cache.max_length == one.cache.bytes_per_slot
    single = make_runner(make_model("llama", dtype=torch.float32))
    for runner in (one, two, single):
        runner.warm_up()
    assert one.info.numerics == two.info.numerics != single.info.numerics
    assert one.info.numerics.startswith("float64, transformers ")

"""A draft model as a head: it reads tokens alone, and its own drafts only once."""

import pytest

from flyspec.engine.draft_heads.base import HeadStep
from flyspec.engine.draft_heads.model_head import ModelHead
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from tests.scripted import ScriptedModel

TOKENS = [3, 9, 4, 4, 7]


@pytest.fixture
def head():
    return ModelHead(ScriptedModel())


def read(head):
    return [[(step.start, step.token_ids) for step in steps] for steps in head._model.calls]


def test_it_drafts_what_its_model_says(head):
    step = HeadStep(1, 0, (), TOKENS[1:], 3, first_token_id=TOKENS[0])
    (drafted,) = head.draft([step])
    assert drafted.token_ids == [8, 9, 10]
    assert len(drafted.confidences) == 3
    assert head.held(1) == len(TOKENS) + 2


def test_accepted_drafts_are_not_read_again(head):
    head.draft([HeadStep(0, 0, (), TOKENS[1:], 3, first_token_id=TOKENS[0])])
    head._model.calls.clear()
    # Two of the three drafts were accepted, and then came 20.
    (drafted,) = head.draft([HeadStep(0, 4, (), [8, 9, 20], 1, first_token_id=7)])
    assert drafted.token_ids == [21]
    assert read(head) == [[(7, [20])]]


def test_other_tokens_replace_what_it_had(head):
    head.draft([HeadStep(0, 0, (), TOKENS[1:], 3, first_token_id=TOKENS[0])])
    (drafted,) = head.draft([HeadStep(0, 4, (), [30], 2, first_token_id=7)])
    assert drafted.token_ids == [31, 0]
    assert head._model.cache.held(0) == [*TOKENS, 30, 31]


def test_a_prompt_is_read_in_pieces_without_its_last_token(head):
    (nothing,) = head.draft([HeadStep(0, 0, (), TOKENS[1:3], first_token_id=TOKENS[0])])
    assert nothing.token_ids == []
    assert head.held(0) == 2
    (drafted,) = head.draft([HeadStep(0, 2, (), TOKENS[3:], 1, first_token_id=TOKENS[2])])
    assert drafted.token_ids == [8]
    assert head._model.cache.held(0) == TOKENS


def test_sampling_stops_and_distributions_are_the_models(head):
    step = HeadStep(
        2, 0, (), [5], 9, SamplingParams(), stop_token_ids=[8],
        distribution=DistributionSpec(top_k=3), first_token_id=1,
    )  # fmt: skip
    (drafted,) = head.draft([step])
    assert drafted.token_ids == [6, 7, 8]
    assert len(drafted.distributions) == 3


def test_a_step_beyond_what_it_holds_is_refused_and_forgetting_is_a_length(head):
    head.draft([HeadStep(0, 0, (), TOKENS[1:], first_token_id=TOKENS[0])])
    head.forget(0)
    assert head.held(0) == 0
    with pytest.raises(ValueError, match="slot 0 holds 0 tokens"):
        head.draft([HeadStep(0, 4, (), [1], 1, first_token_id=7)])


def test_ids_that_stand_for_no_text_are_its_last_one(head):
    (drafted,) = head.draft([HeadStep(0, 0, (), [999], 1, first_token_id=1)])
    assert drafted.token_ids == [0]

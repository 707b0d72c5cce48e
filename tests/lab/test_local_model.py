"""A model in this process is what its service serves."""

from __future__ import annotations

import pytest

from flyspec.bundled import DRAFT, TARGET
from flyspec.config import DraftSettings, VerifySettings
from flyspec.errors import ConfigError
from flyspec.rules import Rule
from flyspec.values.chat import Chat
from flyspec.values.requests import GenerateOptions
from flyspec_lab.local_model import LocalModel
from flyspec_lab.word_problems import problems
from tests.orchestrator.stacks import start_stack

SAME = {"dtype": "auto", "threads": 1}


async def test_both_models_are_those_of_a_stack() -> None:
    target = LocalModel(VerifySettings(model=str(TARGET), **SAME))
    draft = LocalModel(DraftSettings(model=str(DRAFT), **SAME))
    prompt = Chat.of_user(problems(7, 1)[0].question)
    options = GenerateOptions(rule=Rule("exact"), max_tokens=32)
    async with start_stack((str(TARGET), str(DRAFT)), draft=SAME, verify=SAME) as stack:
        assert target.info == stack.verify_engine.info
        (served,) = [
            drafter.model
            for drafter in stack.draft_sessions.describe().drafters
            if drafter.name == "model"
        ]
        assert draft.info == served
        text = await stack.client.complete(prompt, options)
    assert target.info.numerics
    assert target.encode(prompt) == text.started.prompt_token_ids
    (ids,) = target.continued([target.encode(prompt)], [32])
    assert ids == text.token_ids


def test_more_sequences_than_sessions_take_turns() -> None:
    few, many = (
        LocalModel(DraftSettings(model=str(DRAFT), max_sessions=n, **SAME)) for n in (2, 8)
    )
    prompts = [few.encode(Chat.of_user(p.question)) for p in problems(7, 5)]
    assert few.continued(prompts, [12] * 5) == many.continued(prompts, [12] * 5)


def test_lengths_are_limited_as_in_each_service() -> None:
    own = LocalModel(DraftSettings(model=str(DRAFT), **SAME)).info.context_length
    long = LocalModel(DraftSettings(model=str(DRAFT), max_model_len=own + 1, **SAME))
    assert long.info.context_length == own  # a drafter proposes nothing beyond
    with pytest.raises(ConfigError, match="--max-model-len"):
        LocalModel(VerifySettings(model=str(TARGET), max_model_len=own * 100, **SAME))

"""`exact` through the verify service's engine is plain decoding over the same cache."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from flyspec.engine.runner import ModelRunner
from flyspec.rules import Rule
from flyspec.values.admin import ModelInfo, TokenizerBundle
from flyspec.values.rounds import VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.gpu.devices import MARKS, VOCABULARY, runner_of
from verify_service.engine import VerifyEngine

pytestmark = MARKS

F32 = torch.float32
LENGTH = 60
TOKENIZER = TokenizerBundle(b"", "", (), (), None, "", "{}")


async def decode(engine: VerifyEngine, prompt: list[int], sampling: SamplingParams, k: int,
                 guesses: list[int] | None = None) -> list[int]:  # fmt: skip
    """Tokens after the prompt: with K = 0 plainly, else by rounds of drafts of which a third are
    wrong. `guesses` is the plain text."""
    session = engine.open(VerifyOpen(prompt, len(prompt), Rule("exact"), sampling, seed=5))
    rng, text, round_id = random.Random(len(prompt)), [*prompt], 0
    keep, pending = len(prompt), list[int]()
    try:
        while len(text) < len(prompt) + LENGTH:
            round_id += 1
            at = len(text) - len(prompt)
            drafts = [] if guesses is None else guesses[at : at + k]
            drafts = [d if rng.random() < 0.7 else rng.randrange(VOCABULARY) for d in drafts]
            answer: Any = await engine.submit(
                session, VerifyRound(round_id, keep, pending, drafts)
            ).get()
            if isinstance(answer, Exception):
                raise answer
            text = [*text, *drafts][: answer.keep_length]
            keep, pending = answer.keep_length, [answer.next_token_id]
            text.append(answer.next_token_id)
    finally:
        engine.close(session)
    return text[len(prompt) :][:LENGTH]


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_exact_is_plain_decoding(attention: Any, temperature: float) -> None:
    runner: ModelRunner = runner_of(F32, attention, "graphs", num_slots=8)
    assert isinstance(runner.info, ModelInfo)
    engine = VerifyEngine(runner, TOKENIZER, 64)
    engine.start()
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (5, 40, 9, 21)]
    sampling = SamplingParams(temperature=temperature)
    try:
        plain = [await decode(engine, prompt, sampling, 0) for prompt in prompts]
        for k in (4, 15):
            found = await asyncio.gather(
                *(decode(engine, p, sampling, k, t) for p, t in zip(prompts, plain, strict=True))
            )
            assert found == plain
    finally:
        engine.stop()

"""Services on a GPU, of one rank or two, against transformers; `exact` against plain decoding."""

import asyncio
import random
import re

import pytest
import torch

from flyspec.rules import Rule
from flyspec.values.admin import ModelInfo, TokenizerBundle
from flyspec.values.rounds import VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.gpu.devices import DEVICE, MARKS, ON_CUDA, VOCABULARY, runner_of
from tests.parallel.test_tensor_parallel import (
    client_of,
    ends_in_order,
    generates,
    serving,
    texts_of,
)
from tests.tiny import make_model
from verify_service.engine import VerifyEngine

pytestmark = [*MARKS, pytest.mark.timeout(400)]

# Heads of a size that FlexAttention has kernels for.
HEADS = {"hidden_size": 128, "num_attention_heads": 8}


@pytest.mark.parametrize("size", [1, 2])
async def test_ranks_give_the_text_of_transformers(size, tmp_path):
    if ON_CUDA and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, since NCCL wants one for each rank")
    model = str(make_model(tmp_path, seed=4, **HEADS))
    async with serving(model, "--device", DEVICE.type, "--dtype", "float32", size=size) as running:
        async with client_of(running.service.facts["port"]) as client:
            await generates(client, texts_of(model))
        await ends_in_order(running)
    log = "\n".join(running.log)
    assert re.search(f"loaded .*, float32 on {DEVICE.type}", log)
    if size > 1:
        held = re.findall(r"rank (\d) of 2 holds ([\d.]+) of ([\d.]+) MB", log)
        assert sorted(rank for rank, *_ in held) == ["0", "1"]
        for _, own, total in held:
            assert float(own) < 0.7 * float(total)  # half, and what is not split


F32 = torch.float32
LENGTH = 60
TOKENIZER = TokenizerBundle(b"", "", (), (), None, "", "{}")


async def decode(engine, prompt, sampling, k,
                 guesses = None):  # fmt: skip
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
            answer = await engine.submit(
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
async def test_exact_is_plain_decoding(attention, temperature):
    runner = runner_of(F32, attention, "graphs", num_slots=8)
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

"""Exact mode when sampling: one seed, one text, whatever the drafter, K and other requests."""

from __future__ import annotations

import asyncio

from flyspec.client import Chat, GenerateOptions
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from flyspec_lab.word_problems import problems

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9)
WAYS = [("", 0), *((d, k) for d in ("model", "prompt_lookup", "multi_level") for k in (1, 15))]
PYTHON = 'import os\n\ndef read_lines(path):\n    """Return the lines of a text file."""\n'


def options(drafter, k, seed):
    return GenerateOptions(
        sampling=SAMPLING,
        seed=seed,
        max_tokens=32,
        ignore_eos=True,
        drafter=drafter,
        rule=Rule("exact"),
        num_speculative_tokens=k,
    )


async def test_one_text_for_every_drafter_and_k_alone_and_among_sixteen(stack):
    prompts = [Chat.of_user(problems("invariance", 1)[0].question), PYTHON]
    await stack.needs_no_ties()
    async with stack.client() as client:
        for seed, prompt in enumerate(prompts):
            alone = [
                (await client.complete(prompt, options(drafter, k, seed))).token_ids
                for drafter, k in WAYS
            ]
            assert all(tokens == alone[0] for tokens in alone)
            # The same requests at once, among others of other seeds: sixteen in all.
            others = [options(*WAYS[i % len(WAYS)], 100 + i) for i in range(16 - len(WAYS))]
            crowd = [options(*way, seed) for way in WAYS] + others
            together = await asyncio.gather(*(client.complete(prompt, o) for o in crowd))
            assert all(g.token_ids == alone[0] for g in together[: len(WAYS)])
            assert any(g.token_ids != alone[0] for g in together[len(WAYS) :])

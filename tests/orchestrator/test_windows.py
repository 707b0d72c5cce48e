"""Windows across rounds through three real services; `test_rounds_machine` has their histories."""

from __future__ import annotations

from dataclasses import replace

from flyspec.client import Chunk, GenerateOptions, Retract
from tests.orchestrator.near_target import MARGIN, PROMPTS


async def test_a_target_restarted_in_an_open_window_goes_on(near_stack):
    """The target is lost repeatedly; the text is that of an undisturbed run."""
    rule = replace(MARGIN, fly_window_size=9)
    options = GenerateOptions(rule=rule, num_speculative_tokens=2, max_tokens=60, ignore_eos=True)
    alone = await near_stack.client.complete(PROMPTS[0], options)
    assert alone.completion.speculation.num_rollbacks > 0
    tokens: list[int] = []
    restarts = 0
    async for event in near_stack.client.generate(PROMPTS[0], replace(options, eager=True)):
        if isinstance(event, Retract):
            del tokens[event.output_token_index :]
        if isinstance(event, Chunk):
            tokens += event.token_ids
            if event.num_final_tokens < len(tokens) and restarts < 6:
                await near_stack.restart_verify()
                restarts += 1
    assert tokens == alone.token_ids
    assert restarts > 2

"""Windows across rounds through three real services, against a replay of the whole history.

Tiny models in float64; the reference runs transformers' forward.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.client import Chunk, GenerateOptions, Retract
from flyspec.lookup import PromptLookup
from flyspec.values.tokens import Origin
from tests.examples import examples
from tests.orchestrator.fakes import plan_of
from tests.orchestrator.near_target import MARGIN, PROMPTS
from tests.orchestrator.reference import replay
from tests.orchestrator.world import EOS
from tests.tiny import CONTEXT_LENGTH


def look_up(tokens, count):
    return PromptLookup(tokens).propose(count)


def generate(models, guess, prompt, k, window_size, max_tokens, **budgets):
    """The output by definition: the result of replaying the history round by round."""
    plan = plan_of(
        prompt_token_ids=list(prompt),
        max_tokens=max_tokens,
        context_length=CONTEXT_LENGTH,
        **budgets,
    )
    # A model drafts while the target decodes the first token.
    first = guess(list(prompt), k) if guess is not look_up else []
    history: list[list[int]] = [[]] if first else []
    while True:
        whole = replay(models, plan, window_size, history)
        output = whole.tokens[len(prompt) : whole.committed][:max_tokens]
        if EOS in output:
            output = output[: output.index(EOS) + 1]
        if len(output) == max_tokens or EOS in output:
            return output, whole, history
        if history == [[]] and len(first) > 1 and first[0] == whole.tokens[-1]:
            history.append(first[1:])
            continue
        count = min(k, CONTEXT_LENGTH - len(whole.tokens))
        history.append(guess(whole.tokens, count))


@pytest.mark.parametrize(
    ("drafter", "threshold", "k", "window_size", "budgets", "least"),
    [
        ("model", 0.3, 4, 6, {}, (5, 2)),
        ("model", 0.3, 2, 9, {}, (5, 1)),
        ("model", 0.3, 15, 2, {}, (0, 5)),
        ("model", 0.3, 4, 3, {"max_loose_tokens": 2}, (1, 2)),
        ("model", 0.3, 4, 3, {"max_loose_cost_nats": 0.5}, (1, 2)),
        # Drafts seldom and then nothing: windows fail for want of a proposal.
        ("prompt_lookup", 50.0, 1, 2, {}, (1, 0)),
        ("prompt_lookup", 50.0, 4, 0, {}, (0, 5)),
    ],
)
async def test_margin_across_rounds(
    near_stack, near_models, monkeypatch, drafter, threshold, k, window_size, budgets, least
):
    monkeypatch.setattr(near_models, "threshold", threshold)
    guess = near_models.guess if drafter == "model" else look_up
    rule = replace(MARGIN, fly_window_size=window_size, margin_threshold=threshold)
    options = GenerateOptions(
        rule=rule, drafter=drafter, num_speculative_tokens=k, max_tokens=50, **budgets
    )
    rollbacks = loose = 0
    for prompt in PROMPTS[: examples(3)]:
        generation = await near_stack.client.complete(prompt, options)
        output, whole, history = generate(
            near_models, guess, generation.started.prompt_token_ids, k, window_size, 50, **budgets
        )
        assert generation.token_ids == output
        ours = [Origin.EXACT_MODEL if o is Origin.EXACT_LOOKUP else o for o in generation.origins]
        assert ours == whole.origins[: len(output)]
        gaps = [gap for gap in whole.gaps[: len(output)] if gap is not None]
        assert generation.loose_gaps_nats == pytest.approx(gaps, abs=1e-5)
        metrics = generation.completion.speculation
        assert metrics.num_loose_tokens == len(gaps)
        assert metrics.loose_cost_nats == pytest.approx(sum(gaps), abs=1e-4)
        assert metrics.num_rollbacks == whole.num_rollbacks
        end = len(generation.started.prompt_token_ids) + len(output)
        rejected = whole.rejected(end)
        assert metrics.num_rejected_tokens == len(rejected)
        assert metrics.rejected_cost_nats == pytest.approx(sum(rejected), abs=1e-3)
        assert metrics.num_spec_steps == sum(1 for drafts in history if drafts)
        assert metrics.num_accepted_draft_tokens == sum(whole.accepted(end))
        rollbacks += metrics.num_rollbacks
        loose += metrics.num_loose_tokens
    print(f"{rollbacks} rollbacks, {loose} loose tokens")
    assert (rollbacks >= least[0], loose >= least[1]) == (True, True)
    assert await near_stack.idle()


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

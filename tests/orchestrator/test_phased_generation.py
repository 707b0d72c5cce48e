"""Phases through three real services, against runs of their rules alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.client import GenerateOptions
from flyspec.rules import Rule, WindowScope
from flyspec.values.phases import Phase
from flyspec.values.tokens import Origin, SamplingParams
from tests.examples import examples
from tests.orchestrator.near_target import PROMPTS

LOOSE = Rule(
    "margin", margin_threshold=3.0, fly_window_size=1, window_scope=WindowScope.WITHIN_ROUND
)
ACROSS = replace(LOOSE, fly_window_size=3, window_scope=WindowScope.ACROSS_ROUNDS)
EXACT = Rule("exact")
COUNT = 48


def asked(**changes) -> GenerateOptions:
    given = {"num_speculative_tokens": 6, "max_tokens": COUNT, "ignore_eos": True,
             "disable_loop_guard": True, "return_rounds": True}  # fmt: skip
    return GenerateOptions(**{**given, **changes})


async def plain(stack, token_ids, count):
    options = asked(num_speculative_tokens=0, max_tokens=count, return_rounds=False)
    return (await stack.client.complete(list(token_ids), options)).token_ids


def boundary(tokens, near):
    """The index of a token that is new there, about in the middle."""
    return next(i for i in range(near, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("rule", [LOOSE, ACROSS])
@pytest.mark.parametrize("by_text", [False, True])
async def test_the_first_rule_up_to_its_end_then_the_target(near_stack, rule, by_text):
    """Not one token of the first phase changes, and none of the second is loose."""
    split, loose = 0, 0
    for prompt in PROMPTS[: examples(3)]:
        alone = await near_stack.client.complete(prompt, asked(rule=rule))
        at = boundary(alone.token_ids, COUNT // 3)
        end = Phase(rule, until_token_ids=[alone.token_ids[at]])
        if by_text:
            texts = [text for chunk in alone.chunks for text in chunk.token_texts]
            until = "".join(texts[at - 2 : at + 1])
            known = "".join(texts)
            if not until.strip() or until in known[: known.index(until) + len(until) - 1]:
                continue
            reached = [until in "".join(texts[: i + 1]) for i in range(COUNT)]
            at = reached.index(True)
            end = Phase(rule, until=[until])
        both = await near_stack.client.complete(prompt, asked(phases=[end, Phase(EXACT)]))
        first = alone.token_ids[: at + 1]
        assert both.token_ids[: at + 1] == first
        assert both.origins[: at + 1] == alone.origins[: at + 1]
        assert Origin.LOOSE not in both.origins[at + 1 :]
        ids = [*alone.started.prompt_token_ids, *first]
        assert both.token_ids[at + 1 :] == await plain(near_stack, ids, COUNT - at - 1)
        split += any(len(r.rule_segments) == 2 for r in both.rounds)
        loose += both.completion.speculation.num_loose_tokens
    assert split > 0
    assert loose > 1
    assert await near_stack.idle()


@pytest.mark.parametrize("k", [1, 15])
async def test_with_nothing_left_to_loosen_the_text_is_the_target_s(near_stack, k):
    for phases, inside in (
        ([Phase(EXACT, until=["a"]), Phase(EXACT)], ()),
        ([Phase(LOOSE, until_token_ids=[3], max_loose_tokens=0), Phase(EXACT)], ()),
        ([Phase(EXACT, max_loose_tokens=4)], ("json", "tool_call")),
    ):
        for prompt in PROMPTS[: examples(1)]:
            options = asked(phases=phases, exact_inside=inside, num_speculative_tokens=k)
            found = await near_stack.client.complete(prompt, options)
            ids = found.started.prompt_token_ids
            assert found.token_ids == await plain(near_stack, ids, COUNT)


@pytest.mark.slow
async def test_budgets_are_of_their_phase_and_of_the_whole(near_stack):
    seen = set()
    for prompt in PROMPTS:
        alone = await near_stack.client.complete(prompt, asked(rule=LOOSE))
        at = boundary(alone.token_ids, COUNT // 3)
        end = alone.token_ids[at]
        for rule, whole in ((LOOSE, None), (LOOSE, 2), (ACROSS, None)):
            phases = [
                Phase(rule, until_token_ids=[end], max_loose_tokens=1),
                Phase(rule, max_loose_tokens=2),
            ]
            found = await near_stack.client.complete(
                prompt, asked(phases=phases, max_loose_tokens=whole)
            )
            tokens = found.token_ids
            middle = tokens.index(end) + 1 if end in tokens else len(tokens)
            counts = tuple(
                part.count(Origin.LOOSE)
                for part in (found.origins[:middle], found.origins[middle:])
            )
            assert counts[0] <= 1
            assert counts[1] <= 2
            assert sum(counts) <= (3 if whole is None else whole)
            seen.add((whole, *counts))
    assert (None, 1, 2) in seen
    assert (2, 1, 1) in seen


async def test_at_temperature_each_phase_keeps_its_kind_of_judging(near_stack):
    """Speculative sampling, then matches with the target's keyed samples."""
    sampling = SamplingParams(1.0)
    for first, second in (("rejection", "exact"), ("exact", "rejection"), ("ensemble", "fly")):
        for seed in range(examples(1)):
            phases = [Phase(Rule(first), until_token_ids=[5, 6, 7, 8, 9]), Phase(Rule(second))]
            options = asked(phases=phases, sampling=sampling, seed=seed)
            found = await near_stack.client.complete(PROMPTS[0], options)
            assert len(found.token_ids) == COUNT
            if second != "exact":
                continue
            ends = [i for i, token in enumerate(found.token_ids) if token in (5, 6, 7, 8, 9)]
            middle = ends[0] + 1 if ends else COUNT
            ids = [*found.started.prompt_token_ids, *found.token_ids[:middle]]
            rest = replace(
                asked(num_speculative_tokens=0, max_tokens=COUNT - middle, return_rounds=False),
                sampling=sampling, seed=seed,
            )  # fmt: skip
            if middle < COUNT:
                exact = await near_stack.client.complete(ids, rest)
                assert found.token_ids[middle:] == exact.token_ids


async def test_keywords_take_names_and_single_texts(near_stack):
    found = await near_stack.client.complete(
        PROMPTS[0], asked(), phases=[Phase("margin", until="a"), Phase("exact")]
    )
    assert found.started.rules == "margin, exact"
    assert found.started.phases[0].until == ("a",)

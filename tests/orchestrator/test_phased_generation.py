"""Phases through three real services, against runs of their rules alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from flyspec.client import GenerateOptions
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule, WindowScope
from flyspec.values.phases import Phase
from flyspec.values.rounds import RuleSegment
from flyspec.values.tokens import Origin, SamplingParams
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
    for prompt in PROMPTS:
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
    assert loose > 3
    assert await near_stack.idle()


@pytest.mark.parametrize("k", [1, 4, 15])
async def test_with_nothing_left_to_loosen_the_text_is_the_target_s(near_stack, k):
    for phases, inside in (
        ([Phase(EXACT, until=["a"]), Phase(EXACT)], ()),
        ([Phase(LOOSE, until_token_ids=[3], max_loose_tokens=0), Phase(EXACT)], ()),
        ([Phase(EXACT, max_loose_tokens=4)], ("json", "tool_call")),
    ):
        for prompt in PROMPTS[:3]:
            options = asked(phases=phases, exact_inside=inside, num_speculative_tokens=k)
            found = await near_stack.client.complete(prompt, options)
            ids = found.started.prompt_token_ids
            assert found.token_ids == await plain(near_stack, ids, COUNT)


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


async def test_costs_are_of_their_phase(near_stack):
    phases = [Phase(LOOSE, until_token_ids=[9], max_loose_cost_nats=0.5), Phase(LOOSE)]
    for prompt in PROMPTS[:4]:
        found = await near_stack.client.complete(prompt, asked(phases=phases))
        end = found.token_ids.index(9) + 1 if 9 in found.token_ids else COUNT
        count = found.origins[:end].count(Origin.LOOSE)
        assert sum(found.loose_gaps_nats[:count]) <= 0.5


async def test_what_was_resolved_is_told(near_stack):
    phases = [Phase(until=["####"]), Phase(EXACT, max_loose_tokens=7)]
    options = asked(rule=Rule("fly"), phases=phases, exact_inside=["json"], max_tokens=4)
    started = (await near_stack.client.complete(PROMPTS[0], options)).started
    first, second = started.phases
    assert first.rule == started.rule
    assert started.rule.fly_window_size == 5
    assert (first.until, second.rule, second.max_loose_tokens) == (("####",), EXACT, 7)
    assert (started.exact_inside, started.rules) == (("json",), "fly, exact")
    simple = (await near_stack.client.complete(PROMPTS[0], asked(max_tokens=2))).started
    assert (simple.phases, simple.exact_inside) == ((), ())


async def test_at_temperature_each_phase_keeps_its_kind_of_judging(near_stack):
    """Speculative sampling, then matches with the target's keyed samples."""
    sampling = SamplingParams(1.0)
    for first, second in (("rejection", "exact"), ("exact", "rejection"), ("ensemble", "fly")):
        for seed in range(3):
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


async def test_many_at_once_are_each_as_alone(near_stack):
    options = asked(phases=[Phase(ACROSS, until_token_ids=[5, 9]), Phase(EXACT)])
    alone = [await near_stack.client.complete(prompt, options) for prompt in PROMPTS]
    together = await asyncio.gather(*(near_stack.client.complete(p, options) for p in PROMPTS))
    assert [t.token_ids for t in together] == [a.token_ids for a in alone]


async def test_a_run_is_repeated_by_its_rounds(near_stack):
    phases = [Phase(LOOSE, until_token_ids=[5, 9]), Phase(EXACT)]
    for prompt in PROMPTS[:3]:
        adaptive = await near_stack.client.complete(
            prompt, asked(phases=phases, num_speculative_tokens="auto")
        )
        again = await near_stack.client.complete(
            prompt,
            asked(
                phases=phases,
                num_speculative_tokens=None,
                num_draft_tokens_per_round=adaptive.completion.num_draft_tokens_per_round,
            ),
        )
        assert again.token_ids == adaptive.token_ids
        assert again.origins == adaptive.origins


async def test_keywords_take_names_and_single_texts(near_stack):
    found = await near_stack.client.complete(
        PROMPTS[0], asked(), phases=[Phase("margin", until="a"), Phase("exact")]
    )
    assert found.started.rules == "margin, exact"
    assert found.started.phases[0].until == ("a",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": [Phase()] * 17}, "speculation.phases: at most 16"),
        ({"phases": [Phase(), Phase()]}, r"speculation.phases\[0\].until: give a text"),
        ({"phases": [Phase(until=["a"])]}, r"speculation.phases\[0\].until: the last phase has no"),
        (
            {"phases": [Phase(until=[""]), Phase()]},
            r"phases\[0\].until: each string must have 1 to 1024",
        ),
        (
            {"phases": [Phase(until=["a"] * 17), Phase()]},
            r"phases\[0\].until: at most 16 allowed, got 17",
        ),
        (
            {"phases": [Phase(until_token_ids=[10**6]), Phase()]},
            r"phases\[0\].until_token_ids: token id 1000000 is out of range",
        ),
        (
            {"phases": [Phase(until=["a"]), Phase(Rule("fyl"))]},
            r"speculation.phases\[1\].rule.name must be one of .*did you mean fly",
        ),
        (
            {"phases": [Phase(until=["a"]), Phase(Rule("fly", margin_threshold=1.0))]},
            r"speculation.phases\[1\].rule.margin_threshold does not apply",
        ),
        (
            {"phases": [Phase(max_loose_cost_nats=-1.0)]},
            r"speculation.phases\[0\].max_loose_cost_nats must be finite and at least 0, got -1",
        ),
        (
            {"phases": [Phase(Rule("fuzzy"), ["a"]), Phase(Rule("kl", divergence_top_k=3))]},
            "speculation.phases: the rules 'fuzzy' and 'kl' need different draft distributions",
        ),
        (
            {
                "phases": [Phase(Rule("rejection"), ["a"]), Phase(Rule("cactus"))],
                "sampling": SamplingParams(1.0),
            },
            "speculation.phases: the rules 'rejection' and 'cactus' need different draft",
        ),
        (
            {"exact_inside": ["jsn"]},
            "speculation.exact_inside must be one of tool_call, json, got 'jsn'.*did you mean json",
        ),
    ],
)
async def test_what_does_not_make_sense_is_refused(near_stack, changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        await near_stack.client.complete(PROMPTS[0], asked(**changes))


async def test_one_phase_is_a_rule_with_a_budget(near_stack):
    found = await near_stack.client.complete(
        PROMPTS[0], asked(phases=[Phase(LOOSE, max_loose_tokens=2)])
    )
    assert found.completion.speculation.num_loose_tokens <= 2
    assert found.rounds[-1].rule_segments[0].rule_index == 0
    assert isinstance(found.rounds[-1].rule_segments[0], RuleSegment)

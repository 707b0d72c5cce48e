"""Rounds whose drafts are a tree: exact texts, the verdicts of chains, and refusals."""

import random
from dataclasses import replace

import pytest

from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule
from flyspec.values.rounds import HeadRequest, Outcome, VerifyOpen, VerifyRound, VerifyTimings
from flyspec.values.tokens import SamplingParams
from tests.scripted import ScriptedModel
from tests.verify_service.sessions import (
    EXACT,
    PROMPT,
    answers,
    engine_over,
    opening,
    speculate,
)
from verify_service.trees import judged_path

OUTCOMES = {Outcome.EXACT: "=", Outcome.LOOSE: "~", Outcome.REJECTED: "x", Outcome.NOT_REACHED: "-"}


def random_tree(right, draw, size=12):
    """Drafts and parents of a tree that has the beginning of `right` on one of its paths."""
    drafts, parents, spine = [], [], [0]
    while len(drafts) < size:
        on_spine = draw.random() < 0.5 and len(spine) <= len(right)
        row = spine[-1] if on_spine else draw.randint(0, len(drafts))
        token = right[len(spine) - 1] if on_spine else draw.randrange(3, 400)
        drafts.append(token)
        parents.append(row)
        if on_spine:
            spine.append(len(drafts))
    return drafts, parents


@pytest.mark.parametrize("engine", ["slots", "blocks"], indirect=True)
async def test_trees_leave_exact_texts_alone(engine, greedy):
    expected, draw = greedy(PROMPT, 30), random.Random(0)

    def tree_of(tokens):
        return random_tree(expected[len(tokens) - len(PROMPT) :], draw)

    found, rounds = await speculate(engine, opening(PROMPT), len(expected) - 1, tree_of)
    assert found == expected[: len(found)]
    assert rounds < 0.7 * len(expected)
    # The next session finds what the accepted paths left in the cache.
    (verdict,) = await answers(
        engine,
        engine.open(opening([*PROMPT, *expected[:-1]])),
        VerifyRound(1, len(PROMPT) + len(expected) - 1, [], []),
    )
    assert verdict.next_token_id == expected[-1]
    assert engine.sessions.prefix_cache_hits >= len(PROMPT) + len(expected) - 24


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(presence_penalty=1.5, min_tokens=20),
    ],
)
async def test_sampled_texts_do_not_depend_on_trees(engine, sampling):
    open_ = replace(opening(PROMPT), sampling=sampling, seed=7)
    plain = await answers(
        engine, engine.open(open_), VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=40)
    )
    expected, draw = [v.next_token_id for v in plain], random.Random(1)

    def tree_of(tokens):
        return random_tree(expected[len(tokens) - len(PROMPT) :], draw)

    found, rounds = await speculate(engine, open_, len(expected) - 1, tree_of)
    assert found == expected[: len(found)]
    assert rounds < 0.8 * len(expected)


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [("exact", 1.0), ("fly", 0.0), ("fly-paper", 0.0), ("fly-reference", 1.0), ("margin", 0.0),
     ("typical", 1.0), ("autojudge", 1.0)],
)  # fmt: skip
async def test_a_chain_given_as_a_tree_has_the_same_verdict(engine, greedy, rule, temperature):
    sampling, right = SamplingParams(temperature=temperature), greedy(PROMPT, 12)
    open_ = VerifyOpen(PROMPT, len(PROMPT), Rule(rule), sampling, 3, logprobs=2)
    draw = random.Random(2)
    for _ in range(3):
        drafts = [t if draw.random() < 0.8 else draw.randrange(3, 400) for t in right]
        found = []
        for parents in ((), range(len(drafts))):
            session = engine.open(open_)
            round_ = VerifyRound(
                1, len(PROMPT), [], drafts, draft_parents=[*parents], num_top_tokens=3
            )
            (verdict,) = await answers(engine, session, round_)
            again = VerifyRound(2, verdict.keep_length + 1, [], [4, 5], open_window=None)
            following = await answers(engine, session, again)
            found.append([replace(v, timings=VerifyTimings()) for v in (verdict, *following)])
            engine.close(session)
        chain, tree = found
        assert tree[0].path == tuple(range(len(drafts)))
        # One message has the likeliest tokens of all rows, the other up to an end of text.
        assert tree[0].top_token_ids[: len(chain[0].top_token_ids)] == chain[0].top_token_ids
        path = {"path": (), "top_token_ids": ()}
        assert [replace(v, **path) for v in tree] == [replace(v, **path) for v in chain]


async def test_the_path_follows_the_target_and_else_the_first_draft():
    model = ScriptedModel()  # counts
    async with engine_over(model) as engine:
        session = engine.open(VerifyOpen([5, 6, 7], 3, EXACT, SamplingParams(), 0))
        # 7 -> (20 -> 21), (8 -> (30), (9 -> (25), (26)))
        round_ = VerifyRound(
            1, 3, [], [20, 21, 8, 30, 9, 25, 26], draft_parents=[0, 1, 0, 3, 3, 5, 5],
            num_top_tokens=1,
        )  # fmt: skip
        (verdict,) = await answers(engine, session, round_)
        assert verdict.path == (2, 4, 5)
        assert "".join(OUTCOMES[d.outcome] for d in verdict.decisions) == "==x"
        assert (verdict.keep_length, verdict.next_token_id) == (5, 10)
        assert verdict.top_token_ids == (8, 21, 22, 9, 31, 10, 26, 27)
        assert model.cache.held(session.slot) == [5, 6, 7, 8, 9]
        # The cache's memory holds the path, which the script reads.
        (verdict,) = await answers(engine, session, VerifyRound(2, 6, [], [11, 12]))
        assert (verdict.keep_length, verdict.next_token_id) == (8, 13)
        assert model.calls[-1][0].start == 5
        (verdict,) = await answers(
            engine, session, VerifyRound(3, 9, [], [3, 4], draft_parents=[0, 0])
        )
        assert (verdict.path, verdict.keep_length, verdict.next_token_id) == ((0,), 9, 14)


def test_a_lossy_rule_judges_the_path_behind_the_mismatch():
    drafts, parents = [1, 2, 7, 3, 4], [0, 1, 1, 2, 2]
    own = {0: 1, 1: 9, 2: 4}  # by row
    calls = []

    def token(row, path):
        calls.append((row, list(path)))
        return own.get(row, 0)

    assert judged_path(drafts, parents, token, exact=False) == [0, 1, 4]
    assert calls == [(0, []), (1, [0]), (2, [0, 1])]
    assert judged_path(drafts, parents, token, exact=True) == [0, 1, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_parents": [0]}, "has 1 entries for 2 drafts"),
        ({"draft_parents": [0, 2]}, r"draft_parents\[1\] is 2"),
        ({"draft_parents": [1, 0]}, r"draft_parents\[0\] is 1"),
        ({"head": HeadRequest("x", 3)}, "heads read chains"),
        ({"teacher_forced": True}, "teacher_forced needs one text"),
    ],
)
async def test_bad_trees_are_refused(engine, changes, message):
    session = engine.open(replace(opening(PROMPT), logprobs=0))
    round_ = VerifyRound(1, len(PROMPT), [], [4, 5], draft_parents=[0, 0])
    with pytest.raises(InvalidArgumentError, match=message):
        await answers(engine, session, replace(round_, **changes))


async def test_rules_with_distributions_take_no_trees(engine):
    session = engine.open(opening(PROMPT, Rule("fuzzy")))
    round_ = VerifyRound(1, len(PROMPT), [], [4, 5], draft_parents=[0, 0])
    with pytest.raises(InvalidArgumentError, match="needs distributions"):
        await answers(engine, session, round_)


@pytest.mark.parametrize("engine", ["fixed"], indirect=True)
async def test_an_engine_without_trees_says_so(engine):
    session = engine.open(opening(PROMPT))
    round_ = VerifyRound(1, len(PROMPT), [], [4, 5], draft_parents=[0, 0])
    with pytest.raises(InvalidArgumentError, match="draft_parents: steps over blocks run in fixed"):
        await answers(engine, session, round_)

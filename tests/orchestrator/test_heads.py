"""Generations drafted by a head of the target, and by a relay of a head and a draft service."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec.errors import InvalidArgumentError, NotFoundError
from flyspec.rules import Rule
from flyspec.values.generation import RecoveryKind
from flyspec.values.rounds import HeadRequest, VerifyRound
from flyspec.values.tokens import Origin, SamplingParams
from orchestrator.generation.head_rounds import num_uncut
from tests.orchestrator.scripted import PROMPT, expected, guess, request, script, scripted
from tests.orchestrator.scripted import run as scripted_run

HEADS = {"right": script, "mostly": guess, "garbage": lambda tokens: 3 + sum(tokens) % 150}


async def run(inside, at=None, **options):
    asked = {"max_tokens": 60, "num_speculative_tokens": 4, "return_rounds": True, **options}
    return await scripted_run(inside, request(**asked), at)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("k", [1, 4, 15])
async def test_the_text_is_the_targets_whatever_a_head_proposes(head, k):
    async with scripted(heads=HEADS) as inside:
        found = await run(inside, drafter=head, num_speculative_tokens=k)
        assert found.tokens == expected(60)
        # The first round brings the first proposal, and no draft service is asked.
        assert found.completion.num_draft_tokens_per_round[0] == 0
        assert found.drafters == [head]
        assert inside.drafters["drafter:1"].opened == 0
        longest = max(found.completion.num_draft_tokens_per_round)
        assert longest == min(k, 5)
        if head == "right":
            assert found.completion.speculation.draft_acceptance_rate == 1
            assert found.origins.count(Origin.EXACT_MODEL) > 25
        assert not any(inside.left)


@pytest.mark.parametrize("head", HEADS)
async def test_adaptive_k_with_a_head(head):
    async with scripted(heads=HEADS, num_speculative_tokens="auto", pause_s=0.001) as inside:
        for _ in range(3):
            found = await run(inside, drafter=head, num_speculative_tokens=None, max_tokens=150)
            assert found.tokens == expected(150)
        requests = inside.targets["target:1"].requests
        assert any(requests)
        assert None in requests  # plain decoding does not wait for a head
        if head == "right":
            assert found.completion.speculation.num_spec_steps > 5
            sent = inside.targets["target:1"].sent
            assert any(r.head and r.head.num_rounds for r in sent if r.draft_token_ids)
            # Its Ks, given back, give the same rounds.
            ks = found.completion.num_draft_tokens_per_round
            again = await run(
                inside, drafter=head, num_speculative_tokens=None, max_tokens=150,
                num_draft_tokens_per_round=ks,
            )  # fmt: skip
            assert again.completion.num_draft_tokens_per_round == ks


async def test_heads_are_drafters_of_the_registry():
    async with scripted(heads=HEADS) as inside:
        drafters = inside.fleet.drafters
        names = {"guess", "prompt_lookup", "right", "mostly", "garbage", "relay"}
        assert {drafter.name for drafter in drafters.all} == names
        right = drafters.get("right")
        assert (right.kind, right.usable, right.max_draft_tokens) == ("eagle3", True, None)
        drafters.activate("right", 0.5)
        names = {(await run(inside)).drafters[0] for _ in range(4)}
        assert names == {"guess", "right"}
        drafters.activate("right", None)
        assert (await run(inside)).drafters == ["right"]
        drafters.activate("guess", None)
        await drafters.drain("right", 0)
        drafters.activate("right", 0.5)  # no address to register it by again
        assert {(await run(inside)).drafters[0] for _ in range(4)} == names
        await drafters.drain("right", 0)
        await drafters.remove("right", False)
        await inside.fleet.targets.refresh()  # it does not come back by itself
        with pytest.raises(NotFoundError, match="no drafter 'right'"):
            await run(inside, drafter="right")
        with pytest.raises(InvalidArgumentError, match="'relay' stands for a head that"):
            await drafters.register("relay", "drafter:1", "")


async def test_swapping_between_a_head_and_a_draft_service():
    async with scripted(heads=HEADS) as inside:
        drafters, target = inside.fleet.drafters, inside.targets["target:1"]

        async def to(name):
            drafters.activate(name, None)

        at = {10: lambda: to("right"), 25: lambda: to("guess"), 40: lambda: to("mostly")}
        found = await run(inside, at)
        assert found.tokens == expected(60)
        assert found.drafters == ["guess", "right", "mostly"]
        assert {r.kind for r in found.completion.recoveries} == {RecoveryKind.DRAFTER_SWAPPED}
        assert target.opened == 1
        assert not any(inside.left)


async def test_a_head_that_never_proposes_gives_way():
    async with scripted(heads=HEADS) as inside:
        inside.targets["target:1"].faulty = lambda proposal: None
        found = await run(inside, drafter="right")
        assert found.tokens == expected(60)
        assert found.completion.num_draft_tokens_per_round[:3] == [0, 0, 0]
        assert found.drafters == ["guess"]
        (recovery,) = found.completion.recoveries
        assert recovery.kind is RecoveryKind.DRAFTER_REPLACED
        assert not any(inside.left)


@pytest.mark.parametrize(
    "faulty",
    [
        lambda proposal: proposal._replace(token_ids=[400] * 4),
        lambda proposal: proposal._replace(token_ids=[5] * 6, confidences=[0.5] * 6),
        lambda proposal: proposal._replace(confidences=[float("nan")] * 4),
        lambda proposal: proposal._replace(confidences=[0.5]),
    ],
)
async def test_an_invalid_proposal_is_a_fault_of_the_head(faulty):
    async with scripted(heads=HEADS) as inside:
        inside.targets["target:1"].faulty = faulty
        found = await run(inside, drafter="right")
        assert found.tokens == expected(60)
        assert found.drafters == ["guess"]
        assert sum(inside.fleet.drafters.get("right").faults.values()) == 1


async def test_a_lost_target_brings_the_next_proposal_with_its_first_verdict():
    async with scripted(targets=2, heads=HEADS) as inside:

        async def lose():
            busy = next(t for t in inside.targets.values() if t.sessions)
            busy.lost = True

        found = await run(inside, {20: lose}, drafter="right")
        assert found.tokens == expected(60)
        assert found.drafters == ["right"]
        assert found.completion.speculation.draft_acceptance_rate == 1
        assert [r.kind for r in found.completion.recoveries] == [RecoveryKind.TARGET_REOPENED]
        # One round went without drafts besides the first, if any.
        assert found.completion.num_draft_tokens_per_round.count(0) <= 2


async def test_a_replica_without_the_head_makes_it_unusable():
    async with scripted(targets=2, heads=HEADS) as inside:
        right = inside.fleet.drafters.get("right")
        assert right.usable
        inside.targets["target:2"].heads = {}
        await inside.fleet.targets.refresh()
        assert not right.usable
        assert "target:2 has no head 'right'" in right.reason
        found = await run(inside, drafter="right")
        assert found.tokens == expected(60)
        assert found.drafters == ["guess"]
        assert inside.targets["target:2"].requests.count(None) == len(
            inside.targets["target:2"].requests
        )


async def test_a_head_is_a_rung_of_the_ladder():
    async with scripted(heads={"right": script}) as inside:

        async def lose():
            inside.drafters["drafter:1"].lost = True

        found = await run(inside, {20: lose})
        assert found.tokens == expected(60)
        assert found.drafters[0] == "guess"
        assert "right" in found.drafters or "relay" in found.drafters
        assert not any(inside.left)


# --- rounds that a head goes on with ----------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("options", [{}, {"eager": True}, {"logprobs": 0}, {"rule": Rule("fly")}])
async def test_most_rounds_need_not_be_sent(head, options):
    async with scripted(heads=HEADS) as inside:
        target = inside.targets["target:1"]
        asked = {"drafter": head, "max_tokens": 200, **options}
        together = await run(inside, **asked)
        assert together.tokens == expected(200)
        sent = len(target.sent)
        stats = inside.fleet.drafters.get(head).stats
        drafted, accepted = stats.num_draft_tokens, stats.num_accepted_draft_tokens
        target.goes_on = False
        apart = await run(inside, **asked)
        assert apart.tokens == together.tokens
        assert apart.rounds == together.rounds
        assert apart.origins == together.origins
        one, other = apart.completion, together.completion
        assert one.num_draft_tokens_per_round == other.num_draft_tokens_per_round
        assert other.drafters == one.drafters
        after = inside.fleet.drafters.get(head).stats
        assert after.num_draft_tokens == 2 * drafted > 0
        assert after.num_accepted_draft_tokens == 2 * accepted <= after.num_draft_tokens
        assert len(target.sent) - sent == len(apart.rounds)
        assert sent < 0.35 * len(together.rounds)
        assert not any(inside.left)


@pytest.mark.parametrize(
    "options",
    [
        {"max_loose_tokens": 3}, {"prediction": "abc"},
        {"rule": Rule("rejection"), "temperature": 1.0}, {"drafter": "relay"},
        {"num_draft_tokens_per_round": [0, 3, 2]},
    ],
)  # fmt: skip
async def test_rounds_that_would_not_be_as_sent_are_sent(options):
    async with scripted(heads={"right": script}) as inside:
        if sampling := options.pop("temperature", None):
            options["sampling"] = SamplingParams(sampling)
        found = await run(inside, **{"drafter": "right", "max_tokens": 20, **options})
        asked = [r.head.num_rounds for r in inside.targets["target:1"].sent if r.head]
        repeated = len(options.get("num_draft_tokens_per_round", ()))
        assert not any(asked[: repeated or None])
        assert found.tokens == expected(20)


async def test_a_loop_makes_the_rounds_exact_from_there():
    async with scripted(heads={"right": lambda _: 7}, next_token=lambda _: 7) as inside:
        target = inside.targets["target:1"]
        found = await run(inside, drafter="right", rule=Rule("fly"), max_tokens=150)
        assert found.tokens == [7] * 150
        start = found.completion.loop_guard_token_index
        assert start is not None
        assert {r.exact_until_position for r in target.sent} == {len(PROMPT), 256}
        # The round that the head had gone on with was judged by the rule, and dropped.
        exact = [r for r in found.rounds if r.exact_until_position == 256]
        assert exact == found.rounds[-len(exact) :]
        assert exact[0].start_length == len(PROMPT) + start
        assert not any(inside.left)


@given(
    st.integers(0, 40), st.integers(1, 12), st.integers(0, 300),
    st.lists(st.integers(0, 12), min_size=300, max_size=300),
)  # fmt: skip
def test_no_limit_cuts_short_what_is_allowed(num_drafts, k, room, accepted):
    """With as many tokens as are wanted, each round's drafts and the request for more are whole."""
    sent = VerifyRound(1, 9, (), [5] * num_drafts, head=HeadRequest("head", k))
    count = num_uncut(sent, room)
    room -= num_drafts + 1
    for number in range(count):
        assert room - 1 >= k, "the round would have fewer drafts"
        room -= 1 + min(accepted[number], k)


# --- relay ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [3, 8, 15])
@pytest.mark.parametrize("head", HEADS)
async def test_a_relay_extends_the_heads_block(head, k):
    async with scripted(heads={"head": HEADS[head]}) as inside:
        found = await run(inside, drafter="relay", num_speculative_tokens=k, max_tokens=100)
        assert found.tokens == expected(100)
        assert found.drafters == ["relay"]
        # Near the end drafts that cannot be emitted are not made.
        assert max(found.completion.num_draft_tokens_per_round) == k
        if head == "right" and k > 5:
            blocks = [r.draft_token_ids[:5] for r in found.rounds if len(r.draft_token_ids) > 5]
            assert blocks
        assert not any(inside.left)


async def test_a_relay_is_as_good_as_both_its_parts_together():
    async with scripted(heads={"head": script}, num_speculative_tokens=12) as inside:
        drafter = inside.drafters["drafter:1"]
        wrong = random.Random(1).sample(range(203), 40)
        drafter.next_token = lambda tokens: 5 if len(tokens) in wrong else script(tokens)
        mean = {}
        for name in ("head", "guess", "relay"):
            found = await run(inside, drafter=name, num_speculative_tokens=12, max_tokens=200)
            mean[name] = found.completion.speculation.mean_acceptance_length
        assert mean["relay"] > max(mean["head"], mean["guess"])


async def test_a_relay_goes_on_with_what_works():
    async with scripted(heads={"head": script}) as inside:
        drafter, target = inside.drafters["drafter:1"], inside.targets["target:1"]

        async def lose():
            drafter.lost = True

        found = await run(inside, {20: lose}, drafter="relay", num_speculative_tokens=8)
        assert found.tokens == expected(60)
        assert found.drafters == ["relay"]
        drafter.lost = False
        target.faulty = lambda proposal: None
        await asyncio.sleep(0.3)
        found = await run(inside, drafter="relay", num_speculative_tokens=8)
        assert found.tokens == expected(60)
        assert found.completion.speculation.num_spec_steps > 3

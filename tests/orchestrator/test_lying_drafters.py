"""A lying drafter: no request fails, no exact text changes, and it is soon excluded."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch

from flyspec.client import GenerateOptions
from flyspec.errors import FlyspecError
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO
from flyspec.values.admin import BreakerState
from flyspec.values.generation import FinishReason
from flyspec.values.tokens import SamplingParams
from loadtest.chaos.lying_drafter import LIES, LyingDrafter
from orchestrator.fleet.breaker import MAX_FAULTS
from orchestrator.telemetry.state_metrics import fleet_metrics
from orchestrator.upstreams.proposal_checks import LIMITS, DraftFault
from tests.examples import examples
from tests.orchestrator.stacks import start_stack
from tests.waiting import until

PROMPT = "The cat sat on the mat, and the dog sat"
EXACT = GenerateOptions(rule=Rule("exact"), num_speculative_tokens=4, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
async def probed(model_dirs):
    """A stack that retries drafters soon."""
    torch.set_num_threads(1)
    async with start_stack(model_dirs, probe_interval_s=0.02) as stack:
        yield stack


@pytest.fixture(scope="module")
async def fault_free(probed):
    options = replace(EXACT, num_speculative_tokens=0)
    return (await probed.client.complete(PROMPT, options)).token_ids


@asynccontextmanager
async def liar(stack):
    """A drafter `liar` next to the honest one; it has not lied yet."""
    async with LyingDrafter(f"127.0.0.1:{stack.draft_server.port}") as drafter:
        await stack.admin.register_drafter("liar", drafter.address, "model")
        try:
            yield drafter
        finally:
            await stack.admin.remove_drafter("liar", force=True)


def options_for(lie):
    """Requests that ask the liar for what the lie is about; all give the exact text."""
    if lie.top_k is None:
        return replace(EXACT, drafter="liar")
    matches = Rule("fuzzy", divergence_threshold=0.0, divergence_top_k=lie.top_k)
    return replace(EXACT, drafter="liar", rule=matches)


async def told(stack, address):
    """The status of that replica."""
    return next(d for d in (await stack.admin.status()).drafters if d.address == address)


async def lie_until_out(stack, drafter, lie, expected):
    """Ask for the lie until the liar is excluded; return its replica."""
    (replica,) = stack.orchestrator.fleet.drafters.get("liar").replicas
    drafter.lie = lie.tell
    while not replica.breaker.is_out:
        generation = await stack.client.complete(PROMPT, options_for(lie))
        assert generation.token_ids == expected
        assert generation.completion.finish_reason is FinishReason.LENGTH
        if not replica.breaker.is_out:
            replica.breaker.retry_at = 0.0  # its rest is over
            await until(lambda: replica.usable or replica.breaker.is_out)
    return replica


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
async def test_a_lie_costs_nobody_but_the_liar(probed, fault_free, lie):
    async with liar(probed) as drafter:
        replica = await lie_until_out(probed, drafter, lie, fault_free)
        registered = probed.orchestrator.fleet.drafters.get("liar")
        assert registered.faults == {lie.fault: MAX_FAULTS}
        status = await told(probed, drafter.address)
        assert (status.ready, status.breaker) == (False, BreakerState.OPEN)
        assert status.faults_total == replica.faults_total == MAX_FAULTS
        assert "expected at most" in status.last_fault
        assert status.last_fault[:40] in status.error
        # What it may have had sent until it was cut off, on the trial and for each fault.
        assert drafter.num_bytes < (1 + 2 * MAX_FAULTS) * 16 * LIMITS.message_bytes
        asked, opened = drafter.num_asked, drafter.num_opened
        generation = await probed.client.complete(PROMPT, options_for(lie))
        assert generation.token_ids == fault_free
        assert [share.drafter for share in generation.completion.drafters] == ["model"]
        assert (drafter.num_asked, drafter.num_opened) == (asked, opened)


async def test_a_drafter_that_lies_is_not_registered(probed):
    async with LyingDrafter(f"127.0.0.1:{probed.draft_server.port}") as drafter:
        drafter.lie = LIES[0].tell
        with pytest.raises(FlyspecError, match=r"cannot draft for this target.* expected at most"):
            await probed.admin.register_drafter("liar", drafter.address, "model")


@pytest.mark.parametrize(
    "describe",
    [
        lambda told: told.ClearField("drafters"),
        lambda told: told.drafters.extend([told.drafters[0]] * 100),
        lambda told: told.drafters.append(told.drafters[0]),
        lambda told: setattr(told.drafters[0], "name", ""),
        lambda told: setattr(told.drafters[0].model, "vocab_size", 2**32 - 1),
        lambda told: setattr(told, "max_speculative_tokens", 0),
        lambda told: setattr(told, "max_speculative_tokens", 2**32 - 1),
    ],
    ids=["none", "many", "one twice", "no name", "every id", "no drafts", "every draft"],
)
async def test_a_drafter_that_lies_of_itself_is_not_used(probed, fault_free, describe):
    async with liar(probed) as drafter:
        drafter.description = describe
        address = drafter.address
        await until(lambda: _is_out(probed, address))
        status = await told(probed, address)
        assert status.faults_total >= MAX_FAULTS
        assert "describes" in status.last_fault
        options = replace(EXACT, drafter="liar")
        generation = await probed.client.complete(PROMPT, options)
        assert generation.token_ids == fault_free
        assert drafter.num_opened == 1  # the trial


async def _is_out(stack, address):
    status = await told(stack, address)
    return not status.ready and status.faults_total >= MAX_FAULTS


async def test_after_its_rest_a_drafter_is_tried_again(probed, fault_free):
    async with liar(probed) as drafter:
        replica = await lie_until_out(probed, drafter, LIES[0], fault_free)
        drafter.lie = None
        replica.breaker.retry_at = 0.0  # its rest is over
        await until(lambda: replica.usable)
        generation = await probed.client.complete(PROMPT, options_for(LIES[0]))
        assert generation.token_ids == fault_free
        assert [share.drafter for share in generation.completion.drafters] == ["liar"]
        assert not replica.breaker.is_out


async def test_streams_at_once_end_whole_while_the_drafter_of_all_lies(model_dirs, fault_free):
    """Sampled or greedy, they get the text they would get without drafts."""
    async with start_stack(model_dirs, probe_interval_s=0.02) as stack:
        async with liar(stack) as drafter:
            await stack.admin.activate_drafter("liar")
            sampled = replace(EXACT, sampling=SamplingParams(0.9), seed=3)
            plain = replace(sampled, num_speculative_tokens=0)
            expected = (await stack.client.complete(PROMPT, plain)).token_ids
            for lie in ("all of every time", "every answer twice", "ids without end"):
                drafter.lie = next(found.tell for found in LIES if found.name == lie)
                texts = await asyncio.gather(
                    *(stack.client.complete(PROMPT, o) for o in [EXACT, sampled] * 4)
                )
                found = [text.token_ids for text in texts]
                assert found == [fault_free, expected] * 4
            await stack.admin.activate_drafter("model")
        assert await stack.idle()


async def test_faults_are_metrics_by_drafter_and_kind(probed):
    options = replace(EXACT, drafter="liar")
    async with liar(probed) as drafter:
        drafter.lie = LIES[0].tell
        await probed.client.complete(PROMPT, options)
        families = {f.name: f for f in fleet_metrics(probed.orchestrator.fleet)}
    samples = families["flyspec_drafter_faults"].samples
    counted = {(s.labels["drafter"], s.labels["fault"]): s.value for s in samples}
    assert counted["liar", "round"] >= 1
    assert counted["model", "round"] == 0
    assert {fault for _, fault in counted} == set(DraftFault)


RULES = [
    Rule("exact"),
    Rule("rejection"),
    Rule("fuzzy"),
    Rule("fuzzy", divergence_top_k=50),
    Rule("fuzzy-reference"),
]
SAMPLING = [SamplingParams(), SamplingParams(1.0), SamplingParams(0.8, top_p=0.6, top_k=40)]


@pytest.mark.parametrize("drafter", ["model", "multi_level", "prompt_lookup", "composed"])
async def test_an_honest_drafter_has_no_faults(probed, drafter):
    ways = list(product(RULES, zip(SAMPLING, (8, AUTO, 4), strict=True)))
    for rule, (sampling, k) in ways[:: 1 if examples(1) > 1 else 4]:
        options = GenerateOptions(
            rule=rule, num_speculative_tokens=k, sampling=sampling, seed=4,
            max_tokens=20, ignore_eos=True, drafter=drafter,
        )  # fmt: skip
        await probed.client.complete(PROMPT, options)
    assert not probed.orchestrator.fleet.drafters.get(drafter).faults

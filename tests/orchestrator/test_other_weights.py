"""Targets that differ from the others in weights, numerics or model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from flyspec.client import GenerateOptions
from flyspec.errors import TargetChangedError
from flyspec.rules import Rule
from flyspec.values.admin import ModelInfo
from orchestrator.fleet import target
from orchestrator.fleet import target as target_module
from orchestrator.fleet.discovery import Addresses
from orchestrator.fleet.target import Kinds, difference
from orchestrator.telemetry.state_metrics import fleet_metrics
from tests.orchestrator.near_target import greedy_of
from tests.orchestrator.stacks import generate, orchestrator_over, slow, start_stack, until_ready
from tests.tiny import make_model
from tests.waiting import until

PROMPT = "The cat sat on the mat, and the dog sat"
OPTIONS = GenerateOptions(rule=Rule("exact"), max_tokens=20, ignore_eos=True)
LONG = GenerateOptions(rule=Rule("exact"), max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def other_dirs(tmp_path_factory, model_dirs):
    """The same shape, tokenizer and number of parameters, and other weights."""
    return str(make_model(tmp_path_factory.mktemp("other"), seed=4)), model_dirs[1]


@pytest.fixture(scope="module")
def other_greedy(other_dirs):
    return greedy_of(other_dirs[0])


async def restart_as(stack, servicer) -> None:
    """Replace the stack's verify service by `servicer`, at the same address."""
    stack.verify_servicer = servicer
    await stack.restart_verify()


async def test_other_weights_of_the_same_shape_are_kept_out(model_dirs, other_dirs, greedy):
    async with (
        start_stack(model_dirs) as one,
        start_stack(other_dirs) as two,
        orchestrator_over(one, two) as (client, admin),
    ):
        targets = (await admin.status()).targets
        assert [target.ready for target in targets] == [True, False]
        assert "its weights fingerprint is" in targets[1].error
        assert targets[0].model.weights_fingerprint in targets[1].error
        texts = await asyncio.gather(*(client.complete(f"{n} {PROMPT}", OPTIONS) for n in range(6)))
        for text in texts:
            assert text.token_ids == greedy(text.started.prompt_token_ids, 20)
        assert two.verify_engine.sessions.opened_total == 0
        addresses = [f"127.0.0.1:{stack.verify_server.port}" for stack in (one, two)]
        fleet = one.orchestrator.fleet
        await fleet.targets.add(Addresses(",".join(addresses), "--x"))
        (misfit,) = (m for m in fleet_metrics(fleet) if m.name == "flyspec_upstream_misfit")
        told = {s.labels["address"]: s.value for s in misfit.samples}
        assert [told[address] for address in addresses] == [0, 1]


@pytest.mark.parametrize("k", [0, 4])
async def test_a_target_that_comes_back_with_other_weights_ends_its_streams(
    model_dirs, other_dirs, greedy, other_greedy, k
):
    """No model continues another's text; new texts are the new model's."""
    async with (
        start_stack(model_dirs) as one,
        start_stack(other_dirs) as two,
        orchestrator_over(one) as (client, admin),
    ):
        slow(one)
        served = []

        async def become_another():
            await restart_as(one, two.verify_servicer)

        async def stream():
            options = replace(LONG, num_speculative_tokens=k)
            async for event in client.generate(PROMPT, options):
                if hasattr(event, "token_ids"):
                    if not served:
                        await become_another()
                    served.extend(event.token_ids)

        with pytest.raises(TargetChangedError, match=r"replaced by .*; send the request again"):
            await stream()
        await until_ready(admin, 1)
        text = await client.complete(PROMPT, OPTIONS)
        ids = text.started.prompt_token_ids
        assert served == greedy(ids, 60)[: len(served)]
        assert text.token_ids == other_greedy(ids, 20) != greedy(ids, 20)


async def test_a_session_says_which_model_it_began_with(model_dirs, other_dirs, other_greedy):
    """A target that has changed since its last probe refuses what its predecessor began."""
    async with (
        start_stack(model_dirs) as one,
        start_stack(other_dirs) as two,
        orchestrator_over(one, probe_interval_s=3600.0) as (client, _),
    ):
        await restart_as(one, two.verify_servicer)
        with pytest.raises(TargetChangedError):
            await client.complete(PROMPT, OPTIONS)
        text = await client.complete(PROMPT, OPTIONS)
        assert text.token_ids == other_greedy(text.started.prompt_token_ids, 20)


async def test_rolling_to_another_target(model_dirs, other_dirs, greedy, other_greedy, monkeypatch):
    """Replicas change one after the other; each text comes from a single model."""
    monkeypatch.setattr(target_module, "REMEMBERED_S", 0.5)
    async with (
        start_stack(model_dirs) as one,
        start_stack(model_dirs) as two,
        start_stack(other_dirs) as new,
        orchestrator_over(one, two) as (client, admin),
    ):
        slow(one)
        slow(two)
        known = []

        async def first_replica():
            await restart_as(one, new.verify_servicer)

            async def misfits() -> bool:
                return "weights" in (await admin.status()).targets[0].error

            await until(misfits)

        for _ in range(2):  # the one that the text is on, or the other one
            tokens, ids, completion = await generate(client, PROMPT, LONG, first_replica)
            assert tokens == greedy(ids, 60)
            known.append(completion)
        assert [t.ready for t in (await admin.status()).targets] == [False, True]
        await restart_as(two, new.verify_servicer)
        await until_ready(admin, 2)
        text = await client.complete(PROMPT, OPTIONS)
        assert text.token_ids == other_greedy(text.started.prompt_token_ids, 20)
        assert text.started.model == new.verify_engine.info.name
        models = await client.list_models()
        assert models.target.weights_fingerprint == new.verify_engine.info.weights_fingerprint


async def test_other_numerics_are_kept_out_unless_they_are_let_in(model_dirs, greedy):
    async with (
        start_stack(model_dirs) as one,
        start_stack(model_dirs, verify={"dtype": "float32"}) as two,
        orchestrator_over(one, two) as (client, admin),
        orchestrator_over(one, two, allow_mixed_numerics=True) as (mixed, mixed_admin),
    ):
        targets = (await admin.status()).targets
        assert [target.ready for target in targets] == [True, False]
        for part in ("float64", "float32", "--allow-mixed-numerics"):
            assert part in targets[1].error
        assert all(target.ready for target in (await mixed_admin.status()).targets)
        slow(one)
        slow(two)

        async def kill():
            for stack in (one, two):
                if stack.verify_engine.sessions.active:
                    await stack.verify_server.stop(0)

        _, _, completion = await generate(mixed, PROMPT, LONG, kill)
        assert completion.mixed_numerics
        await one.restart_verify()
        text = await client.complete(PROMPT, OPTIONS)
        assert not text.completion.mixed_numerics
        assert text.token_ids == greedy(text.started.prompt_token_ids, 20)


OLD = ModelInfo("old", "t", 400, 256, num_parameters=7, weights_fingerprint="aa", numerics="x")
NEW = ModelInfo("new", "t", 400, 256, num_parameters=7, weights_fingerprint="bb", numerics="x")
FLOAT = ModelInfo("old", "t", 400, 256, num_parameters=7, weights_fingerprint="aa", numerics="y")


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(target.time, "monotonic", lambda: now[0])
    return now


def counts(kinds, expected=()):
    return kinds.count(OLD, expected), kinds.count(NEW, expected)


def test_a_replica_counts_as_what_it_said_last(clock):
    kinds = Kinds(allow_mixed_numerics=False)
    for address in ("a", "b"):
        kinds.note(address, OLD)
    kinds.note("c", NEW)
    assert counts(kinds) == (2, 1)
    kinds.note("a", NEW)
    assert counts(kinds) == (1, 2)


def test_one_that_is_silent_counts_for_a_while_and_longer_where_it_is_expected(clock):
    kinds = Kinds(allow_mixed_numerics=False)
    kinds.note("a", OLD)
    kinds.note("b", OLD)
    clock[0] += target.REMEMBERED_S + 1
    kinds.note("c", NEW)
    assert counts(kinds) == (0, 1)
    assert counts(kinds, {"a", "c"}) == (1, 1)
    clock[0] += target.EXPECTED_S
    assert counts(kinds, {"a", "c"}) == (0, 0)


@pytest.mark.parametrize(("mixed", "expected"), [(False, (1, 0)), (True, (2, 0))])
def test_numerics_make_another_kind_unless_they_may_differ(clock, mixed, expected):
    kinds = Kinds(mixed)
    kinds.note("a", OLD)
    kinds.note("b", FLOAT)
    assert counts(kinds) == expected
    assert bool(difference(OLD, FLOAT, mixed)) == (not mixed)

"""Targets that differ from the others in weights, numerics or model."""

from __future__ import annotations

import asyncio

import pytest
import torch

from flyspec.client import GenerateOptions
from flyspec.engine.loading import load_model
from flyspec.errors import TargetChangedError
from flyspec.rules import Rule
from orchestrator.fleet import target as target_module
from orchestrator.fleet.discovery import Addresses
from orchestrator.telemetry.state_metrics import fleet_metrics
from tests.orchestrator.stacks import generate, orchestrator_over, slow, start_stack, until_ready
from tests.tiny import make_model
from tests.waiting import until

PROMPT = "The cat sat on the mat, and the dog sat"
OPTIONS = GenerateOptions(rule=Rule("exact"), max_tokens=40, ignore_eos=True)
LONG = GenerateOptions(rule=Rule("exact"), max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def other_dirs(tmp_path_factory, model_dirs):
    """The same shape, tokenizer and number of parameters, and other weights."""
    return str(make_model(tmp_path_factory.mktemp("other"), seed=4)), model_dirs[1]


def greedy_of(directory: str):
    """transformers' own greedy continuation in float64."""
    model = load_model(directory, "cpu", "float64").model

    def generate(token_ids, max_new_tokens):
        ids = torch.tensor([list(token_ids)])
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False
            )
        return output[0, len(token_ids) :].tolist()

    return generate


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
            assert text.token_ids == greedy(text.started.prompt_token_ids, 40)
        assert two.verify_engine.sessions.opened_total == 0


async def test_a_replica_that_does_not_fit_is_a_metric(model_dirs, other_dirs):
    async with start_stack(model_dirs) as one, start_stack(other_dirs) as two:
        ports = [stack.verify_server.port for stack in (one, two)]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        await one.orchestrator.fleet.targets.add(Addresses(",".join(addresses), "--x"))
        found = {metric.name: metric for metric in fleet_metrics(one.orchestrator.fleet)}
        misfits = {
            sample.labels["address"]: sample.value
            for sample in found["flyspec_upstream_misfit"].samples
            if sample.labels["service"] == "verify"
        }
        assert misfits == dict(zip(addresses, (0, 1), strict=True))


@pytest.mark.parametrize("k", [0, 4])
async def test_a_target_that_comes_back_with_other_weights_ends_its_streams(
    model_dirs, other_dirs, greedy, k
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
            options = GenerateOptions(
                rule=Rule("exact"), max_tokens=120, ignore_eos=True, num_speculative_tokens=k
            )
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
        assert served == greedy(ids, 120)[: len(served)]
        assert text.token_ids == greedy_of(other_dirs[0])(ids, 40) != greedy(ids, 40)


async def test_a_session_says_which_model_it_began_with(model_dirs, other_dirs, greedy):
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
        assert text.token_ids == greedy_of(other_dirs[0])(text.started.prompt_token_ids, 40)


async def test_rolling_to_another_target(model_dirs, other_dirs, greedy, monkeypatch):
    """Replicas change one after the other; each text comes from a single model."""
    monkeypatch.setattr(target_module, "REMEMBERED_S", 0.5)
    other = greedy_of(other_dirs[0])
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
            assert tokens == greedy(ids, 120)
            known.append(completion)
        assert [t.ready for t in (await admin.status()).targets] == [False, True]
        await restart_as(two, new.verify_servicer)
        await until_ready(admin, 2)
        text = await client.complete(PROMPT, OPTIONS)
        assert text.token_ids == other(text.started.prompt_token_ids, 40)
        assert text.started.model == new.verify_engine.info.name
        models = await client.list_models()
        assert models.target.weights_fingerprint == new.verify_engine.info.weights_fingerprint


async def test_most_replicas_decide_and_texts_stay_where_they_are(model_dirs, other_dirs, greedy):
    """With two of three replaced, new generations use the new model; running ones keep the old."""
    async with (
        start_stack(model_dirs) as old,
        start_stack(model_dirs) as one,
        start_stack(other_dirs) as new,
        orchestrator_over(old, one, new) as (client, admin),
    ):
        slow(old)
        slow(one)

        async def roll():
            gone = one if old.verify_engine.sessions.active else old
            await restart_as(gone, new.verify_servicer)
            await until_ready(admin, 2)

        tokens, ids, _ = await generate(client, PROMPT, LONG, roll)
        assert tokens == greedy(ids, 120)
        text = await client.complete(PROMPT, OPTIONS)
        assert text.token_ids == greedy_of(other_dirs[0])(ids, 40)


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
        assert text.token_ids == greedy(text.started.prompt_token_ids, 40)

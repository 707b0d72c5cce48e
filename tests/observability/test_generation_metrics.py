"""After known generations the metrics equal the completions'; nothing from clients is a label."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from flyspec.cli.stack_options import HEAD_DRAFTERS
from flyspec.client import AsyncClient, GenerateOptions
from flyspec.drafter_names import DRAFTER_KINDS
from flyspec.errors import FlyspecError
from flyspec.rules import Rule
from flyspec.rules.presets import DEFAULT_RULE
from orchestrator.telemetry.metrics import MAX_DRAFTERS, NOBODY, OTHERS, PARTS, GenerationMetrics
from tests.waiting import until

SPEC = "flyspec_spec_decode_"
PROMPTS = ("def fibonacci(n):", "Mia has 12 stamps and buys 30 more.", "import os\nimport re\n")
RULES = (Rule("fly", fly_window_size=2), Rule("margin", margin_threshold=3.0))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
async def test_metrics_equal_the_completions(observed, rule):
    """`margin` has windows across rounds: what is open at the end of a round counts later."""
    before = await observed.at_rest()
    async with AsyncClient(observed.stack.address, max_retries=0) as client:
        options = GenerateOptions(rule=rule, max_tokens=48, num_speculative_tokens=7)
        done = [await client.complete(prompt, options) for prompt in PROMPTS]
    added = await observed.since(before, len(done))
    parts = {part: added.total("flyspec_round_part_seconds_sum", part=part) for part in PARTS}
    assert sum(parts.values()) == pytest.approx(added.total("flyspec_round_seconds_sum"))
    assert min(parts.values()) > 0
    labels = {"drafter": "model", "rule": rule.name}
    told = [d.completion.speculation for d in done]
    for name, field in (
        ("num_drafts", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
        ("num_loose_tokens", "num_loose_tokens"),
        ("num_rollbacks", "num_rollbacks"),
    ):
        expected = sum(getattr(metrics, field) for metrics in told)
        assert added.total(f"{SPEC}{name}_total", **labels) == expected, name
    cost = sum(metrics.loose_cost_nats for metrics in told)
    assert added.total(f"{SPEC}loose_cost_nats_total", **labels) == pytest.approx(cost)
    per_position = f"{SPEC}num_accepted_tokens_per_pos_total"
    for position in range(7):
        expected = sum(sum(metrics.acceptance_histogram[position + 1 :]) for metrics in told)
        found = added.total(per_position, position=str(position), **labels)
        assert found == expected, position
    assert added.total("flyspec_output_tokens_total", rule=rule.name) == sum(
        len(d.token_ids) for d in done
    )
    for origin in ("loose", "correction", "bonus"):
        expected = sum(o.name.lower() == origin for d in done for o in d.origins)
        assert added.total("flyspec_output_tokens_total", origin=origin) == expected
    rounds = sum(metrics.num_rounds for metrics in told)
    assert added.total("flyspec_rounds_total") == rounds
    assert added.total("flyspec_round_seconds_count") == rounds
    assert added.total("flyspec_requests_total", status="OK") == len(done)
    for name in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token"):
        assert added.total(f"flyspec_{name}_seconds_count", **labels) == len(done)
    assert added.total("flyspec_prompt_tokens_total") == sum(
        len(d.started.prompt_token_ids) for d in done
    )


async def test_plain_decoding_counts_rounds_without_drafts(observed):
    before = await observed.at_rest()
    options = GenerateOptions(max_tokens=10, num_speculative_tokens=0, ignore_eos=True)
    async with AsyncClient(observed.stack.address, max_retries=0) as client:
        await client.complete(PROMPTS[0], options)
    added = await observed.since(before, 1)
    assert added.total("flyspec_output_tokens_total", drafter=NOBODY, origin="plain") == 10
    assert added.total(f"{SPEC}num_drafts_total") == 0
    assert added.total(f"{SPEC}draft_length_bucket", drafter=NOBODY, le="0.0") == 10


async def test_the_services_count_what_they_were_asked(observed):
    before = await observed.at_rest()
    async with AsyncClient(observed.stack.address, max_retries=0) as client:
        options = GenerateOptions(rule=Rule("exact"), max_tokens=24, num_speculative_tokens=7)
        done = await client.complete(PROMPTS[0], options)
    after = await observed.at_rest()
    draft, verify = (after[s].since(before[s]) for s in ("draft", "verify"))
    told = done.completion.speculation
    judged = verify.total("flyspec_verify_judge_seconds_count", rule="exact")
    assert judged == told.num_rounds <= verify.total("flyspec_verify_step_seconds_count")
    assert verify.total("flyspec_verify_sessions_opened_total") == 1
    # The proposal that was asked for last may not have been needed.
    asked = draft.total("flyspec_draft_proposal_seconds_count", drafter="model")
    assert asked - told.num_spec_steps in (0, 1)
    assert draft.total("flyspec_draft_tokens_total") >= told.num_draft_tokens
    assert draft.total("flyspec_draft_step_tokens_sum") >= told.num_draft_tokens


async def test_how_requests_end_and_are_refused(observed):
    before = await observed.at_rest()
    async with AsyncClient(observed.stack.address, max_retries=0) as client:
        with pytest.raises(FlyspecError):
            await client.complete("", GenerateOptions(max_tokens=4))
        long = GenerateOptions(max_tokens=250, ignore_eos=True, rule=Rule("exact"))
        running = [asyncio.create_task(client.complete("a", long)) for _ in range(4)]
        active = "flyspec_generations_active"
        await until(lambda: observed.scrape("orchestrator").total(active) == 4)
        with pytest.raises(FlyspecError):
            await client.complete("b", GenerateOptions(max_tokens=4))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    added = await observed.since(before, 6)
    assert added.total("flyspec_requests_total", status="CANCELLED") == 4
    assert added.total("flyspec_requests_total", status="INVALID_ARGUMENT") == 1
    assert added.total("flyspec_requests_total", status="RESOURCE_EXHAUSTED") == 1
    assert added.total("flyspec_requests_refused_total", reason="client_limit") == 1
    assert added.total("flyspec_requests_refused_total") == 1
    calls = "flyspec_rpc_calls_total"
    for code, count in (("CANCELLED", 4), ("INVALID_ARGUMENT", 1), ("RESOURCE_EXHAUSTED", 1)):
        assert added.total(calls, code=code) == count, list(added.find(calls))
    assert observed.scrape("orchestrator").total(active) == 0


async def test_what_clients_make_up_is_no_label(observed):
    async with AsyncClient(observed.stack.address, max_retries=0) as client:
        for hostile in ('x"}\nevil_total 1', "a" * 200, "fly-{0}"):
            for options in (
                GenerateOptions(drafter=hostile, max_tokens=4),
                GenerateOptions(rule=Rule(hostile), max_tokens=4),
            ):
                with pytest.raises(FlyspecError):
                    await client.complete("a", options)
    found = observed.scrape("orchestrator")
    assert found.values_of("drafter") <= {*DRAFTER_KINDS, *HEAD_DRAFTERS, NOBODY}
    assert found.values_of("rule") <= {DEFAULT_RULE, "exact", "fly", "margin"}
    assert "evil_total" not in found.names
    methods = found.values_of("method")
    assert all(method.startswith(("flyspec.v1.", "grpc.")) for method in methods)


def test_drafters_without_end_share_a_label():
    metrics = GenerationMetrics(CollectorRegistry())
    labels = {metrics.label(f"canary-{n}") for n in range(10 * MAX_DRAFTERS)}
    assert len(labels) == MAX_DRAFTERS + 1
    assert OTHERS in labels
    assert metrics.label("canary-0") == "canary-0"
    assert metrics.label("") == NOBODY

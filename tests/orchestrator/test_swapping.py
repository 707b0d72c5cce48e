"""Swapping drafters through the admin port during generations, and what clients see of it."""

from __future__ import annotations

import asyncio
import time

import pytest

from draft_service.tokenizers import Tokenizers
from flyspec.client import Chunk, Completion, GenerateOptions
from flyspec.errors import (
    InvalidArgumentError,
    NotFoundError,
    PrefixMismatchError,
    UnavailableError,
)
from flyspec.rules import Rule
from flyspec.values.admin import DrafterState
from flyspec.values.generation import RecoveryKind
from flyspec.values.rounds import Outcome
from tests.orchestrator.stacks import held, slow_down, start_stack
from tests.tiny import make_model

EXACT = Rule("exact")
PROMPT = "The cat sat on the mat, and the dog sat"


async def test_running_generations_move_and_their_text_stays(near_dirs, greedy):
    options = GenerateOptions(rule=EXACT, max_tokens=60, ignore_eos=True, num_speculative_tokens=4)
    async with start_stack(near_dirs) as stack, start_stack(near_dirs) as other:
        admin, address = stack.admin, f"127.0.0.1:{other.draft_server.port}"
        before = (await admin.status()).verify.process
        tokens, completion, prompt, swapped = [], None, [], False
        async for event in stack.client.generate(PROMPT, options):
            if isinstance(event, Chunk):
                if len(tokens) >= 10 and not swapped:  # the first may come without a draft
                    swapped = True
                    with held(stack):
                        drafter, probe_ns = await admin.register_drafter("next", address)
                        assert (drafter.kind, drafter.state) == ("model", DrafterState.REGISTERED)
                        assert probe_ns > 0
                        await admin.activate_drafter("next", 0.5)
                        active = await admin.activate_drafter("next")
                        assert active.active
                tokens += event.token_ids
            elif isinstance(event, Completion):
                completion = event
            elif hasattr(event, "prompt_token_ids"):
                prompt = event.prompt_token_ids
        assert tokens == greedy(prompt, 60)
        assert [r.kind for r in completion.recoveries] == [RecoveryKind.DRAFTER_SWAPPED]
        assert [d.drafter for d in completion.drafters] == ["model", "next"]
        drained = await admin.drain_drafter("model", 10.0)
        assert drained.state is DrafterState.DRAINING
        assert drained.stats.active_generations == 0
        await admin.remove_drafter("model")
        with pytest.raises(NotFoundError, match="no drafter 'model'; choose from next"):
            await stack.client.complete("x", GenerateOptions(drafter="model"))
        drafters = {d.name: d for d in await admin.list_drafters()}
        assert next(iter(drafters)) == "next"
        stats = drafters["next"].stats
        assert stats.num_spec_steps
        assert 0 < stats.draft_acceptance_rate <= 1
        assert stats.mean_accepted_tokens > 1
        after = (await admin.status()).verify.process
        assert before.instance_id == after.instance_id
        assert before.num_model_loads == after.num_model_loads
        assert await stack.idle()


async def test_what_the_operator_asks_in_vain(stack):
    """The registry's errors have tests of their own; these come of addresses."""
    wrong = "this is the port of a verify service; DraftService is at the port of a draft service"
    for address, error, message in (
        ("127.0.0.1:1", UnavailableError, r"127\.0\.0\.1:1"),
        ("nowhere", InvalidArgumentError, "address: invalid address 'nowhere'"),
        (f"127.0.0.1:{stack.verify_server.port}", UnavailableError, wrong),
    ):
        with pytest.raises(error, match=message):
            await stack.admin.register_drafter("x", address)
    with pytest.raises(NotFoundError, match="no drafter 'x'"):
        await stack.admin.activate_drafter("x")
    # FAILED_PRECONDITION has one class on the client's side.
    with pytest.raises(PrefixMismatchError, match="activate another first"):
        await stack.admin.drain_drafter("model")


async def test_preparing_a_tokenizer_has_a_deadline_of_its_own(model_dirs, tmp_path, monkeypatch):
    other = str(make_model(tmp_path / "other", text="completely different words here " * 9))
    build = Tokenizers._build

    def slowly(self, *arguments):
        time.sleep(1.0)
        return build(self, *arguments)

    monkeypatch.setattr(Tokenizers, "_build", slowly)
    deadlines = {"draft_timeout_s": 0.7, "probe_timeout_s": 0.5}
    async with (
        start_stack((other, other)) as elsewhere,
        start_stack(model_dirs, **deadlines) as patient,
        start_stack(model_dirs, **deadlines, tokenizer_timeout_s=0.2) as hasty,
    ):
        address = f"127.0.0.1:{elsewhere.draft_server.port}"
        with pytest.raises(UnavailableError, match=r"tokenizer within 0.2 s; raise --tokenizer-ti"):
            await hasty.admin.register_drafter("other", address)
        drafter, probe_ns = await patient.admin.register_drafter("other", address)
        assert (drafter.translated, drafter.usable) == (True, True)
        assert probe_ns < 0.7e9


async def test_an_orchestrator_that_drains_takes_nothing_and_takes_it_again(model_dirs):
    async with start_stack(model_dirs) as stack:
        options = GenerateOptions(rule=EXACT, max_tokens=20, ignore_eos=True)
        with held(stack):
            running = asyncio.create_task(stack.client.complete(PROMPT, options))
            await stack.until(active_generations=1)
            assert await stack.admin.drain() == 1
            assert await stack.client.check_health() == "NOT_SERVING"
            with pytest.raises(UnavailableError, match="drain"):
                await stack.client.complete(PROMPT, options)
        assert len((await running).token_ids) == 20
        assert (await stack.admin.status()).draining
        await stack.admin.drain(resume=True)
        assert await stack.client.check_health() == "SERVING"
        assert len((await stack.client.complete(PROMPT, options)).token_ids) == 20


@pytest.mark.parametrize("rule", [Rule("exact"), Rule("margin", margin_threshold=1.0)])
async def test_rounds_are_returned_and_come_to_the_output(stack, rule):
    options = GenerateOptions(
        rule=rule, max_tokens=60, ignore_eos=True, return_rounds=True, num_speculative_tokens=7
    )
    generation = await stack.client.complete(PROMPT, options)
    assert len(generation.rounds) >= generation.completion.speculation.num_rounds
    tokens = list(generation.started.prompt_token_ids)
    first = len(tokens)
    for record in generation.rounds:
        assert record.start_length == len(tokens)
        assert record.drafter in ("model", "prompt_lookup", "")
        accepted = [d.outcome.accepted for d in record.decisions]
        tokens = [*tokens, *record.draft_token_ids][: record.keep_length]
        tokens.append(record.next_token_id)
        if all(accepted) and record.decisions and record.keep_length >= record.start_length:
            assert record.keep_length == record.start_length + len(record.draft_token_ids)
        assert len(record.decisions) == len(record.draft_token_ids)
        if rule.name == "exact":
            assert not {Outcome.LOOSE, Outcome.PROVISIONAL} & {d.outcome for d in record.decisions}
    assert tokens[first : first + 60] == generation.token_ids
    assert not (await stack.client.complete(PROMPT, GenerateOptions(max_tokens=3))).rounds


async def test_a_drafter_that_is_slow_is_used_for_what_it_has_in_time(model_dirs, greedy):
    async with start_stack(model_dirs, draft={"dtype": "float64"}, draft_timeout_s=2.0) as stack:
        slow_down(stack.draft_sessions._engine.model, 0.3)
        options = GenerateOptions(
            rule=EXACT, max_tokens=8, ignore_eos=True, num_speculative_tokens=15
        )
        generation = await stack.client.complete(PROMPT, options)
        assert generation.token_ids == greedy(generation.started.prompt_token_ids, 8)
        assert generation.completion.recoveries == ()
        (drafts,) = generation.completion.drafters
        assert drafts.drafter == "model"
        assert drafts.num_draft_tokens > 0
        (drafter, *_) = await stack.admin.list_drafters()
        assert drafter.stats.failures_total == 0

"""GGUF files through the services: exact texts, either model alone, what they say of themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec import bundled
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AdminClient, AsyncClient, Chat, GenerateOptions
from flyspec.rules import Rule
from flyspec.values.generation import FinishReason
from flyspec_lab.bench.reference import Reference
from flyspec_lab.word_problems import problems
from tests.engine.gguf_models import gguf_file, needs_llama_cpp
from tests.orchestrator.stacks import orchestrator_over, start_stack

pytestmark = needs_llama_cpp
QUESTIONS = [problem.question for problem in problems("gguf", 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module", params=["both", "target", "draft"])
async def pair(request, folder):
    """A stack with one or both models from GGUF files, the target in 32 bits or more."""
    target, draft, options = str(bundled.TARGET), str(bundled.DRAFT), {"dtype": "float64"}
    if request.param != "draft":
        target, options = str(gguf_file(folder, "f32", bundled.TARGET)), {}
    if request.param != "target":
        draft = str(gguf_file(folder, "q8_0", bundled.DRAFT))
    chosen = StackOptions(
        model=target, draft_model=draft, max_sessions=4, max_model_len=1024, **options
    )
    async with Stack(chosen) as running:
        yield running


@pytest.fixture(scope="module")
async def beside(folder):
    """A stack whose draft model lies beside the target, in its process."""
    draft = gguf_file(folder, "q8_0", bundled.DRAFT)
    chosen = StackOptions(
        model=str(gguf_file(folder, "f32", bundled.TARGET)), draft_model="",
        heads=f"beside={draft}", max_sessions=4, max_model_len=1024,
    )  # fmt: skip
    async with Stack(chosen) as running:
        yield running


@pytest.fixture(scope="module")
def reference():
    return Reference(str(bundled.TARGET), "float32")


def options(rule: str, k: int, max_tokens: int = 48) -> GenerateOptions:
    return GenerateOptions(rule=Rule(rule), num_speculative_tokens=k, max_tokens=max_tokens)


async def test_exact_texts_are_transformers(pair, reference):
    async with AsyncClient(pair.address) as client:
        for question in QUESTIONS:
            for k in (0, 3, 15):
                done = await client.complete(Chat.of_user(question), options("exact", k))
                expected = reference.generate(done.started.prompt_token_ids, 48)
                assert [*done.token_ids] == [*expected]
                if k == 15:
                    assert done.completion.speculation.num_accepted_draft_tokens > 0


async def test_fly_takes_drafts_and_goes_to_the_end(pair):
    async with AsyncClient(pair.address) as client:
        done = await client.complete(Chat.of_user(QUESTIONS[0]), options("fly", 15, 400))
    assert done.completion.finish_reason is FinishReason.STOP
    assert done.completion.speculation.num_accepted_draft_tokens > 0


async def test_nothing_is_translated_and_the_type_is_told(pair):
    async with AdminClient(pair.admin_address) as admin:
        status, drafters = await admin.status(), await admin.list_drafters()
    assert not any(drafter.translated for drafter in drafters)
    model = next(drafter.model for drafter in drafters if drafter.name == "model")
    for info, is_gguf, kind in (
        (status.verify.model, pair.options.model.endswith(".gguf"), "all F32"),
        (model, pair.options.draft_model.endswith(".gguf"), "Q8_0"),
    ):
        assert (info.dtype == kind) == is_gguf
        assert ("llama.cpp" in info.numerics) == is_gguf


async def test_a_draft_model_beside_the_target_leaves_exact_texts_alone(beside, reference):
    async with AsyncClient(beside.address) as client:
        for question in QUESTIONS:
            for k in (3, 15):
                asked = replace(options("exact", k), drafter="beside")
                done = await client.complete(Chat.of_user(question), asked)
                expected = reference.generate(done.started.prompt_token_ids, 48)
                assert [*done.token_ids] == [*expected]
                assert done.completion.speculation.num_accepted_draft_tokens > 0
    async with AdminClient(beside.admin_address) as admin:
        found = {drafter.name: drafter for drafter in await admin.list_drafters()}
    assert found["beside"].kind == "model"


async def test_a_quantised_replica_is_told_from_the_original(folder):
    """Both have the same tokens and number of parameters; only the tensors' types differ."""
    files = {kind: str(gguf_file(folder, kind, bundled.TARGET)) for kind in ("f16", "q8_0")}
    draft = str(gguf_file(folder, "q8_0", bundled.DRAFT))
    small = {"dtype": "auto", "max_sessions": 2, "max_model_len": 256}
    async with (
        start_stack((files["f16"], draft), small, small) as original,
        start_stack((files["q8_0"], draft), small, small) as quantised,
        orchestrator_over(original, quantised) as (client, admin),
    ):
        targets = (await admin.status()).targets
        assert [target.ready for target in targets] == [True, False]
        assert "its weights fingerprint is" in targets[1].error
        for stack in (original, quantised):
            assert stack.verify_engine.info.weights_fingerprint in targets[1].error
        for _ in range(3):
            await client.complete(QUESTIONS[0], options("exact", 0, 8))
        assert quantised.verify_engine.sessions.opened_total == 0

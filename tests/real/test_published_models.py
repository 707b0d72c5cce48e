"""Published models through the services: exact texts, named rules, drafters without a model."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient, Chat, Generation
from flyspec.rules.presets import DEFAULT_RULE
from flyspec_lab.bench.reference import Reference

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(3600),
    pytest.mark.skipif("MODELS" not in os.environ, reason="needs `make real-test MODELS=DIR`"),
]
MODELS = Path(os.environ.get("MODELS", ""))
TARGET, DRAFT, SMALL = (
    MODELS / os.environ.get(f"REAL_{which}", which) for which in ("TARGET", "DRAFT", "SMALL")
)
CODE = "def is_prime(n: int) -> bool:\n"
QUESTION = Chat.of_user("Write a Python function that returns the n-th Fibonacci number.")
REPEATED = Chat.of_user("Say this three times, word for word: The cat sat on the mat, and the dog.")
TOKENS = 48


@asynccontextmanager
async def served(model: Path, draft: Path | None, **options: object) -> AsyncIterator[AsyncClient]:
    small = {"max_sessions": 2, "max_model_len": 1024, "log_level": "warning", **options}
    chosen = StackOptions(model=str(model), draft_model=str(draft or ""), **small)
    async with Stack(chosen) as stack, AsyncClient(stack.address) as client:
        yield client


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    """Serves the pair in bfloat16, with logits that do not depend on the rows of a step."""
    async with served(TARGET, DRAFT, batch_invariant=True) as pair:
        yield pair


async def exact(client: AsyncClient, prompt: object, **how: object) -> Generation:
    return await client.complete(prompt, rule="exact", max_tokens=TOKENS, **how)


@pytest.mark.parametrize("prompt", [CODE, QUESTION, REPEATED], ids=["code", "chat", "repeated"])
async def test_exact_is_plain_decoding_in_bfloat16(client, prompt):
    plain = await exact(client, prompt, num_speculative_tokens=0)
    assert plain.text.strip()
    for how in (
        {"num_speculative_tokens": "auto"},
        {"num_speculative_tokens": 8},
        {"num_speculative_tokens": 8, "drafter": "multi_level"},
        {"num_speculative_tokens": 8, "drafter": "prompt_lookup", "prediction": plain.text},
    ):
        done = await exact(client, prompt, **how)
        assert done.token_ids == plain.token_ids, how
        if how["num_speculative_tokens"] == 8:
            assert done.completion.speculation.num_accepted_draft_tokens > 0, how


async def test_every_reply_names_its_rule(client):
    for rule in ("exact", "relaxed", "fly", None):
        done = await client.complete(CODE, rule=rule, max_tokens=8)
        assert done.started.rules == (rule or DEFAULT_RULE)
        assert done.started.lossless == (rule == "exact")


async def test_exact_is_transformers_text_in_float32():
    """In bfloat16 both round differently, and near-ties differ."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in (CODE, "The capital of France is")]
    reference = Reference(str(TARGET), "float32")
    expected = [reference.generate(ids, TOKENS) for ids in prompts]
    del reference  # neither fits beside the other everywhere
    async with served(TARGET, DRAFT, dtype="float32", draft_dtype="float32") as pair:
        for ids, tokens in zip(prompts, expected, strict=True):
            for k in (4, "auto"):
                done = await exact(pair, ids, num_speculative_tokens=k)
                assert list(done.token_ids) == tokens, k


async def test_quantised_files_are_served():
    pytest.importorskip("llama_cpp", reason="needs llama.cpp: make llama-cpp-test")
    target, draft = (path.with_name(f"{path.name}.gguf") for path in (TARGET, DRAFT))
    async with served(target, draft) as pair:
        for rule in ("exact", "fly"):
            done = await pair.complete(
                QUESTION, rule=rule, max_tokens=TOKENS, num_speculative_tokens=4
            )
            assert "def " in done.text or "Fibonacci" in done.text
            assert done.started.rules == rule
            assert "llama.cpp" in done.started.numerics
            assert done.completion.speculation.num_accepted_draft_tokens > 0


async def test_a_small_model_with_drafters_that_have_none():
    async with served(SMALL, None, batch_invariant=True) as small:
        for prompt in (CODE, QUESTION, REPEATED):
            plain = await exact(small, prompt, num_speculative_tokens=0)
            for how in (
                {"drafter": "prompt_lookup"},
                {"drafter": "token_recycling"},
                {"drafter": "prompt_lookup", "prediction": plain.text},
            ):
                for k in ("auto", 8):
                    done = await exact(small, prompt, num_speculative_tokens=k, **how)
                    assert done.text == plain.text, (how, k)

"""The bundled head, served: exact texts without a trip to a drafter, and a relay behind it."""

from __future__ import annotations

import json

import pytest

from flyspec.bundled import EAGLE3, TARGET
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient, Chat, GenerateOptions
from flyspec.config import VerifySettings
from flyspec.engine.loading import load_model
from flyspec.rules import Rule
from flyspec_lab.word_problems import problems
from tests.observability.scraping import scrape

pytestmark = pytest.mark.skipif(
    not EAGLE3.is_dir(), reason=f"{EAGLE3} is not there; docs/heads.md says how to train it"
)
PROMPTS = [Chat.of_user(problem.question) for problem in problems("bundled head", 4)]
MAX_BYTES = 6_000_000


def work_of_drafter(stack):
    """Streams opened at the draft service, and tokens that it proposed, so far."""
    found = scrape(stack.services["draft"].facts["metrics_port"])
    return (
        found.total("flyspec_draft_sessions_opened_total"),
        found.total("flyspec_draft_tokens_total"),
    )


async def generate(client, drafter, k, rule="exact"):
    """Token ids of all prompts, and the mean number of tokens of a round with drafts."""
    options = GenerateOptions(
        rule=Rule(rule), drafter=drafter, num_speculative_tokens=k, max_tokens=48
    )
    texts = [await client.complete(prompt, options) for prompt in PROMPTS]
    totals = [text.completion.speculation for text in texts]
    accepted = sum(each.num_accepted_draft_tokens for each in totals)
    rounds = sum(each.num_spec_steps for each in totals)
    return [text.token_ids for text in texts], 1 + accepted / max(1, rounds)


async def test_a_head_needs_no_drafter(bundled):
    async with AsyncClient(bundled.address, max_retries=0) as client:
        plain, _ = await generate(client, "", 0)
        before = work_of_drafter(bundled)
        for k, least in ((1, 1.5), (5, 3.0), (15, 3.0)):
            texts, tokens = await generate(client, "eagle3", k)
            assert texts == plain
            assert tokens > least
        await generate(client, "eagle3", 15, "fly")
        assert work_of_drafter(bundled) == before


async def test_a_relay_extends_the_head(bundled):
    async with AsyncClient(bundled.address, max_retries=0) as client:
        plain, _ = await generate(client, "", 0)
        _, by_head = await generate(client, "eagle3", 15)
        before = work_of_drafter(bundled)
        texts, tokens = await generate(client, "relay", 15)
        assert texts == plain
        assert tokens > by_head
        opened, proposed = work_of_drafter(bundled)
        assert opened > before[0]
        assert proposed > before[1]


def test_it_is_small_and_of_this_target():
    assert sum(path.stat().st_size for path in EAGLE3.iterdir()) < MAX_BYTES
    facts = json.loads((EAGLE3 / "config.json").read_text())["flyspec_training"]
    target = load_model(str(TARGET), "cpu", "bfloat16").info
    assert facts["target_weights_fingerprint"] == target.weights_fingerprint


def test_stacks_of_the_bundled_target_alone_have_it():
    assert StackOptions().resolved().heads == f"eagle3={EAGLE3}"
    assert StackOptions(model="other").resolved().heads is None
    assert VerifySettings(model="other").heads == ""

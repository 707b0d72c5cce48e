"""Acceptance of translated proposals: the bundled byte-level draft model, exact."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from demo.corpus import chat_prompt
from flyspec import wire
from flyspec.config import DraftSettings
from flyspec.engine.loading import load_model
from flyspec.engine.model import Draw, Step
from flyspec.engine.runner import ModelRunner
from flyspec.tokenizer import Tokenizer
from flyspec.values.tokens import SamplingParams
from flyspec_lab.word_problems import problems
from tests.draft_service.draft_harness import start_service, tokens_of
from tests.draft_service.tokenizer_zoo import MODELS

K = 15
MAX_TOKENS = 160


@dataclass
class Account:
    """The results of the rounds."""

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    texts: int = 0

    def __str__(self) -> str:
        return (
            f"{self.texts} texts, {self.rounds} rounds: {self.drafted / self.rounds:.2f} tokens "
            f"drafted and {self.emitted / self.rounds:.2f} emitted a round"
        )


def agreed(drafts: list[int], chosen: list[int]) -> int:
    count = 0
    while count < len(drafts) and drafts[count] == chosen[count]:
        count += 1
    return count


def plain(runner: ModelRunner, prompt: list[int], eos: tuple[int, ...]) -> list[int]:
    """The target's own greedy text."""
    slot, have = runner.cache.acquire(prompt)
    tokens = list(prompt)
    have = min(have, len(prompt) - 1)
    while len(tokens) < len(prompt) + MAX_TOKENS and tokens[-1] not in eos:
        (drawn,) = runner.draw([Draw(Step(slot, have, tokens[have:], 1), SamplingParams())])
        have = len(tokens)
        tokens += drawn.token_ids
    runner.cache.release(slot)
    return tokens


@pytest.mark.parametrize("number", [2, pytest.param(20, marks=pytest.mark.full)])
async def test_word_problems(number: int) -> None:
    """Greedy and exact: the target's own text, several tokens per round."""
    loaded = load_model(str(MODELS / "target"), "cpu", "float64")
    runner = ModelRunner(loaded, 1)
    runner.warm_up()
    bundle, tokenizer = loaded.tokenizer, Tokenizer(loaded.tokenizer)
    settings = DraftSettings(
        model=str(MODELS / "draft-bytes"), dtype="float32", device="cpu", threads=1, port=0
    )
    account = Account()
    async with start_service(settings) as service:
        messages = wire.tokenizer_messages(
            bundle.facts(loaded.info.vocab_size), bundle.tokenizer_json
        )
        await service.stub.AddTokenizer(iter(messages))
        for problem in problems(7, number):
            prompt = tokenizer.encode(chat_prompt(problem.question), add_special_tokens=False)
            expected = plain(runner, prompt, bundle.eos_token_ids)
            client = await service.client().open(prompt, fingerprint=bundle.fingerprint)
            tokens, kept = list(prompt), len(prompt)
            slot, _ = runner.cache.acquire(prompt)
            have = 0
            while len(tokens) < len(expected):
                drafts = tokens_of(await client.advance(kept, tokens[kept:], K))
                fed = [*tokens[have:], *drafts]
                draw = Draw(Step(slot, have, fed, len(drafts) + 1), SamplingParams())
                chosen = runner.draw([draw])[0].token_ids
                count = agreed(drafts, chosen)
                emitted = chosen[: count + 1]
                end = next((i for i, t in enumerate(emitted) if t in bundle.eos_token_ids), None)
                emitted = emitted if end is None else emitted[: end + 1]
                emitted = emitted[: len(expected) - len(tokens)]
                kept = have = len(tokens) + min(count, len(emitted))
                tokens += emitted
                account.rounds += 1
                account.emitted += len(emitted)
                account.drafted += len(drafts)
            account.texts += 1
            assert tokens == expected
            runner.cache.release(slot)
            client.call.cancel()
    print(f"K = {K}, greedy, exact, draft-bytes for target: {account}")
    assert account.emitted / account.rounds > 4

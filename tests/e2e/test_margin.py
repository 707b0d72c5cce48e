"""`margin` with windows across rounds on the bundled pair, against the rule's definition.

The reference knows no services: transformers' forward over the whole text so far, in float64, and
DESIGN's words for what a window is.
"""

from __future__ import annotations

import pytest
import torch

from flyspec.bundled import MODELS
from flyspec.client import Chat, GenerateOptions
from flyspec.engine.loading import load_model
from flyspec.rules import Rule
from flyspec.values.tokens import Origin
from flyspec_lab.word_problems import problems

K, W, TAU, MAX_TOKENS = 4, 6, 0.3, 48
PROMPTS = [
    Chat.of_user(problems("margin", 1)[0].question),
    'import os\n\ndef read_lines(path):\n    """Return the lines of a text file."""\n',
    "class Queue:\n    def put(self, item):\n",
]


@pytest.fixture(scope="module")
def pair():
    return [load_model(str(MODELS / name), "cpu", "float64") for name in ("target", "draft")]


class Reference:
    """One generation by the definition."""

    def __init__(self, pair, prompt):
        (self.target, self.draft), self.prompt = [loaded.model for loaded in pair], prompt
        self.eos = set(pair[0].tokenizer.eos_token_ids)
        self.control = set(pair[0].tokenizer.control_token_ids)
        self.tokens, self.window, self.rollbacks, self.loose = list(prompt), None, 0, 0
        self.limit = len(prompt) + MAX_TOKENS

    def drafts(self):
        ids = torch.tensor([self.tokens])
        first = len(self.tokens) == len(self.prompt)  # comes before the drafter has read the prompt
        if first or ids.shape[1] >= self.limit:
            return []
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            whole = self.draft.generate(ids, attention_mask=mask, max_new_tokens=K, do_sample=False)
        return whole[0, ids.shape[1] :].tolist()

    def fail(self, start):
        """The window's token is dropped, with everything after it."""
        position, own, _ = self.window
        self.rollbacks += position < start
        self.tokens, self.window = [*self.tokens[:position], own], None

    def round(self):
        start, drafts = len(self.tokens), self.drafts()
        if not drafts and self.window:
            return self.fail(start)
        with torch.inference_mode():
            logits = self.target(torch.tensor([[*self.tokens, *drafts]])).logits[0]
        rows = torch.log_softmax(logits, -1)[start - 1 :]
        for row, token in zip(rows, drafts, strict=False):
            own = int(row.argmax())
            if token == own:
                self.tokens.append(token)
                if self.window:
                    self.window[2] -= 1
                    if self.window[2] == 0:
                        self.window, self.loose = None, self.loose + 1
                if token in self.eos:
                    break
            elif self.window:
                return self.fail(start)
            elif float(row.max() - row[token]) < TAU and not self.control & {token, own}:
                self.window = [len(self.tokens), own, W]
                self.tokens.append(token)
            else:
                self.tokens.append(own)
                return None
        else:
            self.tokens.append(int(rows[-1].argmax()))
        if self.window and self.tokens[-1] in self.eos:
            self.fail(start)
        if self.window and len(self.tokens) >= self.limit:
            self.fail(len(self.tokens))  # by the orchestrator, after the round
        return None

    def run(self):
        while True:
            final = self.window[0] if self.window else len(self.tokens)
            output = self.tokens[len(self.prompt) : final][:MAX_TOKENS]
            ended = next((i for i, t in enumerate(output) if t in self.eos), None)
            if ended is not None or len(output) == MAX_TOKENS:
                return output[: MAX_TOKENS if ended is None else ended + 1]
            self.round()


@pytest.mark.full  # tests/orchestrator/test_windows.py does the same with tiny models
async def test_margin_rolls_back_and_equals_its_definition(bundled_stack, pair):
    options = GenerateOptions(
        rule=Rule("margin", margin_threshold=TAU),
        num_speculative_tokens=K,
        max_tokens=MAX_TOKENS,
    )
    rollbacks = loose = 0
    async with bundled_stack.client() as client:
        for prompt in PROMPTS:
            got = await client.complete(prompt, options)
            reference = Reference(pair, list(got.started.prompt_token_ids))
            assert got.token_ids == reference.run()
            metrics = got.completion.speculation
            assert got.started.rule.fly_window_size == W
            assert metrics.num_rollbacks == reference.rollbacks
            assert metrics.num_loose_tokens == got.origins.count(Origin.LOOSE) == reference.loose
            rollbacks, loose = rollbacks + metrics.num_rollbacks, loose + metrics.num_loose_tokens
    print(f"{rollbacks} rollbacks, {loose} loose tokens")
    assert rollbacks > 0
    assert loose > 0

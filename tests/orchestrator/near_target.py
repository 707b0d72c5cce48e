"""A target and a drafter close to it, as functions of the prefix."""

from __future__ import annotations

import functools

import torch

from flyspec.engine.loading import load_model
from flyspec.rules import Rule
from tests.orchestrator.world import EOS

MARGIN = Rule("margin", margin_threshold=0.3)
CONTROL = {0, 1, 2}
PROMPTS = [
    "The cat sat on the mat, and the dog sat",
    "def total(values):\n    result",
    "数学 😀 café",
    "a b a b a b a b",
    "the log while the cat saw",
    "the cat the cat the cat the cat the",
]


class Models:
    """Target, drafter and the rule `margin` as functions of the prefix, by transformers."""

    def __init__(self, model_dirs, threshold: float) -> None:
        self._target, self._draft = (load_model(d, "cpu", "float64").model for d in model_dirs)
        self.threshold = threshold
        self._rows: dict[tuple, torch.Tensor] = {}

    def _row(self, model, tokens) -> torch.Tensor:
        key = (id(model), *tokens)
        if key not in self._rows:
            with torch.inference_mode():
                logits = model(torch.tensor([list(tokens)])).logits[0]
            self._rows[key] = torch.log_softmax(logits[-1].double(), -1)
        return self._rows[key]

    def log_probs(self, tokens) -> torch.Tensor:
        return self._row(self._target, tokens)

    def own(self, tokens) -> int:
        return int(self.log_probs(tokens).argmax())

    def gap(self, tokens, token) -> float:
        row = self.log_probs(tokens)
        return float(row.max() - row[token])

    def passes(self, tokens, token) -> bool:
        if CONTROL & {token, self.own(tokens)}:
            return False
        return self.gap(tokens, token) < self.threshold

    def guess(self, tokens, count) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < count and EOS not in drafted:
            drafted.append(int(self._row(self._draft, [*tokens, *drafted]).argmax()))
        return drafted


def greedy_of(directory: str):
    """transformers' own greedy continuation in float64."""
    model = load_model(directory, "cpu", "float64").model

    @functools.cache
    def generate(token_ids, max_new_tokens):
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
        return output[0, len(token_ids) :].tolist()

    return lambda token_ids, max_new_tokens: list(generate(tuple(token_ids), max_new_tokens))

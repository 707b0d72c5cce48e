"""What transformers say of a target, and prompts for it."""

from __future__ import annotations

import functools

import torch

from flyspec.engine.loading import load_model
from flyspec.rules import Rule

MARGIN = Rule("margin", margin_threshold=0.3)
PROMPTS = [
    "The cat sat on the mat, and the dog sat",
    "def total(values):\n    result",
    "数学 😀 café",
    "a b a b a b a b",
    "the log while the cat saw",
    "the cat the cat the cat the cat the",
]


class LogProbs:
    """The target's log-probabilities as a function of the prefix, by transformers."""

    def __init__(self, directory: str) -> None:
        self._model = load_model(directory, "cpu", "float64").model

    def after(self, tokens) -> torch.Tensor:
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(tokens)])).logits[0]
        return torch.log_softmax(logits[-1].double(), -1)


def greedy_of(directory: str):
    """transformers' own greedy continuation of token ids in float64, up to an end of sequence."""
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

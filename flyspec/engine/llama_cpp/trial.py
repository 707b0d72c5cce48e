"""The trial of a model in llama.cpp: how far rows of a batch are from the same steps one by one.

llama.cpp multiplies one row in another way than several, and attends in another way too, so a
token's logits depend a little on how many tokens a step has. With `exact`, a text can therefore
differ from plain decoding's at a near-tie. Nothing else is there to compare with: a GGUF file is
its own original.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flyspec.engine.model import Model, Step

_LENGTH, _FEWEST = 48, 12
_WORK = 1e10
"""Rows times parameters: fewer rows of large models, whose steps take long."""
_BATCH = 16


class BatchDifference(NamedTuple):
    """The result over `rows` rows: `largest` difference of logits, `other` most likely tokens."""

    rows: int
    largest: float
    other: int

    def __str__(self) -> str:
        if not self.largest:
            return f"{self.rows} rows in batches have the same bits as single steps"
        return (
            f"logits of {self.rows} rows in batches differ from single steps by up to "
            f"{self.largest:.2g}; {self.other} of them have another most likely token"
        )


def compare(model: Model) -> BatchDifference:
    """Run a sequence in batches, with a rollback between them and a neighbour, and step by step.

    Raises what the model raises, and `FloatingPointError` for logits that are not finite.
    """
    cache, size = model.cache, min(model.info.vocab_size, 251)
    affordable = int(_WORK / max(1, model.info.num_parameters))
    length = min(_LENGTH, max(_FEWEST, affordable), cache.max_length)
    ids = [(7 * i * i + 3 * i + 1) % size for i in range(length)]
    with cache.borrowed(2) as (slot, *neighbours):
        alone = [model.forward([Step(slot, i, [ids[i]])])[0].logits.clone() for i in range(length)]
        single = torch.cat(alone)
        batched = []
        for at in range(0, length, _BATCH):
            part = ids[at : at + _BATCH]
            model.forward([Step(slot, at, ids[::-1][: len(part)])])  # rolled back by the next one
            steps = [Step(slot, at, part, len(part))]
            steps += [Step(other, 0, ids[: at + 1]) for other in neighbours]
            batched.append(model.forward(steps)[0].logits.clone())
        together = torch.cat(batched)
    if not bool(single.isfinite().all() and together.isfinite().all()):
        raise FloatingPointError(f"the logits of {model.info.name} are not finite")
    largest = float((together - single).abs().max())
    other = int((together.argmax(dim=-1) != single.argmax(dim=-1)).sum())
    return BatchDifference(length, largest, other)

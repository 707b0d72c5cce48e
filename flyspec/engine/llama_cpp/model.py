"""A model served by llama.cpp, with the interface of `flyspec.engine.model.Model`.

A slot is one of llama.cpp's sequences, with its own part of the KV cache. Its logits are float32,
read where llama.cpp leaves them. There are no hidden rows: heads and judges that read them need
another engine.

llama.cpp multiplies one row in another way than several, and attends in another way too, so a
token's logits depend a little on how many tokens a step has (`compare`). With `exact`, a text can
therefore differ from plain decoding's at a near-tie. Nothing else is there to compare with: a GGUF
file is its own original.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from flyspec.engine import stepwise
from flyspec.engine.cache_table import Copy
from flyspec.engine.llama_cpp.binding import Context
from flyspec.engine.model import NEVER, Draw, Interrupt, Model, Rows, Step, check_trees, drafted
from flyspec.engine.slots import SlotTable
from flyspec.values.admin import ModelInfo
from flyspec.values.tokens import Drafted, still_needed

log = logging.getLogger(__name__)

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


class LlamaCppModel:
    """A GGUF model. Not thread-safe: one thread at a time.

    `bytes_per_token` is an estimate from the file's metadata; `info.numerics` is completed by
    `warm_up`.
    """

    def __init__(self, info: ModelInfo, context: Context, bytes_per_token: int) -> None:
        self.info = info
        self.bytes_per_token = bytes_per_token
        self.cache = SlotTable(context.plan.num_sequences, info.context_length)
        self._context = context
        self._lengths = [0] * context.plan.num_sequences
        """Tokens that llama.cpp holds of each sequence, valid or not."""
        self._powers = np.empty(info.vocab_size, np.float32)

    def __str__(self) -> str:
        threads = self._context.plan.threads
        return f"llama.cpp, {threads} thread{'s' * (threads > 1)}"

    @property
    def tree_refusal(self) -> str:
        return "llama.cpp keeps each row of a sequence at its position, where a tree has several"

    def warm_up(self) -> None:
        """Compare rows of a batch with single steps, and say in `info.numerics` how they differ."""
        found = compare(self)
        self.cache.forget()
        if found.largest:
            how = f"rows of a batch within {found.largest:.2g} of single steps"
        else:
            how = "rows of a batch as in single steps"
        log.info("%s: %s", self.info.name, found)
        base = self.info.numerics.removesuffix(f", {how}")
        self.info = replace(self.info, numerics=f"{base}, {how}")

    def synchronize(self) -> None: ...  # reading logits has waited

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """Like `Model.forward`; rows are float32 on the CPU.

        Raises `ValueError` for a step that asks for hidden rows or has unknown tokens.
        """
        if any(step.hidden_layers for step in steps):
            raise ValueError(
                f"hidden_layers: {self.info.name} is served by llama.cpp, which returns no hidden "
                "rows; serve the safetensors checkpoint instead"
            )
        check_trees(steps, self.tree_refusal)
        self._prepare(steps)
        order = sorted(range(len(steps)), key=lambda i: steps[i].slot)
        rows = self._decode([steps[i] for i in order])
        found: list[Rows] = [Rows(torch.empty(0))] * len(steps)
        at = 0
        for i in order:
            step = steps[i]
            found[i] = Rows(torch.from_numpy(rows[at : (at := at + step.num_logits)]))
            self.cache.record(step.slot, step.start, step.token_ids)
        return found

    def draw(self, draws: Sequence[Draw], interrupt: Interrupt = NEVER) -> list[Drafted]:
        """Like `Model.draw`. Greedy draws of single rows are made without torch in between."""
        if all(map(_is_simple, draws)):
            return self._most_likely(draws, interrupt)
        return stepwise.draw(self.forward, draws, interrupt)

    def _most_likely(self, draws: Sequence[Draw], interrupt: Interrupt) -> list[Drafted]:
        """Draw greedily from single rows, step by step for all draws that go on."""
        tokens: list[list[int]] = [[] for _ in draws]
        chances: list[list[float]] = [[] for _ in draws]
        left = [draw.min_confidence for draw in draws]
        steps = {
            i: draw.step if draw.sampling else draw.step._replace(num_logits=0)
            for i, draw in sorted(enumerate(draws), key=lambda pair: pair[1].step.slot)
        }
        while steps:
            own = [*steps.values()]
            self._prepare(own)
            rows = iter(self._decode(own))
            following = {}
            for i, step in steps.items():
                self.cache.record(step.slot, step.start, step.token_ids)
                if not step.num_logits:
                    continue
                draw, row = draws[i], next(rows)
                token = int(row.argmax())
                tokens[i].append(token)
                if draw.confidences or draw.min_confidence > 0:
                    chances[i].append(self._chance(row, token))
                    left[i] = still_needed(left[i], chances[i][-1:])
                elif not np.isfinite(row[token]):
                    raise FloatingPointError("the logits are not finite")
                more = len(tokens[i]) < draw.max_tokens and token not in draw.stop_token_ids
                if more and left[i] <= 1:
                    following[i] = Step(step.slot, step.start + len(step.token_ids), [token])
            steps = {} if interrupt.is_set else following
        return [
            drafted(draw, own, sure) for draw, own, sure in zip(draws, tokens, chances, strict=True)
        ]

    def _chance(self, row: Any, token: int) -> float:
        """Return the probability of a row's most likely token."""
        powers = np.subtract(row, row[token], out=self._powers)
        total = float(np.exp(powers, out=powers).sum())
        if not math.isfinite(total):
            raise FloatingPointError("the logits are not finite")
        return 1.0 / total

    def _prepare(self, steps: Sequence[Step]) -> None:
        """Carry out pending copies, reserve positions and drop what the steps overwrite."""
        for copy in self.cache.take_moves().copies:
            assert isinstance(copy, Copy), "only trees move rows"
            self._context.copy(*copy)
            self._lengths[copy.target] = copy.length
        size = self.info.vocab_size
        for slot, start, token_ids, *_ in steps:
            if not (min(token_ids) >= 0 and max(token_ids) < size):
                raise ValueError(f"token ids must be between 0 and {size - 1}")
            self.cache.reserve(slot, start, len(token_ids))
            if self._lengths[slot] > start:
                self._context.keep(slot, start)
            # If the step fails, part of it may be there; the next one drops it.
            self._lengths[slot] = start + len(token_ids)

    def _decode(self, steps: Sequence[Step]) -> Any:
        """Run prepared steps, in the order of their slots; return all rows wanted."""
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for _, start, token_ids, num_logits, *_ in steps:
            tokens += token_ids
            positions += range(start, start + len(token_ids))
            wanted += range(len(tokens) - num_logits, len(tokens))
        slots = chain.from_iterable(repeat(step.slot, len(step.token_ids)) for step in steps)
        return self._context.decode(tokens, positions, [*slots], wanted)


def _is_simple(draw: Draw) -> bool:
    """True if a draw's tokens are the most likely ones of the logits as they are."""
    if draw.sampling is None:
        return True
    return draw.sampling.greedy and draw.is_plain and draw.step.num_logits <= 1

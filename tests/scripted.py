"""A scripted model: logits are a function of the preceding tokens.

It holds its callers to the interface: a step must build on what its slot really holds. Its cache's
memory holds token ids, which it reads and writes where the table says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from flyspec.draft_trees import paths
from flyspec.engine import stepwise
from flyspec.engine.cache_table import CacheTable, RowCopy
from flyspec.engine.model import NEVER, Draw, Interrupt, Rows, Step
from flyspec.engine.slots import SlotTable
from flyspec.values.admin import ModelInfo
from flyspec.values.tokens import Drafted

Script = Callable[[Sequence[int]], Sequence[float]]


def counting(tokens: Sequence[int], vocab_size: int = 32) -> Sequence[float]:
    """Predicts the number after the last one, cyclically; the one after that is second."""
    likely = [(tokens[-1] + 1) % vocab_size, (tokens[-1] + 2) % vocab_size]
    return [2.0 if t == likely[0] else 1.0 if t == likely[1] else 0.0 for t in range(vocab_size)]


class ScriptedModel:
    """A `Model` of a few lines; `calls` are the steps of each forward.

    Its hidden row of a layer is [the last token, the layer].
    """

    def __init__(
        self,
        script: Script = counting,
        num_slots: int = 4,
        context_length: int = 200,
        cache: CacheTable | None = None,
    ) -> None:
        self.bytes_per_token = 0
        self.tree_refusal = ""
        self.info = ModelInfo("scripted", "", len(script([0])), context_length)
        self.cache = cache or SlotTable(num_slots, context_length)
        self._width = self.cache.block_size or context_length
        # Blocks 0 to `num_blocks`, or slots.
        count = self.cache.num_blocks + 1 if self.cache.num_blocks else num_slots
        self._memory = np.full(count * self._width, -1)
        self.calls: list[list[Step]] = []
        self._script = script

    def warm_up(self) -> None:
        """Nothing to try."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        self.calls.append(list(steps))
        assert len({step.slot for step in steps}) == len(steps)
        for slot, start, token_ids, *_ in steps:
            self.cache.reserve(slot, start, len(token_ids))
        for copy in self.cache.take_moves().copies:
            if isinstance(copy, RowCopy):
                self._memory[copy.targets] = self._memory[copy.sources]
                continue
            source, target, length = copy
            read, written = source * self._width, target * self._width
            self._memory[written : written + length] = self._memory[read : read + length]
        return [self._rows(step) for step in steps]

    def draw(self, draws: Sequence[Draw], interrupt: Interrupt = NEVER) -> list[Drafted]:
        return stepwise.draw(self.forward, draws, interrupt)

    def _rows(self, step: Step) -> Rows:
        slot, start, token_ids, count, layers, *_ = step
        assert self.cache.length(slot) == start, "the step builds on what the slot lacks"
        self._memory[self.cache.rows(slot, start, len(token_ids))] = token_ids
        self.cache.record(slot, start, token_ids[: step.num_chained])
        end = start + step.num_chained
        tokens = self._memory[self.cache.rows(slot, 0, end)].tolist()
        assert tokens == self.cache.held(slot)
        tree = self._memory[self.cache.rows(slot, end, len(step.parents))].tolist()
        texts = [tokens[:i] for i in range(1, end + 1)]  # what each row reads
        texts += [[*tokens, *(tree[i] for i in path)] for path in paths(step.parents)]
        wanted, kept = texts[len(texts) - count :], texts[len(texts) - step.hidden_count :]
        logits = torch.tensor([self._script(text) for text in wanted], dtype=torch.float64)
        hidden = [torch.tensor([[text[-1], i] for text in kept]) for i in layers]
        return Rows(logits.view(count, self.info.vocab_size), tuple(hidden))

"""The program of a proposal's further steps: one token per sequence each, drawn on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flyspec.engine.attention.paged import Places
from flyspec.engine.batched_logits import RowSampling
from flyspec.engine.captured.inputs import Inputs
from flyspec.engine.captured.program import FLOATS, Drawing, Machine, Program
from flyspec.engine.captured.shapes import padded
from flyspec.engine.model import Draw
from flyspec.engine.sampling import row_keys


class SingleSteps(Program):
    """`count` forwards of one token per sequence, each of the token that the one before drew."""

    def __init__(self, machine: Machine, sequences: int, count: int, drawing: Drawing) -> None:
        self.machine, self._sequences, self._count = machine, sequences, count
        self._drawing = drawing
        each = ("positions", "writes", "ends", "keys")
        sizes = {"rows": sequences} | dict.fromkeys(each, sequences * count)
        self.inputs = Inputs(
            sizes | dict.fromkeys(RowSampling._fields, sequences), FLOATS, machine.device
        )
        self._each = [
            tuple(self.inputs[name].view(count, sequences)[index] for name in each)
            for index in range(count)
        ]
        # Outside of the graphs' memory, which others overwrite before this is read.
        self.outcome = torch.zeros(count, 2, sequences, dtype=torch.float64, device=machine.device)
        """Tokens and probabilities drawn in each step."""
        shape = padded(sequences, 1)
        self._steps = [
            machine.attention.following(shape, Places(self.inputs["rows"], ends, positions))
            for positions, _, ends, _ in self._each
        ]

    def fill(self, draws: Sequence[Draw], drawn: int) -> None:
        """Write the inputs of draws that have drawn `drawn` tokens, all but the last one cached."""
        inputs, cache = self.inputs, self.machine.cache
        inputs.clear()
        host = inputs.host
        shape = self._count, self._sequences
        positions, writes, ends, keys = (
            host[name].reshape(shape) for name in ("positions", "writes", "ends", "keys")
        )
        for index, draw in enumerate(draws):
            step = draw.step
            first = step.start + len(step.token_ids) + drawn - 1
            count = min(self._count, draw.max_tokens - drawn)
            if draw.sampling is None or count <= 0:
                continue
            after = range(first + 1, first + count + 1)
            host["rows"][index] = step.slot + 1
            positions[:count, index] = range(first, first + count)
            writes[:count, index] = cache.rows(step.slot, first, count)
            ends[:count, index] = after
            if self._drawing is not Drawing.GREEDY:
                keys[:count, index] = row_keys(draw.seed, after)
        self.fill_samplings(draws)
        inputs.send()

    def idle(self) -> None:
        self.fill((), 1)

    def run(self) -> None:
        latest = self.machine.latest[: self._sequences]
        each = zip(self._steps, self._each, self.outcome, strict=True)
        for step, (positions, writes, _, keys), outcome in each:
            output = self.machine.forward(latest, positions, writes, step)
            tokens, chances = self.draw(output.logits[0], self._drawing, keys, None)
            latest.copy_(tokens.clamp(min=0))
            outcome[0].copy_(tokens)
            outcome[1].copy_(chances)

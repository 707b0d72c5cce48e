"""The program of a step: any number of tokens per sequence, and what is drawn after them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from flyspec.engine.attention.paged import GroupedStep, HostPlaces, Places
from flyspec.engine.batched_logits import RowSampling
from flyspec.engine.captured.inputs import Inputs
from flyspec.engine.captured.program import FLOATS, Drawing, Machine, Program
from flyspec.engine.captured.shapes import StepShape
from flyspec.engine.model import Draw, Step
from flyspec.engine.sampling import row_keys


class FirstStep(Program):
    """A forward of any number of tokens per sequence, and a draw from each row if asked for.

    `groups` are the shapes with the indices of their sequences; a captured step has one. `wanted`
    is how many rows of logits the steps want, in a step that runs once; a captured one, for which
    it is None, computes all. With `layers`, hidden states are kept too.
    """

    def __init__(
        self,
        machine: Machine,
        groups: Sequence[tuple[Sequence[int], StepShape]],
        drawing: Drawing,
        wanted: int | None = None,
        layers: bool = False,
    ) -> None:
        self.machine, self._groups, self._drawing = machine, groups, drawing
        self._captured, self._layers = wanted is None, layers
        shapes = [shape for _, shape in groups]
        self._tokens = sum(shape.tokens for shape in shapes)
        self._sequences = sum(shape.sequences for shape in shapes)
        sizes = dict.fromkeys(("token_ids", "positions", "writes"), self._tokens)
        for index, shape in enumerate(shapes):
            sizes |= {f"rows{index}": shape.sequences, f"ends{index}": shape.sequences}
        # A model always computes some row of logits.
        rows = self._tokens if wanted is None else max(1, wanted)
        sizes |= dict.fromkeys(("wanted", "keys", "owner"), rows) | {"last": self._sequences}
        sizes |= dict.fromkeys(RowSampling._fields, self._sequences)
        self.inputs = Inputs(sizes, FLOATS, machine.device, pinned=self._captured)
        # Outside of the graphs' memory, which others overwrite before this is read.
        self.outcome = torch.zeros(2, rows, dtype=torch.float64, device=machine.device)
        """Tokens and probabilities drawn from each row."""
        steps = []
        at = 0
        for index, shape in enumerate(shapes):
            places = Places(
                self.inputs[f"rows{index}"],
                self.inputs[f"ends{index}"],
                self.inputs["positions"][at : at + shape.tokens],
            )
            once = not self._captured
            steps.append((machine.attention.step(shape, places, once), shape.tokens))
            at += shape.tokens
        self._steps = [step for step, _ in steps]
        only = self._steps[0] if len(steps) == 1 else None
        self._attention = only or GroupedStep(machine.attention, steps)

    def fill(self, steps: Sequence[Step], draws: Sequence[Draw] = ()) -> list[slice]:
        """Write the inputs of these steps; return where each one's wanted rows are in the results.

        `draws` are those of the steps, if tokens are drawn.
        """
        inputs, cache = self.inputs, self.machine.cache
        inputs.clear()
        host = inputs.host
        found = [slice(0, 0)] * len(steps)
        at = 0
        for number, (indices, shape) in enumerate(self._groups):
            own = [steps[index] for index in indices or range(len(steps))]
            lengths = [len(step.token_ids) for step in own]
            rows, ends = host[f"rows{number}"], host[f"ends{number}"]
            for place, (step, first) in enumerate(zip(own, shape.first_rows(lengths), strict=True)):
                index = indices[place] if indices else place
                begin, count = at + first, lengths[place]
                stop = begin + count
                host["token_ids"][begin:stop] = step.token_ids
                host["positions"][begin:stop] = range(step.start, step.start + count)
                if shape.longest:  # padding repeats the last position: they must ascend
                    host["positions"][stop : begin + shape.longest] = step.start + count - 1
                host["writes"][begin:stop] = cache.rows(step.slot, step.start, count)
                rows[place], ends[place] = step.slot + 1, step.start + count
                found[index] = slice(stop - step.num_logits, stop)
            padding = [0] * (shape.sequences - len(own))
            counts = np.array([*lengths, *padding], np.int64)
            self._steps[number].plan(HostPlaces(rows, ends, counts))
            at += shape.tokens
        self.rows = found
        if not self._captured:
            wanted = [row for part in found for row in range(part.start, part.stop)]
            host["wanted"][: len(wanted)] = wanted
            sizes = (part.stop - part.start for part in found)
            found = [slice(*part) for part in pairwise(accumulate(sizes, initial=0))]
        self._fill_draws(draws, found)
        inputs.send()
        return found

    def _fill_draws(self, draws: Sequence[Draw], rows: Sequence[slice]) -> None:
        """Write what is needed to draw from these rows of logits."""
        host = self.inputs.host
        self.fill_samplings(draws)
        for index, (draw, own) in enumerate(zip(draws, rows, strict=True) if draws else ()):
            step = draw.step
            if not step.num_logits:
                continue
            host["owner"][own] = index
            host["last"][index] = own.stop - 1
            if self._drawing is not Drawing.GREEDY:
                end = step.start + len(step.token_ids) + 1
                host["keys"][own] = row_keys(draw.seed, range(end - step.num_logits, end))

    def idle(self) -> None:
        self.fill(())

    def run(self) -> None:
        inputs, machine = self.inputs, self.machine
        options: dict[str, Any] = {}
        if not self._captured:
            options["logits_to_keep"] = inputs["wanted"]
        if self._layers:
            options["output_hidden_states"] = True
        self.output = machine.forward(
            inputs["token_ids"], inputs["positions"], inputs["writes"], self._attention, **options
        )
        logits = self.output.logits[0]
        if self._captured:
            self.output = None  # its memory is the graph's
            logits = machine.keep(logits)
        self.logits = logits
        if self._drawing is Drawing.NONE:
            return
        tokens, chances = self.draw(logits, self._drawing, inputs["keys"], inputs["owner"])
        last = tokens.index_select(0, inputs["last"])[: len(machine.latest)]
        machine.latest[: len(last)].copy_(last.clamp_(min=0))
        self.outcome[0].copy_(tokens)
        self.outcome[1].copy_(chances)

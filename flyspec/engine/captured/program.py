"""Programs: what a step of fixed shape does on the device, without the host.

Everything that differs between two runs of a program is in tensors that stay where they are, and
nothing is read from the device, so that it can be captured as a graph. There are two: `FirstStep`,
any number of tokens per sequence and what is drawn after them, and `SingleSteps`, a proposal's
further steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyspec.engine.attention.paged import (
    GroupedStep,
    HostPlaces,
    PagedAttention,
    PagedStep,
    Places,
)
from flyspec.engine.batched_logits import RowSampling, draw_rows, truncates, warp_rows
from flyspec.engine.captured.shapes import MAX_TOKENS, SEQUENCES, StepShape, padded
from flyspec.engine.kv_memory import PagedCache
from flyspec.engine.logits import computable
from flyspec.engine.model import Draw, Step
from flyspec.engine.sampling import likeliest, row_keys
from flyspec.values.tokens import SamplingParams


class Inputs:
    """Named vectors of int64 or float64, views of one buffer on the host and one on the device.

    `host` is written, then `send` copies everything. The device's tensors never move, so a captured
    graph may read them.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        floats: Collection[str],
        device: torch.device,
        pinned: bool = True,
    ) -> None:
        total = sum(sizes.values())
        pinned = pinned and device.type == "cuda"  # which takes longer than it saves once
        buffer = torch.zeros(total, dtype=torch.int64, pin_memory=pinned)
        self._pinned = pinned
        self._buffer, self._sent = buffer, torch.zeros(total, dtype=torch.int64, device=device)
        self._copied: torch.cuda.Event | None = None
        self.host: dict[str, NDArray[Any]] = {}
        self._device: dict[str, Tensor] = {}
        at = 0
        for name, size in sizes.items():
            host, sent = buffer[at : at + size], self._sent[at : at + size]
            if name in floats:
                host, sent = host.view(torch.float64), sent.view(torch.float64)
            self.host[name], self._device[name] = host.numpy(), sent
            at += size

    def __getitem__(self, name: str) -> Tensor:
        """The device's tensor of this name."""
        return self._device[name]

    def clear(self) -> None:
        """Make everything padding: token 0 at position 0, written to the memory's first row."""
        if self._copied is not None:
            self._copied.synchronize()  # with the last transfer, long over as a rule
        self._buffer.zero_()

    def send(self) -> None:
        self._sent.copy_(self._buffer, non_blocking=True)
        if self._pinned:
            self._copied = torch.cuda.current_stream(self._sent.device).record_event(self._copied)


_GREEDY = SamplingParams()
FLOATS = frozenset(RowSampling._fields) - {"top_k"}


class Drawing(Enum):
    """Kinds of draws of a program; those that do less are faster."""

    NONE = "none"
    GREEDY = "greedy"
    SAMPLED = "sampled"
    TRUNCATED = "truncated"

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> Drawing:
        """Return the fastest kind that can draw for all of these."""
        samplings = [draw.sampling or _GREEDY for draw in draws]
        if all(sampling.greedy for sampling in samplings):
            return cls.GREEDY
        return cls.TRUNCATED if any(map(truncates, samplings)) else cls.SAMPLED


class Machine:
    """Common state of all programs of a model.

    `latest` [sequences] holds the token drawn last for each sequence of a draw, in order.
    """

    def __init__(self, model: Any, cache: PagedCache, attention: PagedAttention) -> None:
        self.model, self.cache, self.attention = model, cache, attention
        self.device: torch.device = model.device
        self.latest = torch.zeros(SEQUENCES[-1], dtype=torch.int64, device=self.device)
        self._logits: Tensor | None = None

    def forward(
        self, token_ids: Tensor, positions: Tensor, writes: Tensor, step: PagedStep, **options: Any
    ) -> Any:
        """Run the model on [T] tokens at these positions, written to these rows of the cache."""
        step.begin()
        self.cache.begin(writes)
        output = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
            layout=step,
            **options,
        )
        step.end()
        return output

    def keep(self, logits: Tensor) -> Tensor:
        """Copy the logits of a captured step [T, vocab] to where those of all of them go.

        Their own memory belongs to the graph, and other graphs use it too.
        """
        if self._logits is None:
            shape = max(MAX_TOKENS, SEQUENCES[-1]), logits.shape[-1]
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._logits[: logits.shape[0]].copy_(logits)


class Program(ABC):
    """Fill its inputs, `send` them, then run it: `run`, or a replay of its capture."""

    inputs: Inputs

    @abstractmethod
    def run(self) -> None:
        """Read the inputs and write the results, all on the device."""

    @abstractmethod
    def idle(self) -> None:
        """Fill in padding alone."""

    def draw(
        self, logits: Tensor, drawing: Drawing, keys: Tensor, owner: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Draw a token from each row of raw logits [rows, vocab], with the row's confidence.

        Row i is at key i and belongs to sequence owner[i], by default i. Returns int64 and float64
        [rows]; confidences are those of `Draw.confidences`.
        """
        if drawing is Drawing.GREEDY:
            tokens = likeliest(logits)
        else:
            rows = RowSampling(*(self.inputs[name] for name in RowSampling._fields))
            if owner is not None:
                rows = RowSampling(*(values.index_select(0, owner) for values in rows))
            logits = warp_rows(logits, rows, drawing is Drawing.TRUNCATED)
            tokens = draw_rows(logits, keys, rows.greedy)
        scores = computable(logits)
        return tokens, (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp().double()

    def fill_samplings(self, draws: Sequence[Draw]) -> None:
        """Write the draws' sampling parameters; the rest is greedy, at temperature 0."""
        for index, sampling in enumerate(draw.sampling or _GREEDY for draw in draws):
            for name in RowSampling._fields:
                self.inputs.host[name][index] = getattr(sampling, name)


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

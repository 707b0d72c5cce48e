"""Runs steps and draws as programs: captured shapes where they fit, and any shape once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from flyspec.engine.attention.paged import PagedAttention
from flyspec.engine.captured.graphs import Capture, Graphs, Replay
from flyspec.engine.captured.program import Drawing, FirstStep, Machine, SingleSteps
from flyspec.engine.captured.shapes import (
    AHEAD,
    CONTINUATIONS,
    LENGTHS,
    MAX_SAMPLED,
    SEQUENCES,
    captured_shape,
    continuations,
    exact_shapes,
    padded,
    round_up,
)
from flyspec.engine.kv_memory import PagedCache
from flyspec.engine.model import Draw, Rows, Step, drafted, ends_after
from flyspec.engine.sampling import checked
from flyspec.values.tokens import Drafted

MAX_DRAWN = 1 + sum(CONTINUATIONS)
"""Tokens that a sequence draws before they are read."""


class CapturedSteps:
    """A model's forward and its draws over blocks. Positions must be reserved (`CacheTable`)."""

    def __init__(self, model: Any, cache: PagedCache, attention: PagedAttention) -> None:
        self._machine = Machine(model, cache, attention)
        self._graphs = Graphs()
        self._ragged = attention.ragged

    def capture(self, capture: Capture) -> None:
        """Capture steps from now on, those of each shape when it first occurs."""
        self._graphs = Graphs(capture)

    @torch.inference_mode()
    def capture_ahead(self) -> int:
        """Capture the steps that most requests need; return how many programs there are."""
        most, longest = AHEAD
        slots = self._machine.cache.num_slots
        for sequences in SEQUENCES[: 1 + bisect_left(SEQUENCES, min(most, slots))]:
            for length in LENGTHS[: 1 + bisect_left(LENGTHS, longest)]:
                for drawing in (Drawing.NONE, Drawing.GREEDY):
                    # What a drafter has not read yet: its last guess and the target's own token.
                    if drawing is Drawing.NONE or length <= LENGTHS[1]:
                        self._captured([length] * sequences, drawing)
            for count in CONTINUATIONS[1:]:
                self._single(sequences, count, Drawing.GREEDY)
        return len(self._graphs)

    @property
    def attention(self) -> PagedAttention:
        return self._machine.attention

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """Return each step's rows, valid until the next call."""
        layers = any(step.hidden_layers for step in steps)
        program, replay = self._first(steps, Drawing.NONE, layers)
        found = program.fill(steps)
        replay()
        if not layers:
            return [Rows(program.logits[rows]) for rows in found]
        hidden = program.output.hidden_states
        kept = [
            slice(own.stop - s.hidden_count, own.stop)
            for s, own in zip(steps, program.rows, strict=True)
        ]
        return [
            Rows(program.logits[rows], tuple(hidden[i][0, own] for i in step.hidden_layers))
            for step, rows, own in zip(steps, found, kept, strict=True)
        ]

    def draw(self, draws: Sequence[Draw]) -> list[Drafted]:
        """Like `Model.draw`, for plain draws; reads the device once a proposal.

        Raises `FloatingPointError` for logits that are not finite.
        """
        most = SEQUENCES[-1]
        if len(draws) > most:
            return [*self.draw(draws[:most]), *self.draw(draws[most:])]
        drawing = Drawing.of(draws)
        steps = [draw.step for draw in draws]
        longest, drawn = max((d.max_tokens for d in draws if d.sampling), default=1), 1
        counts = continuations(min(longest, MAX_DRAWN) - 1)
        # Before any is run: to capture one overwrites what is drawn.
        program, replay = self._first(steps, drawing)
        singles = [self._single(len(draws), count, drawing) for count in counts]
        rows = program.fill(steps, draws)
        replay()
        outcomes = [program.outcome]
        for count, (single, replay_single) in zip(counts, singles, strict=True):
            single.fill(draws, drawn)
            replay_single()
            outcomes.append(single.outcome)
            drawn += count
        numbers = torch.cat([outcome.flatten() for outcome in outcomes]).cpu()
        first, *later = numbers.split([outcome.numel() for outcome in outcomes])
        tokens, chances = first.view(2, -1).tolist()
        following = [part.view(n, 2, -1) for part, n in zip(later, counts, strict=True)]
        after = torch.cat(following).permute(1, 2, 0).tolist() if following else ([], [])
        found = []
        for index, (draw, own) in enumerate(zip(draws, rows, strict=True)):
            if draw.sampling is None:
                found.append(Drafted([]))
                continue
            ids, sure = tokens[own], chances[own]
            if draw.max_tokens > 1:
                more = draw.max_tokens - 1
                ids, sure = ids + after[0][index][:more], sure + after[1][index][:more]
                count = ends_after(draw, ids, sure)
                ids, sure = ids[:count], sure[:count]
            wanted = draw.confidences or draw.min_confidence > 0
            found.append(drafted(draw, checked(ids), sure if wanted else []))
        return found

    def _first(
        self, steps: Sequence[Step], drawing: Drawing, layers: bool = False
    ) -> tuple[FirstStep, Replay]:
        lengths = [len(step.token_ids) for step in steps]
        found = None if layers else self._captured(lengths, drawing)
        if found is None:
            wanted = sum(step.num_logits for step in steps)
            groups = exact_shapes(lengths, self._ragged)
            once = FirstStep(self._machine, groups, drawing, wanted, layers)
            found = once, once.run
        return found

    def _captured(
        self, lengths: Sequence[int], drawing: Drawing
    ) -> tuple[FirstStep, Replay] | None:
        """The program of a shape that holds these lengths, if it is worth to capture one."""
        shape = captured_shape(lengths, self._ragged)
        if shape is None or not self._graphs.fixed:
            return None
        if drawing not in (Drawing.NONE, Drawing.GREEDY) and shape.tokens > MAX_SAMPLED:
            return None
        return self._graphs.get(
            (shape, drawing), lambda: FirstStep(self._machine, [((), shape)], drawing)
        )

    def _single(self, sequences: int, count: int, drawing: Drawing) -> tuple[SingleSteps, Replay]:
        size = round_up(sequences, SEQUENCES)
        assert size is not None
        shape = padded(size, 1)
        return self._graphs.get(
            (shape, drawing, count), lambda: SingleSteps(self._machine, size, count, drawing)
        )

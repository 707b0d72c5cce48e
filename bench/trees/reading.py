"""What a model says along texts, and after drafts that leave them: its likeliest next tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.trees.selection import Candidates, Path
from flyspec.engine.model import Step
from flyspec.lab.local_model import LocalModel
from flyspec.prefix import num_same

Place = tuple[int, int, Path]
"""Number of a text, how many of its tokens there are, and the drafts that follow these."""


class Reader:
    """The `width` likeliest tokens of a model after any drafts from any place of some texts.

    A slot for each text is taken from the model's cache. What was read once is kept.
    """

    def __init__(
        self,
        model: LocalModel,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        width: int,
    ) -> None:
        self._model, self._width = model.model, width
        self._prompts, self._texts = prompts, texts
        self._slots: list[int] = []
        self._held: list[tuple[int, Path]] = []  # where each slot leaves its text, and the rest
        self._known: list[dict[tuple[int, Path], Candidates]] = []

    @contextmanager
    def open(self) -> Iterator[Reader]:
        """Read the texts, and keep their slots until the end."""
        try:
            for prompt, text in zip(self._prompts, self._texts, strict=True):
                self._slots.append(self._model.cache.acquire().slot)
                ids = [*prompt, *text]
                (rows,) = self._model.forward([Step(self._slots[-1], 0, ids, len(text) + 1)])
                self._held.append((len(text), ()))
                found = self._likeliest(rows.logits)
                self._known.append({(at, ()): each for at, each in enumerate(found)})
            yield self
        finally:
            for slot in self._slots:
                self._model.cache.release(slot)

    def load(self, places: Iterable[Place]) -> None:
        """Read what is not known yet: after each path, and after each of its beginnings."""
        wanted: dict[int, set[tuple[int, Path]]] = {}
        for index, position, path in places:
            leaving = self._leaving(index, position, path)
            if leaving not in self._known[index]:
                wanted.setdefault(index, set()).add(leaving)
        # No two steps of a forward may share a slot. Neighbours share the most of its contents.
        queues = {index: sorted(each) for index, each in wanted.items()}
        while queues:
            read = [(index, *queue.pop()) for index, queue in queues.items()]
            steps = [self._step(*each) for each in read]
            rows = self._model.forward(steps)
            found = iter(self._likeliest(torch.cat([each.logits for each in rows])))
            for (index, at, rest), step in zip(read, steps, strict=True):
                for length in range(len(rest) - step.num_logits, len(rest)):
                    self._known[index][at, rest[: length + 1]] = next(found)
            for index in list(queues):
                queue, known = queues[index], self._known[index]
                while queue and queue[-1] in known:  # a beginning of what was read
                    queue.pop()
                if not queue:
                    del queues[index]

    def after(self, index: int, position: int, path: Path) -> Candidates:
        """Return what was read. Raises `KeyError` if it was not."""
        return self._known[index][self._leaving(index, position, path)]

    def _leaving(self, index: int, position: int, path: Path) -> tuple[int, Path]:
        """Return where a path leaves the text, and the rest of it."""
        text, length = self._texts[index], 0
        while length < len(path) and text[position : position + 1] == [path[length]]:
            position, length = position + 1, length + 1
        return position, path[length:]

    def _step(self, index: int, at: int, rest: Path) -> Step:
        """Return the step that reads the rows after `rest` that are not known, and note it."""
        known, (held_at, held) = self._known[index], self._held[index]
        first = next(n for n in range(len(rest)) if (at, rest[: n + 1]) not in known)
        same = num_same(held, rest) if held_at == at else min(0, held_at - at)
        fed = min(same, first)  # counted from where the text is left
        self._held[index] = at, rest
        ids = [*self._texts[index][at + min(fed, 0) : at], *rest[max(fed, 0) :]]
        start = len(self._prompts[index]) + at + fed
        return Step(self._slots[index], start, ids, len(rest) - first)

    def _likeliest(self, logits: Tensor) -> list[Candidates]:
        top = logits.float().log_softmax(-1).topk(self._width)
        return list(map(Candidates, top.indices.tolist(), top.values.tolist()))

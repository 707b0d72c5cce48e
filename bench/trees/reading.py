"""What a model says along texts, and after drafts that leave them: its likeliest next tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.trees.selection import Candidates, Path
from flyspec.engine.model import Step
from flyspec.lab.local_model import LocalModel

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
        self._valid: list[int] = []  # tokens of the slot that are the text's
        self._known: list[dict[tuple[int, Path], Candidates]] = []

    @contextmanager
    def open(self) -> Iterator[Reader]:
        """Read the texts, and keep their slots until the end."""
        try:
            for prompt, text in zip(self._prompts, self._texts, strict=True):
                self._slots.append(self._model.cache.acquire().slot)
                ids = [*prompt, *text]
                (rows,) = self._model.forward([Step(self._slots[-1], 0, ids, len(text) + 1)])
                self._valid.append(len(ids))
                found = self._likeliest(rows.logits)
                self._known.append({(at, ()): each for at, each in enumerate(found)})
            yield self
        finally:
            for slot in self._slots:
                self._model.cache.release(slot)

    def load(self, places: Iterable[Place]) -> None:
        """Read what is not known yet: after each path, and after each of its beginnings."""
        wanted: dict[int, dict[tuple[int, Path], None]] = {}
        for index, position, path in places:
            at, rest = self._leaving(index, position, path)
            if (at, rest) not in self._known[index]:
                wanted.setdefault(index, {})[at, rest] = None
        while wanted:  # no two steps of a forward may share a slot
            steps, read = [], []
            for index in list(wanted):
                (at, rest), *_ = wanted[index]
                del wanted[index][at, rest]
                if not wanted[index]:
                    del wanted[index]
                if (at, rest) not in self._known[index]:
                    steps.append(self._step(index, at, rest))
                    read.append((index, at, rest))
            if not steps:
                continue
            rows = self._model.forward(steps)
            found = iter(self._likeliest(torch.cat([each.logits for each in rows])))
            for index, at, rest in read:
                for length in range(1, len(rest) + 1):
                    self._known[index][at, rest[:length]] = next(found)

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
        end = len(self._prompts[index]) + at
        start = min(self._valid[index], end)
        self._valid[index] = end
        again = self._texts[index][at - (end - start) : at]
        return Step(self._slots[index], start, [*again, *rest], len(rest))

    def _likeliest(self, logits: Tensor) -> list[Candidates]:
        top = logits.float().log_softmax(-1).topk(self._width)
        return list(map(Candidates, top.indices.tolist(), top.values.tolist()))

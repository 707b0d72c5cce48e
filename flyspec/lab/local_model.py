"""A model in this process, for many sequences at once: greedy texts, drafts, rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from flyspec.config import VerifySettings
from flyspec.engine.loading import load_model
from flyspec.engine.model import Draw, Step
from flyspec.engine.native.choice import choose_model
from flyspec.engine.threads import set_threads
from flyspec.tokenizer import Tokenizer
from flyspec.values.requests import Prompt
from flyspec.values.tokens import SamplingParams
from orchestrator.generation.prompt import encode_prompt

BATCH = 32
"""Sequences in a step."""
_GREEDY = SamplingParams()
TokenIds = Sequence[int]


class LocalModel:
    """A causal language model, loaded as the verify service loads it.

    `threads` 0 means one per core. Raises `ConfigError` with what to change.
    """

    def __init__(
        self, name: str, device: str = "auto", dtype: str = "auto", threads: int = 0
    ) -> None:
        settings = VerifySettings.model_validate(
            {
                "model": name,
                "device": device,
                "dtype": dtype,
                "threads": threads,
                "max_sessions": BATCH,
            }
        )
        set_threads(threads)
        loaded = load_model(name, device, dtype)
        self.info, self.bundle = loaded.info, loaded.tokenizer
        self.tokenizer = Tokenizer(loaded.tokenizer)
        self.eos = frozenset(loaded.tokenizer.eos_token_ids)
        self._model = choose_model(loaded, settings)
        self._model.warm_up()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's tokens, as the orchestrator does."""
        return encode_prompt(prompt, self.tokenizer, self.info)

    def continued(
        self,
        sequences: Sequence[TokenIds],
        max_tokens: Sequence[int],
        advance: Callable[[int], None] = lambda _: None,
    ) -> list[list[int]]:
        """Return each sequence's greedy continuation, an end of sequence included.

        No longer than its `max_tokens` and the context allow. `advance` is told how many sequences
        are done.
        """
        found: list[list[int]] = []
        for at in range(0, len(sequences), BATCH):
            part = sequences[at : at + BATCH]
            rooms = [self.info.context_length - len(ids) for ids in part]
            most = list(map(min, rooms, max_tokens[at : at + BATCH]))
            with self._slots(part) as slots:
                found += self._draw(part, slots, most)
            advance(len(part))
        return found

    def _draw(
        self,
        sequences: Sequence[TokenIds],
        slots: Sequence[tuple[int, int]],
        most: Sequence[int],
    ) -> list[list[int]]:
        """Draw until each sequence has ended; a call may return fewer tokens than are left."""
        drawn: list[list[int]] = [[] for _ in sequences]
        left = [index for index, count in enumerate(most) if count > 0]
        starts = [start for _, start in slots]
        feeds = [list(ids[start:]) for ids, start in zip(sequences, starts, strict=True)]
        while left:
            answers = self._model.draw(
                [
                    Draw(
                        Step(slots[i][0], starts[i], feeds[i]),
                        _GREEDY,
                        max_tokens=most[i] - len(drawn[i]),
                        stop_token_ids=self.eos,
                    )
                    for i in left
                ]
            )
            for i, answer in zip(left, answers, strict=True):
                drawn[i] += answer.token_ids
                feeds[i] = drawn[i][-1:]
                starts[i] = len(sequences[i]) + len(drawn[i]) - 1
            left = [i for i in left if len(drawn[i]) < most[i] and drawn[i][-1] not in self.eos]
        return drawn

    def logits(self, sequences: Sequence[TokenIds], num_rows: Sequence[int]) -> Iterator[Tensor]:
        """Yield the raw logits [n, vocab] after each of a sequence's last n tokens.

        They are valid until the next ones are asked for.
        """
        for at in range(0, len(sequences), BATCH):
            part = sequences[at : at + BATCH]
            counts = num_rows[at : at + BATCH]
            with self._slots(part, counts) as slots:
                steps = [
                    Step(slot, start, list(ids[start:]), count)
                    for ids, (slot, start), count in zip(part, slots, counts, strict=True)
                ]
                for rows in self._model.forward(steps):
                    yield rows.logits

    @contextmanager
    def _slots(
        self, sequences: Sequence[TokenIds], num_rows: Sequence[int] | None = None
    ) -> Iterator[list[tuple[int, int]]]:
        """Take a slot for each, with the number of tokens to start after, and give them back."""
        cache, taken = self._model.cache, []
        try:
            for index, ids in enumerate(sequences):
                lease = cache.acquire(ids)
                last = len(ids) - (num_rows[index] if num_rows else 1)
                taken.append((lease.slot, min(lease.length, last)))
            yield taken
        finally:
            for slot, _ in taken:
                cache.release(slot)

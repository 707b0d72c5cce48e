"""A model in this process, loaded as its service loads it, for many sequences at once.

The lab reads models without a stack in order to record, to mine and to audit. All three must have
the kernels, data type and chat template of the services whose texts they explain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from transformers.utils.logging import disable_progress_bar

import draft_service.loading
import verify_service.ranks
from flyspec.config import DraftSettings, VerifySettings
from flyspec.engine.draft_heads.target import HeadTarget
from flyspec.engine.model import Draw, Model, Rows, Step
from flyspec.engine.out_of_memory import naming_memory
from flyspec.engine.threads import set_threads
from flyspec.tokenizer import Tokenizer
from flyspec.values.admin import ModelInfo
from flyspec.values.requests import Prompt
from flyspec.values.tokens import SamplingParams
from orchestrator.generation.prompt import encode_prompt

_GREEDY = SamplingParams()
TokenIds = Sequence[int]


class LocalModel:
    """The warm model of a draft or verify service with these settings, and its tokenizer.

    Sets the threads of this thread. `for_heads` also keeps what draft heads share with it
    (`head_target`). Raises `ConfigError` with what to change.
    """

    def __init__(self, settings: DraftSettings | VerifySettings, for_heads: bool = False) -> None:
        set_threads(settings.threads)
        disable_progress_bar()
        self.model: Model
        if isinstance(settings, VerifySettings):
            loaded, self.model = verify_service.ranks.load(settings, None)
        else:
            loaded, self.model = draft_service.loading.load(settings)
        self.head_target = HeadTarget.of(loaded) if for_heads else None
        with naming_memory(loaded.info.name, "warming up"):
            self.model.warm_up()
        self.bundle = loaded.tokenizer
        self.tokenizer = Tokenizer(self.bundle)
        self.eos = frozenset(self.bundle.eos_token_ids)
        self._batch = self.model.cache.num_slots

    @property
    def info(self) -> ModelInfo:
        """Its description, `numerics` included."""
        return self.model.info

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's tokens, as the orchestrator does."""
        return encode_prompt(prompt, self.tokenizer, self.info)

    def continued(
        self,
        sequences: Sequence[TokenIds],
        max_tokens: Sequence[int],
        advance: Callable[[int], None] = lambda _: None,
        sampling: SamplingParams = _GREEDY,
        seed: int = 0,
    ) -> list[list[int]]:
        """Return each sequence's continuation, an end of sequence included; greedy by default.

        No longer than its `max_tokens` and the context allow. `advance` is told how many sequences
        are done. Sequence i is sampled with `seed` + i.
        """
        found: list[list[int]] = [[] for _ in sequences]
        for at in range(0, len(sequences), self._batch):
            part = sequences[at : at + self._batch]
            rooms = [self.info.context_length - len(ids) for ids in part]
            most = list(map(min, rooms, max_tokens[at : at + self._batch]))
            drawn = found[at : at + self._batch]
            with self._slots(part) as slots:
                starts = [start for _, start in slots]
                feeds = [list(ids[start:]) for ids, start in zip(part, starts, strict=True)]
                left = [i for i, count in enumerate(most) if count > 0]
                while left:  # a call may return fewer tokens than are left
                    draws = [
                        Draw(
                            Step(slots[i][0], starts[i], feeds[i]), sampling, seed + at + i,
                            max_tokens=most[i] - len(drawn[i]), stop_token_ids=self.eos,
                        )
                        for i in left
                    ]  # fmt: skip
                    for i, answer in zip(left, self.model.draw(draws), strict=True):
                        drawn[i] += answer.token_ids
                        feeds[i] = drawn[i][-1:]
                        starts[i] = len(part[i]) + len(drawn[i]) - 1
                    left = [
                        i for i in left if len(drawn[i]) < most[i] and drawn[i][-1] not in self.eos
                    ]
            advance(len(part))
        return found

    def rows(
        self,
        sequences: Sequence[TokenIds],
        num_rows: Sequence[int],
        hidden_layers: tuple[int, ...] = (),
    ) -> Iterator[Rows]:
        """Yield raw logits [n, vocab] and the hidden rows of some layers after each of a sequence's
        last n tokens.

        They are valid until the next ones are asked for.
        """
        for at in range(0, len(sequences), self._batch):
            part = sequences[at : at + self._batch]
            counts = num_rows[at : at + self._batch]
            with self._slots(part, counts) as slots:
                yield from self.model.forward(
                    [
                        Step(slot, start, list(ids[start:]), count, hidden_layers)
                        for ids, (slot, start), count in zip(part, slots, counts, strict=True)
                    ]
                )

    @contextmanager
    def _slots(
        self, sequences: Sequence[TokenIds], num_rows: Sequence[int] | None = None
    ) -> Iterator[list[tuple[int, int]]]:
        """Take a slot for each, with the number of tokens to start after, and give them back."""
        cache, taken = self.model.cache, []
        try:
            for index, ids in enumerate(sequences):
                lease = cache.acquire(ids)
                last = len(ids) - (num_rows[index] if num_rows else 1)
                taken.append((lease.slot, min(lease.length, last)))
            yield taken
        finally:
            for slot, _ in taken:
                cache.release(slot)

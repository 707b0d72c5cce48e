"""Runs a model over slots: the only place that calls a model's forward, and draws from it.

`forward` takes a batch of steps of different sequences. Today it runs one after the other; the
callers already hand over all that is ready at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flyspec.engine.distributions import round_off
from flyspec.engine.loading import LoadedModel
from flyspec.engine.sampling import History, choose_processed, process_logits
from flyspec.engine.slots import SlotCache
from flyspec.errors import ConfigError
from flyspec.types import DistributionSpec, SamplingParams, TokenDistribution


class Step(NamedTuple):
    """Continue `slot` behind its first `start` tokens with `token_ids` (at least one)."""

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int = 1
    """Rows wanted: the logits after each of the last `num_logits` tokens."""


class Draw(NamedTuple):
    """A step, and how the model's own tokens are chosen from its rows; None only fills the cache.

    A row's token is the one at the position behind the row's. `history` is the sequence before the
    first row's token, needed for penalties and `min_tokens`. With `distribution` the distributions
    come along, and with `draw_from_it` the tokens are drawn from them.
    """

    step: Step
    sampling: SamplingParams | None = None
    seed: int = 0
    history: History | None = None
    distribution: DistributionSpec | None = None


class Drawn(NamedTuple):
    """The token of each row of a draw; of a draw that only fills the cache, none.

    `distributions`, if asked for, has one a row up to the first whose token is not the one that the
    step goes on with: the rows behind it continue another text.
    """

    token_ids: list[int]
    distributions: Sequence[TokenDistribution] = ()


class ModelRunner:
    """A model with a slot cache. Not thread-safe: one thread owns it."""

    def __init__(self, loaded: LoadedModel, num_slots: int, prefill_chunk: int = 512) -> None:
        text_config = loaded.model.config.get_text_config()
        kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"])
        if not kinds <= {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"{loaded.info.name}: layers of kind {sorted(kinds)} hold state that cannot be "
                "rolled back; use a model with attention layers only"
            )
        self.info = loaded.info
        self._model = loaded.model
        self._device = loaded.model.device
        self._prefill_chunk = prefill_chunk
        self.cache = SlotCache(text_config.num_hidden_layers, num_slots, self.info.context_length)

    def warm_up(self) -> None:
        """Run prefill and decode once, so that the first request does not pay for it."""
        slot = self.cache.acquire()
        length = min(32, self.info.context_length - 1)
        self.forward([Step(slot, 0, [0] * length, 1)])
        self.forward([Step(slot, length - 1, [0], 1)])
        self.cache.release(slot)

    def synchronize(self) -> None:
        """Wait for the device, so that what follows is not charged with the forward's time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def forward(self, steps: Sequence[Step]) -> list[Tensor]:
        """Logits [num_logits, vocab] of each step, on the model's device."""
        with torch.inference_mode():
            return [self._one(step) for step in steps]

    def draw(self, draws: Sequence[Draw]) -> list[Drawn]:
        """The model's own tokens for each draw's rows: forward, choice, and reading the ids."""
        logits = self.forward([draw.step for draw in draws])
        with torch.inference_mode():
            return [_choose(draw, rows) for draw, rows in zip(draws, logits, strict=True)]

    def _one(self, step: Step) -> Tensor:
        """One step, long inputs in chunks so that activations stay bounded."""
        ids = torch.tensor([step.token_ids], dtype=torch.long, device=self._device)
        start, total = step.start, len(step.token_ids)
        # All wanted rows come from one last piece; pieces before it only fill the cache.
        done = 0
        while total - done > max(self._prefill_chunk, step.num_logits):
            piece = min(self._prefill_chunk, total - done - step.num_logits)
            self._call(step.slot, start + done, ids[:, done : done + piece], 1)
            done += piece
        return self._call(step.slot, start + done, ids[:, done:], step.num_logits)

    def _call(self, slot: int, start: int, ids: Tensor, num_logits: int) -> Tensor:
        self.cache.select(slot, start)
        output = self._model(
            input_ids=ids,
            position_ids=torch.arange(start, start + ids.shape[1], device=self._device)[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        logits: Tensor = output.logits[0]
        return logits


def _choose(draw: Draw, rows: Tensor) -> Drawn:
    """Choose from the rows of logits of a draw's step."""
    step, sampling, seed, history, spec = draw
    if sampling is None:
        return Drawn([])
    total, num_rows = len(step.token_ids), step.num_logits
    first = step.start + total - num_rows + 1
    positions = range(first, first + num_rows)
    guess = step.token_ids[total - num_rows + 1 :] if num_rows > 1 else ()
    processed = process_logits(rows, sampling, history, guess)
    if spec is None:
        return Drawn(choose_processed(processed, sampling, positions, seed).tolist())
    if spec.draw_from_it and sampling.greedy:
        # All of the probability is on the token, which an empty distribution says.
        tokens = choose_processed(processed, sampling, positions, seed).tolist()
        return Drawn(tokens, [TokenDistribution()] * (_agreed(tokens, guess) + 1))
    rounded = round_off(rows if spec.raw and not spec.draw_from_it else processed, spec)
    if spec.draw_from_it:
        tokens = rounded.draw(positions, seed).tolist()
    else:
        tokens = choose_processed(processed, sampling, positions, seed).tolist()
    return Drawn(tokens, rounded.encode(_agreed(tokens, guess) + 1))


def _agreed(tokens: Sequence[int], guess: Sequence[int]) -> int:
    """How many of the guessed tokens are the chosen ones, up to the first that is not."""
    agreed = 0
    while agreed < len(guess) and tokens[agreed] == guess[agreed]:
        agreed += 1
    return agreed

"""Runs a model over slots: the only place that calls a model's forward, and draws from it.

`forward` packs the tokens of many sequences' steps into one ragged batch of a single row: matrix
products see all tokens at once, attention sees each sequence alone (`attention`, `slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flyspec.engine import attention, invariance
from flyspec.engine.attention import Segment, StepLayout
from flyspec.engine.distributions import round_off
from flyspec.engine.loading import LoadedModel
from flyspec.engine.sampling import History, choose_processed, process_logits
from flyspec.engine.scheduler import Step
from flyspec.engine.slots import SlotCache
from flyspec.engine.support import check_config, check_model
from flyspec.errors import ConfigError
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams, TokenDistribution

__all__ = ["Draw", "Drawn", "ModelRunner", "Step"]


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
    """A model with a slot cache. Not thread-safe: one thread owns it.

    `padded`: short pieces of several sequences attend in one call, which pays where launching costs
    more than arithmetic; the default is that of the device.

    `batch_invariant`: a token's logits have the same bits whatever else is in a step (see
    `invariance`). None turns that on where it costs little; `batch_invariant` then says so, after
    `warm_up`. Raises `ConfigError` where it cannot be had.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_slots: int,
        padded: bool | None = None,
        batch_invariant: bool | None = False,
    ) -> None:
        self.info = loaded.info
        self._model = loaded.model
        self._device = loaded.model.device
        self._padded = self._device.type == "cuda" if padded is None else padded
        config = loaded.model.config.get_text_config()
        check_config(loaded.info.name, config, loaded.info.context_length)
        self.cache = SlotCache(config.num_hidden_layers, num_slots, self.info.context_length)
        attention.register()
        self._model.set_attn_implementation(attention.NAME)
        self._invariance = invariance.apply(loaded.info.name, self._model, batch_invariant)
        self._must_be_invariant = bool(batch_invariant)

    @property
    def batch_invariant(self) -> bool:
        """Whether the batch-invariant mode is on."""
        return self._invariance is not None

    def warm_up(self) -> None:
        """Check that this model is served rightly, and run what the first request would pay for.

        Raises `ConfigError`. Every rank of a tensor-parallel group calls it.
        """
        check_model(self, self._model)
        if self._invariance is not None and not invariance.holds(self):
            if self._must_be_invariant:
                raise ConfigError(
                    f"--batch-invariant: {self.info.name} has layers whose results depend on the "
                    "batch even so; use --no-batch-invariant"
                )
            self._invariance.remove()
            self._invariance = None
        self.cache.forget()

    def synchronize(self) -> None:
        """Wait for the device, so that what follows is not charged with the forward's time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def forward(self, steps: Sequence[Step]) -> list[Tensor]:
        """Logits [num_logits, vocab] of each step, on the model's device; one forward for all.

        No two steps have the same slot.
        """
        with torch.inference_mode():
            logits, _ = self._packed(steps)
            return list(logits.split([step.num_logits for step in steps]))

    def probe(self, step: Step) -> tuple[Tensor, dict[int, int | None]]:
        """As `forward` for one step, with the window that each layer's attention asked for."""
        with torch.inference_mode():
            logits, layout = self._packed([step])
            return logits, layout.windows

    def draw(self, draws: Sequence[Draw]) -> list[Drawn]:
        """The model's own tokens for each draw's rows: forward, choice, and reading the ids."""
        logits = self.forward([draw.step for draw in draws])
        with torch.inference_mode():
            return [_choose(draw, rows) for draw, rows in zip(draws, logits, strict=True)]

    def _packed(self, steps: Sequence[Step]) -> tuple[Tensor, StepLayout]:
        """Logits of the wanted rows of all steps, [wanted, vocab], and where the rows belong."""
        cache, segments = self.cache, []
        token_ids: list[int] = []
        wanted: list[int] = []
        positions: list[int] = []
        index: list[int] = []
        for slot, start, tokens, num_logits in steps:
            row, count = len(token_ids), len(tokens)
            segments.append(Segment(slot, start, count, row))
            token_ids += tokens
            positions += range(start, start + count)
            index += range(slot * cache.max_length + start, slot * cache.max_length + start + count)
            wanted += range(row + count - num_logits, row + count)
            cache.reserve(slot, start, count)
        total = len(token_ids)
        # One transfer to the device for all of them; a model always makes some logits.
        packed = torch.tensor([*token_ids, *positions, *index, *(wanted or [0])])
        packed = packed.to(self._device, non_blocking=True)
        ids, places, index_, rows = packed.split([total, total, total, len(wanted) or 1])
        fixed = None if self._invariance is None else self._invariance.attention(segments)
        layout = StepLayout(cache, segments, self._padded, fixed)
        cache.begin(index_)
        output = self._model(
            input_ids=ids[None],
            position_ids=places[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=rows,
            layout=layout,
        )
        for step in steps:
            cache.record(step.slot, step.start, step.token_ids)
        return output.logits[0, : len(wanted)], layout


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

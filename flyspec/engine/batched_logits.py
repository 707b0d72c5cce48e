"""Warps and draws rows of many sequences in one pass, each row with its own parameters.

For devices, where launches and reads are what costs: shapes are fixed and nothing is read, so that
all of it can also be captured in a CUDA graph over static tensors (after one call outside, which
fills `sampling`'s tables). On a CPU, `logits` and `sampling` do less work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor

from flyspec.engine.compiling import compiled
from flyspec.engine.logits import computable
from flyspec.engine.sampling import likeliest, noise_of, token_steps
from flyspec.engine.upload import upload
from flyspec.values.tokens import SamplingParams


class RowSampling(NamedTuple):
    """Sampling parameters of R rows, as in `SamplingParams`; greedy rows have temperature 0.

    `temperature`, `top_p` and `min_p` are float64 [R], `top_k` int64 [R].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], device: torch.device) -> Self:
        """Return the parameters of one row each, on a device."""
        floats = [[s.temperature, s.top_p, s.min_p] for s in rows]
        temperature, top_p, min_p = upload(torch.tensor(floats, dtype=torch.float64), device).T
        top_k = upload(torch.tensor([s.top_k for s in rows]), device)
        return cls(temperature, top_k, top_p, min_p)

    @property
    def greedy(self) -> Tensor:
        """True for the rows that are, bool [R]."""
        return self.temperature == 0.0


def truncates(sampling: SamplingParams) -> bool:
    """True if top_k, top_p or min_p may exclude a token."""
    return not sampling.greedy and (
        sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    )


def warp_rows(logits: Tensor, rows: RowSampling, truncates: bool) -> Tensor:
    """Apply temperature, top_k, top_p and min_p to logits [R, V], as transformers' warpers do.

    Greedy rows stay as they are. Half precision is computed in float32, float64 stays. Without
    `truncates`, top_k, top_p and min_p are ignored, which saves sorting.
    """
    scores = computable(logits)
    greedy = rows.greedy[:, None]
    warped = scores / torch.where(greedy, 1.0, rows.temperature[:, None]).to(scores.dtype)
    if not truncates:
        return warped
    vocab_size = scores.shape[-1]
    ordered, token_ids = warped.sort(dim=-1, stable=True)
    kept = torch.where(rows.top_k > 0, rows.top_k, vocab_size).clamp(max=vocab_size)
    least = ordered.gather(1, (vocab_size - kept)[:, None])
    low = warped < least
    # What top_k leaves is still in order: -inf comes first.
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    tail = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1.0 - rows.top_p)[:, None].to(scores.dtype)
    tail[:, -1] = False
    low |= tail.new_zeros(tail.shape).scatter(1, token_ids, tail) & (rows.top_p < 1.0)[:, None]
    warped = warped.masked_fill(low & ~greedy, -torch.inf)
    chances = warped.softmax(dim=-1)
    bound = rows.min_p[:, None].to(scores.dtype) * chances.amax(dim=-1, keepdim=True)
    return warped.masked_fill((chances < bound) & ~greedy, -torch.inf)


def draw_rows(processed: Tensor, keys: Tensor, greedy: Tensor) -> Tensor:
    """Draw one token per row of processed logits [R, V] with its key (`row_keys`): int64 [R].

    Greedy rows yield the first of their largest logits. A row whose largest logit is not finite
    yields `NOT_FINITE`.
    """
    draw = _draw
    if processed.device.type == "cuda":  # one kernel, instead of some twenty over 64-bit integers
        draw = compiled(_draw, dynamic=True)
    return draw(processed, keys, greedy, token_steps(processed.shape[-1], keys.device))


def _draw(processed: Tensor, keys: Tensor, greedy: Tensor, steps: Tensor) -> Tensor:
    noise = noise_of(keys, steps)
    return likeliest(torch.where(greedy[:, None], processed, processed + noise))


def joined(views: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return one tensor [R, V] with the rows of some [rows, V], and the first row of each."""
    firsts = [0, *accumulate(view.shape[0] for view in views)][:-1]
    return (views[0] if len(views) == 1 else torch.cat([*views])), firsts

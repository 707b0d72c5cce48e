"""Sampling with randomness keyed by position, not by the order of calls.

The token at a position is argmax(processed logits + Gumbel noise), and the noise is a function of
(seed, absolute position, stream, token id) alone. So the target's sample does not depend on which
drafter proposed, how many tokens, or in which batch; and a drafter that uses the same noise agrees
with the target with probability at least (1 - TV) / (1 + TV) (Gumbel coupling, arXiv 2408.07978).

The noise, in wrapping 64-bit integers:

    mix(z)    splitmix64's finalizer: z ^= z >> 30; z *= C1; z ^= z >> 27; z *= C2; z ^= z >> 31
    key       h = mix(seed + G); h = mix((h ^ position) + G); key = mix((h ^ stream) + G)
    bits      mix(key + (token id + 1) * G)
    u         (top 52 bits of bits + 1/2) / 2^52, exact in float64 and strictly inside (0, 1)
    noise     -log(-log(u)) in float64, rounded to float32

The integers are the same on every device. The logarithms may differ by one unit in the last place
of float64, which the rounding hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyspec.engine.native.library import find
from flyspec.engine.upload import upload
from flyspec.values.tokens import SamplingParams

TARGET_STREAM = 0
"""The target's own sample; drafters use it too."""
SECOND_STREAM = 1
"""The second sample of the `fly-reference` rule."""
DRAFT_STREAM = 2
"""Drafts drawn from the distribution that is sent with them (the `rejection` rule)."""
ACCEPT_STREAM = 3
"""Numbers that decide whether a draft is accepted (`rejection`, `random`)."""
RESIDUAL_STREAM = 4
"""Replacements for drafts that `rejection` rejected."""

NOT_FINITE = -1
"""Replaces a row's token if its largest logit is NaN, +inf or -inf. This saves a separate device
read for the check; pass tokens through `checked` once they are read."""

_MASK = (1 << 64) - 1
_G = 0x9E3779B97F4A7C15
_C1 = 0xBF58476D1CE4E5B9
_C2 = 0x94D049BB133111EB
_GATHER_BELOW = 0.5  # share of tokens left by truncation below which gathering them pays off


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64, as torch expects it."""
    return value - (1 << 64) if value >> 63 else value


_SIGNED_G, _SIGNED_C1, _SIGNED_C2 = _signed(_G), _signed(_C1), _signed(_C2)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` of an array, whose arithmetic wraps."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_C1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_C2)
    return z ^ (z >> np.uint64(31))


Seed = int | Sequence[int]
"""One seed for all positions, or one each, where rows of several sessions are joined."""


def row_keys(seed: Seed, positions: Sequence[int], stream: int = TARGET_STREAM) -> list[int]:
    """Return one key per position, a signed 64-bit integer; rows of sessions may be joined."""
    seeds = [seed] if isinstance(seed, int) else seed
    h = np.array([each & _MASK for each in seeds], np.uint64)
    for part in (np.uint64(0), np.array(positions, np.uint64), np.uint64(stream)):
        h = _mix((h ^ part) + np.uint64(_G))
    keys: list[int] = h.view(np.int64).tolist()
    return keys


@lru_cache(maxsize=8)
def token_steps(vocab_size: int, device: torch.device) -> Tensor:
    """(token id + 1) * G for every token."""
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _SIGNED_G


def keyed_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Return the noise of every token for each of the keys [rows]: float32 [rows, vocab_size]."""
    return noise_of(keys, token_steps(vocab_size, keys.device))


def noise_of(keys: Tensor, steps: Tensor) -> Tensor:
    """Return the noise of the tokens with these `token_steps` [n], float32 [rows, n]."""
    return _noise(keys[:, None] + steps)


def _noise(z: Tensor) -> Tensor:
    """Noise from key + (token id + 1) * G. Overwrites `z`; the masks make `>>` a logical shift."""
    t = (z >> 30).bitwise_and_((1 << 34) - 1)
    z.bitwise_xor_(t).mul_(_SIGNED_C1)
    torch.bitwise_right_shift(z, 27, out=t)
    z.bitwise_xor_(t.bitwise_and_((1 << 37) - 1)).mul_(_SIGNED_C2)
    torch.bitwise_right_shift(z, 31, out=t)
    z.bitwise_xor_(t.bitwise_and_((1 << 33) - 1))
    u = (z >> 12).bitwise_and_((1 << 52) - 1).to(torch.float64)
    u.add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_().to(torch.float32)


def _keys(seed: Seed, positions: Sequence[int], stream: int, device: torch.device) -> Tensor:
    return upload(torch.tensor(row_keys(seed, positions, stream), dtype=torch.int64), device)


def uniform(
    positions: Sequence[int], seed: Seed, stream: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return a random number in (0, 1) per position: float64 [positions], the same bits everywhere.

    It is the `u` of token 0, so use a stream either for numbers or for tokens.
    """
    keys = np.array(row_keys(seed, positions, stream), np.int64).view(np.uint64)
    values = ((_mix(keys + np.uint64(_G)) >> np.uint64(12)) + 0.5) * 2.0**-52
    return upload(torch.from_numpy(values), torch.device(device))


def checked(token_ids: Sequence[float]) -> list[int]:
    """Return the tokens as integers. Raises `FloatingPointError` if logits were not finite."""
    tokens = [int(token) for token in token_ids]
    if NOT_FINITE in tokens:
        raise FloatingPointError("the logits are not finite")
    return tokens


def likeliest(scores: Tensor) -> Tensor:
    """Return the first of the largest scores of each row, or `NOT_FINITE`: int64 [rows]."""
    largest, token_ids = scores.max(dim=-1)  # NaN is the largest
    return token_ids.where(largest.abs() < torch.inf, NOT_FINITE)


def sample(
    processed: Tensor, positions: Sequence[int], seed: Seed, stream: int = TARGET_STREAM
) -> Tensor:
    """Draw one token per row of processed logits [rows, V], row i at `positions[i]`: int64 [rows].

    A row whose largest logit is not finite yields `NOT_FINITE`, here and in all functions below.

    On a CPU, noise is computed only for the tokens that truncation leaves, or that can win. On a
    GPU it is computed for all: reading back their number first would cost more.
    """
    device, vocab_size = processed.device, processed.shape[-1]
    keys = _keys(seed, positions, stream, device)
    if (drawn := sample_rows(processed, keys)) is not None:
        return drawn
    if device.type == "cpu":
        kept = processed != -torch.inf  # true for NaN
        if int(kept.count_nonzero()) < _GATHER_BELOW * kept.numel():
            rows, tokens = kept.nonzero(as_tuple=True)
            perturbed = torch.full_like(processed, -torch.inf)
            noise = _noise(keys[rows] + token_steps(vocab_size, device)[tokens])
            perturbed[rows, tokens] = processed[rows, tokens] + noise
            return likeliest(perturbed)
    return likeliest(keyed_noise(keys, vocab_size) + processed)


def sample_among(
    log_probs: Tensor,
    token_ids: Tensor | None,
    positions: Sequence[int],
    seed: int,
    stream: int,
) -> Tensor:
    """Like `sample`, from log-probabilities [rows, n] of `token_ids` [rows, n]: int64 [rows].

    Without `token_ids`, column i is token i. Each token has its own noise, so it does not matter
    which others are listed. Entries of -inf are never chosen.
    """
    if token_ids is None:
        return sample(log_probs, positions, seed, stream)
    keys = _keys(seed, positions, stream, log_probs.device)
    noise = _noise(keys[:, None] + (token_ids + 1) * _SIGNED_G)
    best = likeliest(noise + log_probs)[:, None]
    return token_ids.gather(1, best.clamp(min=0)).where(best >= 0, NOT_FINITE)[:, 0]


def is_array(rows: Tensor) -> bool:
    """True if NumPy can read a tensor in place."""
    return rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)


def choose_processed(
    processed: Tensor,
    sampling: SamplingParams,
    positions: Sequence[int],
    seed: int,
    stream: int = TARGET_STREAM,
) -> Tensor:
    """Choose the model's own token for each row of logits from `process_logits`: int64 [rows].

    Row i is at positions[i]. Greedy chooses the first of equally likely tokens.
    """
    if not sampling.greedy:
        return sample(processed, positions, seed, stream)
    if is_array(processed):
        rows = processed.numpy()
        token_ids = rows.argmax(axis=-1)  # with vector instructions; NaN is the largest
        finite = np.isfinite(rows[np.arange(len(rows)), token_ids])
        return torch.from_numpy(np.where(finite, token_ids, NOT_FINITE))
    # Equivalent to argmax, and several times faster in half precision on a CPU.
    return likeliest(processed)


def sample_rows(processed: Tensor, keys: Tensor) -> Tensor | None:
    """Draw the tokens of `sample` by the compiled step, which is faster: int64 [rows].

    `processed` are logits [rows, V], each row with its key. A row whose largest logit is not finite
    yields -1. Returns None if this is not to be had: not on a CPU, not in float32, or not compiled.
    """
    if processed.device.type != "cpu" or processed.dtype != torch.float32:
        return None
    library = find()
    if isinstance(library, str):
        return None
    rows, drawn = processed.contiguous(), torch.empty(len(processed), dtype=torch.int64)
    library.functions.flyspec_sample(
        rows.data_ptr(), *rows.shape, keys.data_ptr(), drawn.data_ptr()
    )
    return drawn

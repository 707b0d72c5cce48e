"""A drafter's distributions: rounded for the wire, drawn from, and decoded.

They are sent as half floats (see the proto message `TokenDistribution`). With `draw_from_it` the
drafter draws from the rounded, renormalised values, and the receiver decodes the same values:
speculative sampling is lossless only with the q that the drafts were actually drawn from (arXiv
2211.17192, appendix A.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyspec.engine.logits import computable
from flyspec.engine.sampling import DRAFT_STREAM, sample_among
from flyspec.engine.upload import upload
from flyspec.errors import InvalidArgumentError
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import TokenDistribution

_HALF = np.dtype("<f2")
# Bits of half floats. Without the sign, those up to infinity are numbers and the others NaN.
_SIGN, _INFINITY = 0x8000, 0x7C00
# By how much rounding may lift a log-probability of 0.
_ROUNDING = int(np.array(1e-3, np.float16).view(np.uint16))
_LIST_BELOW = 0.25  # share of tokens of non-zero probability below which a list of them is shorter


@dataclass(frozen=True)
class Distributions:
    """Draft distributions of K positions, as the receiver decodes them.

    `log_probs` is float32 [K, n]: for the tokens `token_ids`, int64 [K, n], or if that is None for
    the whole vocabulary in order. Padding has -inf and may repeat a token id.
    """

    log_probs: Tensor
    token_ids: Tensor | None

    def rows(self, start: int, stop: int) -> Distributions:
        """Return the distributions from index `start` up to, but not including, `stop`."""
        ids = self.token_ids
        return Distributions(self.log_probs[start:stop], None if ids is None else ids[start:stop])

    def log_probs_of(self, token_ids: Tensor) -> Tensor:
        """Return the log-probability of one token per position, -inf if it is not listed: [K]."""
        if self.token_ids is None:
            return self.log_probs.gather(-1, token_ids[:, None])[:, 0]
        # Padding repeats ids with -inf, which the maximum ignores.
        same = self.token_ids == token_ids[:, None]
        return torch.where(same, self.log_probs, -torch.inf).amax(dim=-1)


@dataclass(frozen=True)
class RoundedDistributions:
    """Distributions for a drafter to send, still as tensors.

    `log_probs` is float16 [rows, n], `token_ids` int64 [rows, n], or None for the whole vocabulary.
    """

    log_probs: Tensor
    token_ids: Tensor | None

    def draw(self, positions: Sequence[int], seed: int) -> Tensor:
        """Draw a token per row from the renormalised values with `DRAFT_STREAM`: int64 [rows]."""
        log_probs = _normalise(self.log_probs, listed=self.token_ids is not None)
        return sample_among(log_probs, self.token_ids, positions, seed, DRAFT_STREAM)

    def encode(self, rows: int | None = None) -> list[TokenDistribution]:
        """Encode the first `rows` rows (default: all). Omits listed tokens of probability 0."""
        values = self.log_probs[:rows].cpu().numpy().astype(_HALF, copy=False)
        if self.token_ids is None:
            return [TokenDistribution(row.tobytes()) for row in values]
        ids = self.token_ids[:rows].cpu().numpy()
        kept = values > -np.inf
        return [
            TokenDistribution(row[keep].tobytes(), tuple(tokens[keep].tolist()))
            for row, tokens, keep in zip(values, ids, kept, strict=True)
        ]


def round_off(processed: Tensor, spec: DistributionSpec) -> RoundedDistributions:
    """Return the softmax of processed logits [rows, V] as log-probabilities in half precision.

    With `spec.top_k`, only the most likely tokens; they keep their share of the whole unless drafts
    are drawn from them. If drafts are drawn from the whole vocabulary and truncation leaves few
    tokens, those are listed: the same distribution in fewer bytes.
    """
    scores = computable(processed)
    vocab_size = scores.shape[-1]
    listed = min(spec.top_k, vocab_size)
    if spec.draw_from_it and not listed:
        support = int((scores > -torch.inf).sum(dim=-1).max())
        listed = support if support < _LIST_BELOW * vocab_size else 0
    if not listed:
        return RoundedDistributions(scores.log_softmax(dim=-1).half(), None)
    values, token_ids = scores.topk(listed, dim=-1)
    if spec.draw_from_it:
        # In float64, so that padding to another row's longer list leaves no trace.
        return RoundedDistributions(values.double().log_softmax(dim=-1).half(), token_ids)
    return RoundedDistributions((values - scores.logsumexp(dim=-1, keepdim=True)).half(), token_ids)


def encode(processed: Tensor, spec: DistributionSpec) -> list[TokenDistribution]:
    """Encode the distribution of each row of processed logits [rows, V]; `decode` reverses it."""
    return round_off(processed, spec).encode()


def decode(
    distributions: Sequence[TokenDistribution],
    draft_token_ids: Sequence[int],
    vocab_size: int,
    *,
    renormalise: bool,
    device: torch.device | str = "cpu",
) -> Distributions:
    """Decode the distributions of K drafted tokens; an empty one is a point mass on its token.

    `renormalise` is for drafts that were drawn from what was sent (`draw_from_it` of the proto
    message `DistributionSpec`): each position's probabilities then sum to 1, and lists may be mixed
    with whole vocabularies. Without it only point masses may, since a list leaves the rest open.

    Raises `InvalidArgumentError`, naming `distributions`: not one per draft, mismatched sizes, ids
    out of range or repeated, NaN, +inf, no token of non-zero probability, or, with `renormalise`,
    probability 0 for the drafted token. All of these show on the host, so no device is read.
    """
    device = torch.device(device)
    drafts = [int(token) for token in draft_token_ids]
    if len(distributions) != len(drafts):
        raise InvalidArgumentError(
            f"distributions: {len(distributions)} for {len(drafts)} drafted tokens; "
            "send one per token"
        )
    for index, distribution in enumerate(distributions):
        _check_sizes(index, distribution, vocab_size)
    whole = [i for i, q in enumerate(distributions) if q.log_probs and not q.token_ids]
    lists = [i for i in range(len(drafts)) if i not in set(whole)]
    log_probs, token_ids = _read_lists(distributions, drafts, lists, renormalise, device)
    if whole and not renormalise and any(distributions[i].token_ids for i in lists):
        raise InvalidArgumentError(
            "distributions: some cover the whole vocabulary and some list tokens; "
            "send all in one form"
        )
    joined = bytearray().join(distributions[i].log_probs for i in whole)
    half = np.frombuffer(joined, dtype=_HALF).reshape(-1, vocab_size)
    refused = [whole[row] for row in _not_numbers(half)] if whole else []
    for index, draft in enumerate(drafts if refused or renormalise else ()):
        if index in refused:
            raise _not_finite(index)
        if renormalise:
            _check_drafted(index, distributions[index], draft)
    if not whole:
        return Distributions(log_probs, token_ids)
    rows = upload(torch.from_numpy(half.astype(np.float16, copy=False)), device)
    rows = _normalise(rows, listed=False) if renormalise else rows.float()
    if lists:
        found = rows.new_full((len(drafts), vocab_size), -torch.inf)
        found.index_copy_(0, upload(torch.tensor(whole), device), rows)
        # Padding repeats a listed token at -inf: the larger value is the one sent.
        listed = rows.new_full((len(lists), vocab_size), -torch.inf)
        listed.scatter_reduce_(1, token_ids, log_probs, "amax")
        rows = found.index_copy_(0, upload(torch.tensor(lists), device), listed)
    return Distributions(rows, None)


def check_received(distributions: Sequence[TokenDistribution], vocab_size: int) -> None:
    """Reject invalid distributions as soon as they arrive; `decode` may reject more.

    Raises `InvalidArgumentError`: mismatched sizes, ids out of range or repeated, NaN, +inf, or a
    log-probability above 0 by more than rounding.
    """
    for index, distribution in enumerate(distributions):
        _check_sizes(index, distribution, vocab_size)
        bits = np.frombuffer(distribution.log_probs, dtype="<u2")
        # With the sign flipped, -0 to -inf come first, then NaN, then positive numbers. A valid
        # distribution costs a single pass over the whole vocabulary.
        flipped = bits ^ np.uint16(_SIGN)
        if not bits.size or flipped.max() <= _INFINITY:
            continue
        above = flipped[flipped > _INFINITY]
        if ((above < _SIGN) | (above >= _SIGN + _INFINITY)).any():
            raise _not_finite(index)
        if (above > _SIGN + _ROUNDING).any():
            largest = above.max() ^ np.uint16(_SIGN)
            raise InvalidArgumentError(
                f"distributions[{index}].log_probs: {largest.view(np.float16):g} is above 0; send "
                "log-probabilities"
            )


def _normalise(half: Tensor, *, listed: bool) -> Tensor:
    """Half floats as log-probabilities whose probabilities sum to 1: float32.

    Lists, which are short, use float64, so that their padding leaves no trace in float32.
    """
    values = half.double() if listed else half.float()
    return values.log_softmax(dim=-1).float()


def _check_sizes(index: int, distribution: TokenDistribution, vocab_size: int) -> None:
    log_probs, token_ids = distribution
    if not log_probs and not token_ids:
        return
    wanted = len(token_ids) or vocab_size
    if len(log_probs) != 2 * wanted:
        what = "token_ids" if token_ids else "tokens of the vocabulary"
        raise InvalidArgumentError(
            f"distributions[{index}].log_probs: {len(log_probs)} bytes for {wanted} {what}; "
            "send 2 bytes each"
        )
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidArgumentError(
            f"distributions[{index}].token_ids must be between 0 and {vocab_size - 1}, got {wrong}"
        )
    if len(set(token_ids)) != len(token_ids):
        raise InvalidArgumentError(f"distributions[{index}].token_ids: a token is listed twice")


def _read_lists(
    distributions: Sequence[TokenDistribution],
    drafts: Sequence[int],
    rows: Sequence[int],
    renormalise: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Lists and point masses at `rows`, padded to the same width: float32 and int64 [rows, n]."""
    width = max((len(distributions[i].token_ids) for i in rows), default=1) or 1
    values = np.full((len(rows), width), -np.inf, dtype=np.float16)
    tokens = np.empty((len(rows), width), dtype=np.int64)
    for row, index in enumerate(rows):
        log_probs, token_ids = distributions[index]
        n = len(token_ids)
        if n:
            values[row, :n] = np.frombuffer(log_probs, dtype=_HALF)
            tokens[row, :n] = token_ids
            tokens[row, n:] = token_ids[0]
        else:
            values[row, 0] = 0.0
            tokens[row] = drafts[index]
    half = torch.from_numpy(values)
    sent = half.float()
    for index, largest in zip(rows, sent.amax(dim=-1).tolist() if rows else (), strict=True):
        if not math.isfinite(largest):  # nor are NaN, +inf, and nothing but -inf
            raise _not_finite(index)
    read = _normalise(half, listed=True) if renormalise else sent
    return upload(read, device), upload(torch.from_numpy(tokens), device)


def _not_numbers(half: NDArray[np.float16]) -> list[int]:
    """Return the rows that hold NaN or +inf, or nothing but -inf.

    Compares bits, in place: of those with a sign, NaN alone is above -inf; of those without, +inf
    and NaN are above all numbers.
    """
    bits, signed = half.view("<u2"), half.view("<i2")
    largest, nothing = bits.max(axis=-1), bits.min(axis=-1) == _SIGN | _INFINITY
    refused = (largest > _SIGN | _INFINITY) | (signed.max(axis=-1) >= _INFINITY) | nothing
    rows: list[int] = refused.nonzero()[0].tolist()
    return rows


def _not_finite(index: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"distributions[{index}].log_probs: NaN, +inf, or no token of non-zero probability; "
        "send log-probabilities"
    )


def _check_drafted(index: int, distribution: TokenDistribution, draft: int) -> None:
    """Reject a distribution in which the drafted token has probability 0, which stays 0."""
    log_probs, token_ids = distribution
    if not log_probs:
        return
    values = np.frombuffer(log_probs, dtype=_HALF)
    at = draft if not token_ids else token_ids.index(draft) if draft in token_ids else None
    if at is None or values[at] == -math.inf:
        raise InvalidArgumentError(
            f"distributions[{index}]: the drafted token {draft} has probability 0; "
            "send the distribution it was drawn from"
        )

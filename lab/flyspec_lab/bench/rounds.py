"""Random rounds of a given size for judging: logits shaped like a language model's, and drafts.

Most rows are certain of one token, as a target is at most positions; a mismatch gets an uncertain
row. Special tokens are the last ids of the vocabulary, as many as Llama 3 has, and unlikely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.engine.logits import process_logits
from flyspec.engine.sampling import choose
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams

START_POSITION = 1000
SEED = 1

_SURE = 0.95  # probability of the most likely token of a certain row
_UNSURE = (0.2, 0.195, 0.15)  # of the most likely tokens of an uncertain row
_TAIL_TOKENS = 2000  # share the rest of an uncertain row's probability
_UNLIKELY = -25.0  # log-probability of all others
_SPREAD = 2.0  # standard deviation of a certain row's other logits
_SPECIAL_TOKENS = 256
_WINDOW = 6  # matches after the mismatch, if K leaves room for them
_SHIFT = 2.6  # of all logits: those of likely tokens are positive, as with real models
_PREFERENCE = 0.25  # nats by which the draft prefers a likely mismatch
_DRAFTED = 0.9  # draft probability of a token unlikely under the target


@dataclass(frozen=True)
class RandomRound:
    """K drafted tokens, the target's raw logits [K + 1, V] and the draft's log q [K, V], float32.

    The draft's raw logits are the target's. At `mismatch_index`, if there is one, the draft differs
    from the target's own token.
    """

    draft_token_ids: list[int]
    logits: Tensor
    draft_log_probs: Tensor
    mismatch_index: int | None

    def distributions(self, spec: DistributionSpec | None) -> Distributions | None:
        """Return the draft's distributions as the verify service has them after decoding."""
        if spec is None:
            return None
        log_probs = self.draft_log_probs
        if spec.raw:
            log_probs = self.logits[: len(self.draft_token_ids)].float().log_softmax(dim=-1)
        if spec.top_k == 0:
            return Distributions(log_probs, None)
        kept = log_probs.topk(min(spec.top_k, log_probs.shape[-1]), dim=-1)
        return Distributions(kept.values, kept.indices)


def control_token_ids(vocab_size: int) -> frozenset[int]:
    """Return the special tokens of a vocabulary; the first of them ends a sequence."""
    return frozenset(range(_num_plain(vocab_size), vocab_size))


def eos_token_ids(vocab_size: int) -> frozenset[int]:
    """Return the token that ends a sequence."""
    return frozenset({_num_plain(vocab_size)})


def make_round(
    num_draft_tokens: int,
    vocab_size: int,
    sampling: SamplingParams,
    *,
    mismatch: bool,
    likely: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = SEED,
) -> RandomRound:
    """Make a round of the target's own tokens, except for one in the middle if `mismatch`.

    If `likely`, the mismatch is as likely as the target's own token, so that a lossy rule accepts
    it; else it is next to impossible. The draft's distribution is the target's processed one, but
    slightly prefers a likely mismatch, and gives an unlikely one most of its mass. The
    probabilities above hold after temperature.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_draft_tokens + 1, vocab_size, generator=generator) * _SPREAD
    plain = _num_plain(vocab_size)
    logits[:, plain:] = -math.inf
    favourites = torch.randint(plain, (num_draft_tokens + 1, 1), generator=generator)
    sure = logits.logsumexp(dim=-1, keepdim=True) + math.log(_SURE / (1 - _SURE))
    logits = logits.scatter(1, favourites, sure).log_softmax(dim=-1).clamp(min=_UNLIKELY)
    index = None
    if mismatch:
        index = max(0, min(num_draft_tokens // 2, num_draft_tokens - 1 - _WINDOW))
        logits[index] = _unsure_row(vocab_size, generator)
    raw = ((logits + _SHIFT) * (sampling.temperature or 1.0)).to(device, dtype)
    tokens = choose(raw, sampling, START_POSITION, SEED).tolist()
    log_q = process_logits(raw, sampling)[:num_draft_tokens].float().log_softmax(dim=-1)
    drafts = tokens[:num_draft_tokens]
    if index is not None:
        first, second = logits[index].topk(2).indices.tolist()
        likely_other = second if drafts[index] == first else first
        drafts[index] = likely_other if likely else int(logits[index, :plain].argmin())
        if likely:
            log_q[index, drafts[index]] += _PREFERENCE
        else:
            log_q[index] += math.log(1 - _DRAFTED)
            log_q[index, drafts[index]] = math.log(_DRAFTED)
    return RandomRound(drafts, raw, log_q, index)


def _num_plain(vocab_size: int) -> int:
    return vocab_size - min(_SPECIAL_TOKENS, max(1, vocab_size // 8))


def _unsure_row(vocab_size: int, generator: torch.Generator) -> Tensor:
    """Return log-probs [V]: a few likely tokens, a long tail, the rest next to impossible."""
    plain = _num_plain(vocab_size)
    order = torch.randperm(plain, generator=generator)
    likely = order[: len(_UNSURE)]
    tail = order[len(_UNSURE) : len(_UNSURE) + min(_TAIL_TOKENS, plain // 2)]
    row = torch.full((vocab_size,), _UNLIKELY)
    row[order] += torch.rand(plain, generator=generator)
    row[tail] = math.log((1 - sum(_UNSURE)) / len(tail))
    row[likely] = torch.tensor(_UNSURE).log()
    return row

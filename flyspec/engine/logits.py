"""Turns a model's raw logits into the ones it samples from, and into log-probabilities.

The order is that of the proto message `SamplingParams`, which is also transformers' order in
`generate`: logit_bias, repetition_penalty, presence and frequency penalties, min_tokens,
temperature, top_k, top_p, min_p. Where transformers has an implementation, it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flyspec.engine.model import History
from flyspec.engine.upload import upload
from flyspec.errors import InvalidArgumentError
from flyspec.values.tokens import SamplingParams, TokenLogprobs

LEAST_REPETITION_PENALTY = 1e-20
"""A smaller one has the same effect until it makes logits infinite, which would pass for a failure
of the model."""

Warper = Callable[[Any, Tensor], Tensor]


def computable(logits: Tensor) -> Tensor:
    """Convert half precision to float32; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


def process_logits(
    logits: Tensor,
    sampling: SamplingParams,
    history: History | None = None,
    draft_token_ids: Sequence[int] = (),
) -> Tensor:
    """Return the logits that tokens are drawn from, given raw ones [rows, V].

    Excluded tokens are -inf. Row i predicts the token after `history` and the first i of
    `draft_token_ids`. Half precision is computed in float32, float64 stays. Greedy rows are not
    warped: their processed distribution is that of temperature 1; if nothing else is requested they
    are returned unchanged. `logits` is never modified.

    Repetition penalty: transformers' `RepetitionPenaltyLogitsProcessor`, over prompt and output.
    Presence and frequency penalties: OpenAI's formula, mu - count * frequency - (count > 0) *
    presence, over the output alone. Temperature, top_k, top_p, min_p: transformers' warpers.

    Raises `ValueError` if `history`, or a draft between two rows, is needed but missing;
    `InvalidArgumentError` for a biased token outside the model's vocabulary.
    """
    if adjusts(sampling):
        scores = adjust(logits, sampling, history, draft_token_ids)
    elif sampling.greedy:
        return logits
    else:
        scores = computable(logits)
    for warper in _warpers(sampling):
        scores = warper(None, scores)
    return scores


@lru_cache(maxsize=256)
def _warpers(sampling: SamplingParams) -> tuple[Warper, ...]:
    """Transformers' own processors in its own order, without those that would change nothing."""
    warpers: list[Warper] = []
    if sampling.greedy:
        return ()
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(float(sampling.min_p)))
    return tuple(warpers)


def adjusts(sampling: SamplingParams) -> bool:
    """True if anything depends on token ids: bias, penalties or min_tokens."""
    return bool(sampling.logit_bias) or sampling.needs_history


def adjust(
    logits: Tensor,
    sampling: SamplingParams,
    history: History | None,
    draft_token_ids: Sequence[int],
) -> Tensor:
    """Apply what depends on token ids, the first part of `process_logits`. Returns a new tensor."""
    rows, vocab_size = logits.shape
    scores = computable(logits)
    scores = scores.clone() if scores is logits else scores
    if sampling.logit_bias:
        if (last := sampling.logit_bias[-1][0]) >= vocab_size:
            raise InvalidArgumentError(
                f"sampling.logit_bias[{last}]: must be below the vocabulary size {vocab_size}"
            )
        ids, bias = _bias(sampling.logit_bias, scores.device)
        scores[:, ids] += bias.to(scores.dtype)
    if not sampling.needs_history:
        return scores
    if history is None:
        raise ValueError("history is needed: sampling has penalties or min_tokens")
    if sampling.penalizes:
        if len(draft_token_ids) < rows - 1:
            raise ValueError(
                f"{rows} rows need {rows - 1} drafted tokens between them for the penalties, "
                f"got {len(draft_token_ids)}"
            )
        drafts = list(draft_token_ids[: rows - 1])
        if sampling.repetition_penalty != 1.0:
            scores = _repetition(scores, sampling.repetition_penalty, history.token_ids, drafts)
        if sampling.presence_penalty or sampling.frequency_penalty:
            _presence_and_frequency(scores, sampling, history, drafts)
    eos = [token for token in history.eos_token_ids if token < vocab_size]
    missing = sampling.min_tokens - (len(history.token_ids) - history.prompt_length)
    if missing > 0 and eos:
        ids = upload(torch.tensor(eos), scores.device)
        scores[:missing].index_fill_(1, ids, -torch.inf)
    return scores


@lru_cache(maxsize=64)
def _bias(logit_bias: tuple[tuple[int, float], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and the values added to their logits."""
    ids, values = zip(*logit_bias, strict=True)
    return upload(torch.tensor(ids), device), upload(
        torch.tensor(values, dtype=torch.float64), device
    )


def _repetition(
    scores: Tensor, penalty: float, token_ids: Sequence[int], drafts: list[int]
) -> Tensor:
    """Transformers' repetition penalty; row i sees `token_ids` and the drafts before it."""
    rows, vocab_size = scores.shape
    # A token counts once however often it occurs. V means none: transformers drops it.
    seen = torch.tensor([*set(token_ids)], dtype=torch.int64).expand(rows, -1)
    later = torch.tensor(drafts, dtype=torch.int64).expand(rows, -1)
    before = torch.ones_like(later, dtype=torch.bool).tril(-1)
    context = torch.cat([seen, later.where(before, vocab_size)], dim=-1)
    penalty = max(penalty, LEAST_REPETITION_PENALTY)
    penalize = RepetitionPenaltyLogitsProcessor(float(penalty))
    penalized: Tensor = penalize(upload(context, scores.device), scores)
    return penalized


def _presence_and_frequency(
    scores: Tensor, sampling: SamplingParams, history: History, drafts: list[int]
) -> None:
    """Apply OpenAI's penalties in place, only to the columns of tokens in the output."""
    counted = Counter(history.token_ids[history.prompt_length :])
    column = {token: i for i, token in enumerate(dict.fromkeys([*counted, *drafts]))}
    if not column:
        return
    base = torch.tensor([counted[token] for token in column], dtype=scores.dtype)
    drafted = torch.zeros(scores.shape[0], len(column), dtype=scores.dtype)
    drafted[range(1, len(drafts) + 1), [column[token] for token in drafts]] = 1
    counts = upload(base + drafted.cumsum(dim=0), scores.device)
    columns = upload(torch.tensor([*column]), scores.device)
    scores[:, columns] = (
        scores[:, columns]
        - counts * sampling.frequency_penalty
        - (counts > 0) * sampling.presence_penalty
    )


def token_logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return the log-probability in nats of one token per row under softmax(logits), [rows, V].

    Each comes with the `top` most likely tokens, most likely first and lower ids first among equal
    logits. Half precision is computed in float32, float64 stays.
    """
    own = upload(torch.tensor([*token_ids], dtype=torch.int64), logits.device)
    if logits.device.type != "cpu":
        table = logprob_table(logits, own[:, None], top)
        return [logprobs_in(row, 0, 1, top) for row in table.tolist()]
    scores = computable(logits)
    total = scores.logsumexp(dim=-1, keepdim=True)
    logprobs = (scores.gather(1, own[:, None]) - total)[:, 0].tolist()
    top = min(top, scores.shape[-1])
    if top <= 0:
        return [TokenLogprobs(logprob) for logprob in logprobs]
    # topk may pick any of equal logits, so consider all that reach its last value.
    last = scores.topk(top, dim=-1).values[:, -1:]
    rows, tokens = (scores >= last).nonzero(as_tuple=True)
    raw = scores[rows, tokens]
    values = raw - total[rows, 0]
    found = []
    for row, logprob in enumerate(logprobs):
        mine = rows == row
        order = raw[mine].sort(descending=True, stable=True).indices[:top]
        found.append(
            TokenLogprobs(
                logprob, tuple(tokens[mine][order].tolist()), tuple(values[mine][order].tolist())
            )
        )
    return found


def logprob_table(logits: Tensor, token_ids: Tensor, top: int) -> Tensor:
    """Return what `token_logprobs` tells of n tokens per row [rows, n], without reading the device.

    float64 [rows, n + 2 t], t = min(top, V): the log-probabilities of the tokens, the ids of the
    t most likely ones, and theirs. `logprobs_in` reads a row.
    """
    scores = computable(logits)
    total = scores.logsumexp(dim=-1, keepdim=True)
    columns = [scores.gather(1, token_ids) - total]
    if (top := min(top, scores.shape[-1])) > 0:
        # Unlike topk, a stable sort has lower ids first among equal logits.
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        columns += [ids[:, :top], values[:, :top] - total]
    return torch.cat([column.to(torch.float64) for column in columns], dim=-1)


def logprobs_in(row: Sequence[float], which: int, n: int, top: int) -> TokenLogprobs:
    """Return token `which` of n in a row of a `logprob_table` with at least `top` likely ones."""
    width = (len(row) - n) // 2
    ids, logprobs = row[n : n + width][:top], row[n + width :][:top]
    return TokenLogprobs(row[which], tuple(int(token) for token in ids), tuple(logprobs))

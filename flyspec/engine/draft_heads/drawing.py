"""A head's step as a draw: heads draw tokens as models do (`stepwise`), by the rules of `Draw`."""

from __future__ import annotations

import torch
from torch import Tensor

from flyspec.engine.draft_heads.base import DraftHead, HeadStep
from flyspec.engine.model import Draw, Step


def draw_of(step: HeadStep) -> Draw:
    """Return the draw of a model that reads the same tokens, each at its position."""
    return Draw(
        Step(step.slot, step.start + 1, [*step.token_ids], min(step.max_tokens, 1)),
        step.sampling if step.max_tokens else None,
        step.seed,
        step.history,
        step.distribution,
        step.max_tokens,
        step.stop_token_ids,
        step.min_confidence,
        confidences=True,
    )


def over_vocabulary(logits: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return rows of logits over the target's vocabulary, -infinity for what cannot be drafted.

    The given ones are of `token_ids`, in this order; None: of all tokens.
    """
    if token_ids is None:
        return logits
    whole = logits.new_full((len(logits), vocab_size), -torch.inf)
    return whole.index_copy_(1, token_ids, logits)


def check_step(step: HeadStep, head: DraftHead, hidden_size: int, vocab_size: int) -> None:
    """Raise `ValueError` for a step that a head cannot run."""
    count, layers = len(step.token_ids), len(head.hidden_layers)
    if not count or len(step.hidden) != layers:
        raise ValueError(
            f"a step has {len(step.hidden)} layers of {count} rows; the head reads at least one "
            f"row of {layers} layers"
        )
    for rows in step.hidden:
        if tuple(rows.shape) != (count, hidden_size):
            raise ValueError(f"hidden rows are {list(rows.shape)}, not [{count}, {hidden_size}]")
    if not 0 <= min(step.token_ids) <= max(step.token_ids) < vocab_size:
        raise ValueError(f"token ids must be between 0 and {vocab_size - 1}")
    if step.max_tokens > head.max_tokens:
        raise ValueError(f"{step.max_tokens} tokens; the head drafts up to {head.max_tokens}")

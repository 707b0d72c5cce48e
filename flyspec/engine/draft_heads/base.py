"""The interface of a draft head: the target's hidden rows go in, drafted tokens come out.

A head without hidden layers reads tokens alone: a draft model in the target's process.

A head lives in the process of the target, since hidden rows are too large to send (24 KiB a token
for an 8B model), and shares the target's slots, embedding and output layer. Heads draw tokens as
models do (`stepwise`), by the rules of `Draw`. Plain values besides tensors: importing this needs
no torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from flyspec.engine.model import Draw, History, Step
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import Drafted, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class HeadStep(NamedTuple):
    """Continue a head's cache of `slot` after its first `start` positions, then perhaps draft.

    `hidden` has the target's rows at absolute positions `start` to `start` + n - 1 (n >= 1), one
    tensor [n, hidden size] for each of the head's `hidden_layers`; `token_ids` the n tokens that
    follow each of these positions, so that the last one is the sequence's last token, which the
    target has not read yet. What the slot held beyond `start` is dropped: rollback is a length.

    The head then drafts up to `max_tokens` tokens after the last one (0: only fills its cache),
    drawn as `Draw` describes. What it caches while drafting does not count as held.

    `first_token_id` is the token at `start`, of which hidden rows say more; it is there for heads
    that read tokens alone.
    """

    slot: int
    start: int
    hidden: tuple[Tensor, ...]
    token_ids: Sequence[int]
    max_tokens: int = 0
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    history: History | None = None
    distribution: DistributionSpec | None = None
    stop_token_ids: Collection[int] = ()
    min_confidence: float = 0.0
    first_token_id: int = 0


class DraftHead(Protocol):
    """A head of one target. Not thread-safe: the thread of the target's engine owns it."""

    @property
    def kind(self) -> str:
        """eagle3, medusa, mtp or model."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers whose rows it reads, numbered as in `Step.hidden_layers`.

        None: it reads tokens alone, and misses none of them.
        """

    @property
    def max_tokens(self) -> int:
        """Maximum tokens that it drafts at once: a Medusa head's number of heads."""

    @property
    def num_parameters(self) -> int:
        """Weights of its own, without what it shares with the target."""

    @property
    def fingerprint(self) -> str:
        """Digest of its weights, 32 hexadecimal digits."""

    def held(self, slot: int) -> int:
        """Return how many positions of a slot it holds; a step may start at or before there.

        A head may miss the beginning of a sequence that the target did not read again (a cached
        prefix): a step may also start later than what it holds, and the head then attends to
        what it has from there on.
        """

    def draft(self, steps: Sequence[HeadStep]) -> list[Drafted]:
        """Run all steps and return each one's drafts, with confidences. No two share a slot."""

    def forget(self, slot: int) -> None:
        """Drop what it holds of a slot."""


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
    whole = logits.new_full((len(logits), vocab_size), -math.inf)
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

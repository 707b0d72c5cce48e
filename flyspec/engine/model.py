"""The interface of a model: steps over slots go in, logits or drawn tokens come out.

Engines, drafters and the step loop depend on this alone, not on what implements it: transformers'
modules (`runner`), a script in the tests, other engines later. Plain values: no torch, no numpy.

Rollback is a length: a step says how many of its slot's tokens it continues from, and whatever the
slot held beyond them is dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from flyspec.draft_trees import depths
from flyspec.prefix import num_same
from flyspec.values.admin import ModelInfo
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import Drafted, Origin, SamplingParams, TokenDistribution, still_needed

if TYPE_CHECKING:
    from torch import Tensor

    from flyspec.engine.cache_table import CacheTable


class Interrupt:
    """Asks a call of several steps to end after the current one; any thread may set it.

    Native code reads the 32-bit integer at `address`, which is non-zero while the flag is set.
    """

    __slots__ = ("_flag", "address")

    def __init__(self) -> None:
        self._flag = array("i", [0])
        self.address = self._flag.buffer_info()[0]

    @property
    def is_set(self) -> bool:
        return bool(self._flag[0])

    def set(self) -> None:
        """End the current call, or the next one after its first step."""
        self._flag[0] = 1

    def clear(self) -> None:
        self._flag[0] = 0


NEVER = Interrupt()
"""For calls that are never interrupted."""


class Step(NamedTuple):
    """Continue `slot` after its first `start` tokens with `token_ids` (at least one)."""

    slot: int
    start: int
    token_ids: list[int]
    num_logits: int = 1
    """Rows of logits to return, one after each of the last tokens (0: only fill the slot)."""
    hidden_layers: tuple[int, ...] = ()
    """Layers whose hidden rows are returned too, numbered as in transformers'
    `output_hidden_states`: 0 the embeddings, i the output of layer i, the last after the final
    norm. Negative numbers count from the end: -1 is the last."""
    num_hidden: int | None = None
    """Hidden rows to return, of the last tokens (None: `num_logits`). Unlike logits, they cost
    nothing but their memory, so that a prompt's can be read."""
    parents: tuple[int, ...] = ()
    """If not empty, as many of the last tokens are a tree (`flyspec.draft_trees`); row 0 is the
    token before them. A token reads what leads to it, and has the position that it would have in a
    chain of that. The slot holds nothing of them until `CacheTable.keep_path`."""

    @property
    def num_chained(self) -> int:
        """Tokens before the tree: all of them without one."""
        return len(self.token_ids) - len(self.parents)

    @property
    def positions(self) -> list[int]:
        """The position of each token in the sequence."""
        first = self.start + self.num_chained - 1  # of the tree's row 0
        chain = range(self.start, first + 1)
        return [*chain, *(first + depth for depth in depths(self.parents))]

    @property
    def hidden_count(self) -> int:
        """Hidden rows that it returns for each layer."""
        if not self.hidden_layers:
            return 0
        return self.num_logits if self.num_hidden is None else self.num_hidden


class Rows(NamedTuple):
    """The rows that a forward returns for one step.

    `logits` [num_logits, vocab]; `hidden` [num_hidden, hidden size] for each requested layer, in
    that order.
    """

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


def check_layers(steps: Sequence[Step], num_layers: int) -> None:
    """Raise `ValueError` if a step asks for a layer that a model of `num_layers` does not have."""
    for layer in {layer for step in steps for layer in step.hidden_layers}:
        if not -num_layers - 1 <= layer <= num_layers:
            raise ValueError(f"hidden_layers: {layer} is not between 0 and {num_layers}")


def check_trees(steps: Sequence[Step], refusal: str) -> None:
    """Raise `ValueError` if a step is a tree and there is a `refusal` (`Model.tree_refusal`)."""
    if refusal and any(step.parents for step in steps):
        raise ValueError(f"parents: {refusal}")


class History(NamedTuple):
    """The sequence before the first row of logits; its first `prompt_length` tokens are the prompt.

    `eos_token_ids` are the tokens that `min_tokens` suppresses.
    """

    token_ids: Sequence[int]
    prompt_length: int
    eos_token_ids: Collection[int] = ()


class Draw(NamedTuple):
    """A step, and how to draw the model's own tokens from its rows; without `sampling`, none.

    A row's token is the one at the position after the row's. `history` is the sequence before the
    first row's token, needed for penalties and `min_tokens`. With `distribution`, distributions
    are returned too; with `draw_from_it`, the tokens are drawn from them.

    With `max_tokens` above 1, for steps of a single row, the model continues from the token it
    drew, up to that many tokens. It stops after one of `stop_token_ids`, and after the token at
    which the product of the `confidences` falls below `min_confidence`; to continue in another
    call, divide `min_confidence` by the `confidences` so far. The last token drawn is not in the
    cache.
    """

    step: Step
    sampling: SamplingParams | None = None
    seed: int = 0
    history: History | None = None
    distribution: DistributionSpec | None = None
    max_tokens: int = 1
    stop_token_ids: Collection[int] = ()
    min_confidence: float = 0.0
    confidences: bool = False
    """True to return with each token the largest processed probability at its place, which says
    nothing of the token that is drawn; implied by `min_confidence`."""

    @property
    def is_keyed(self) -> bool:
        """True if its tokens depend on the logits, their positions and the seed alone."""
        sampling, spec = self.sampling, self.distribution
        if sampling is None:
            return True
        from_sent = spec is not None and spec.draw_from_it and not sampling.greedy
        return not (sampling.logit_bias or sampling.needs_history or from_sent)

    @property
    def is_plain(self) -> bool:
        """True if that is so, and if distributions are requested, they are points."""
        spec = self.distribution
        listed = self.sampling is not None and spec is not None and not spec.draw_from_it
        return self.is_keyed and not listed

    def part(self, step: Step, max_tokens: int) -> Draw:
        """Return the part of this draw for `step`, a piece of its step, and `max_tokens`."""
        if step is self.step and max_tokens == self.max_tokens:
            return self
        sampling = self.sampling if step.num_logits else None
        return self._replace(step=step, sampling=sampling, max_tokens=max_tokens)


class Model(Protocol):
    """A causal language model with slots. Not thread-safe: one thread owns it."""

    @property
    def info(self) -> ModelInfo:
        """The description returned by `Describe`; `numerics` is set once the model is warm."""

    @property
    def cache(self) -> CacheTable:
        """The table of its slots and their contents."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache per token on this device; 0 before the first forward."""

    @property
    def tree_refusal(self) -> str:
        """Why steps of this model cannot be trees (`Step.parents`); empty if they can."""

    def warm_up(self) -> None:
        """Check the model against its reference, and run what the first request would pay for.

        Raises `ConfigError` with the reason if the model must not serve.
        """

    def synchronize(self) -> None:
        """Wait for the device, so that later work is not charged with the forward's time."""

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """Run all steps in one forward and return each one's rows. No two may share a slot.

        The rows are valid until the next call. Raises `ValueError` for a tree if there is a
        `tree_refusal`.
        """

    def draw(self, draws: Sequence[Draw], interrupt: Interrupt = NEVER) -> list[Drafted]:
        """Return the model's own tokens for each draw's rows, over up to `max_tokens` steps.

        Once `interrupt` is set, returns what it has after the current step.

        A draw that only fills the cache yields no tokens. Requested distributions come one per
        row, up to the first row whose token differs from the one that the step continues with:
        later rows continue a different text.
        """


def ends_after(draw: Draw, token_ids: Sequence[int], chances: Sequence[float]) -> int:
    """Return how many of a draw's tokens it keeps: up to a stop, or the one that makes it unsure.

    `chances` are the tokens' confidences.
    """
    left = draw.min_confidence
    for count, (token_id, chance) in enumerate(zip(token_ids, chances, strict=True), 1):
        if token_id in draw.stop_token_ids:
            return count
        left = still_needed(left, [chance])
        if left > 1:
            return count
    return len(token_ids)


def drafted(draw: Draw, token_ids: list[int], chances: list[float]) -> Drafted:
    """Return a draw's result; a requested distribution is a point mass on each token."""
    count = 0
    if draw.distribution is not None and token_ids:
        fed, several = draw.step.token_ids, draw.step.num_logits
        guess = fed[len(fed) - several + 1 :] if several > 1 else ()
        count = num_same(token_ids, guess) + 1 if several > 1 else len(token_ids)
    # An empty distribution puts all probability on the token.
    distributions = [TokenDistribution()] * count
    return Drafted(token_ids, [Origin.EXACT_MODEL] * len(token_ids), distributions, chances)

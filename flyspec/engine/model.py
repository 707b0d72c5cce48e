"""What a model is to the services: steps over slots go in, logits or drawn tokens come out.

Engines, drafters and the step loop know this and nothing of what is behind it: transformers'
modules (`runner`), a script in the tests, other engines later. Plain values: no torch, no numpy.

Rollback is a length: a step names how many of its slot's tokens it builds on, and what the slot
held beyond them is forgotten.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from flyspec.values.admin import ModelInfo
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import Drafted, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from flyspec.engine.slots import SlotTable


class Interrupt:
    """Asks a call of several steps to end after the one at hand; any thread may set it.

    Native code reads the 32-bit number at `address`, which is not 0 while it is set.
    """

    __slots__ = ("_flag", "address")

    def __init__(self) -> None:
        self._flag = array("i", [0])
        self.address = self._flag.buffer_info()[0]

    @property
    def is_set(self) -> bool:
        """Whether a call should end."""
        return bool(self._flag[0])

    def set(self) -> None:
        """End the call at hand, or the next one after its first step."""
        self._flag[0] = 1

    def clear(self) -> None:
        """Let calls go on."""
        self._flag[0] = 0


NEVER = Interrupt()
"""That of calls that nobody ends."""


class Step(NamedTuple):
    """Continue `slot` behind its first `start` tokens with `token_ids` (at least one)."""

    slot: int
    start: int
    token_ids: list[int]
    num_logits: int = 1
    """Rows wanted: the logits after each of the last `num_logits` tokens; 0 only fills the slot."""
    hidden_layers: tuple[int, ...] = ()
    """Layers whose rows come with the logits, numbered as by transformers' `output_hidden_states`:
    0 the embeddings, i what layer i puts out, the last one behind the final norm."""


class Rows(NamedTuple):
    """What a forward gives of one step.

    `logits` [num_logits, vocab]; `hidden` [num_logits, hidden size] of each layer asked for, in
    that order.
    """

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


class History(NamedTuple):
    """The sequence before the first row of logits; its first `prompt_length` tokens are the prompt.

    `eos_token_ids` are the tokens that `min_tokens` holds back.
    """

    token_ids: Sequence[int]
    prompt_length: int
    eos_token_ids: Collection[int] = ()


class Draw(NamedTuple):
    """A step, and how the model's own tokens are chosen from its rows; without `sampling` none are.

    A row's token is the one at the position behind the row's. `history` is the sequence before the
    first row's token, needed for penalties and `min_tokens`. With `distribution` the distributions
    come along, and with `draw_from_it` the tokens are drawn from them.

    With `max_tokens` above 1, for steps of a single row, the model goes on with the token that it
    drew, up to so many tokens. It ends behind one of `stop_token_ids`, and behind the token with
    which the probability of all that were drawn, as they are processed, falls under
    `min_confidence`: whoever goes on in another call divides that by the `confidences` so far. The
    last token drawn is not in the cache.
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
    """Whether each token's probability is wanted; with `min_confidence` it comes anyway."""

    def part(self, step: Step, max_tokens: int) -> Draw:
        """As much of it as `step`, a piece of its step, and up to `max_tokens` tokens."""
        if step is self.step and max_tokens == self.max_tokens:
            return self
        sampling = self.sampling if step.num_logits else None
        return self._replace(step=step, sampling=sampling, max_tokens=max_tokens)


class Model(Protocol):
    """A causal language model with slots. Not thread-safe: one thread owns it."""

    @property
    def info(self) -> ModelInfo:
        """What `Describe` says of it, `numerics` once it is warm."""

    @property
    def cache(self) -> SlotTable:
        """Its slots, and what they hold."""

    @property
    def bytes_per_token(self) -> int:
        """What a token's place in the cache takes on this device; 0 before the first forward."""

    def warm_up(self) -> None:
        """Try it against its reference, and run what the first request would pay for.

        Raises `ConfigError` with the reason if it must not serve.
        """

    def synchronize(self) -> None:
        """Wait for the device, so that what follows is not charged with the forward's time."""

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """The rows that each step asks for; one forward for all. No two have the same slot."""

    def draw(self, draws: Sequence[Draw], interrupt: Interrupt = NEVER) -> list[Drafted]:
        """The model's own tokens for each draw's rows; with `max_tokens`, of so many steps.

        Once `interrupt` is set, what there is is returned after the step at hand.

        Of a draw that only fills the cache, none. If distributions are asked for, there is one a
        row up to the first whose token is not the one that the step goes on with: the rows behind
        it continue another text.
        """

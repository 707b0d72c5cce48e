"""A draft model that replays the target's own greedy continuation, with errors at a given rate.

The draft service runs it like any model. It asks the target once for the continuation of a prefix,
by plain decoding through the services, and remembers it; after an error, too, so that a rule that
accepts the error finds the target's text for it. A run that has been made before asks nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flyspec.engine.cache_table import CacheTable
from flyspec.engine.distributions import round_off
from flyspec.engine.model import NEVER, Draw, Interrupt, Model, Rows, Step
from flyspec.engine.slots import SlotTable
from flyspec.errors import InvalidArgumentError
from flyspec.prefix import TokenSequence
from flyspec.speculation_length import MOST_BY_AUTO
from flyspec.values.admin import ModelInfo
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import Drafted, Origin, TokenDistribution, TokenLogprobs

_RIVALS = 4
"""An error is one of this many tokens most likely under the target, like a draft model's errors."""


@dataclass(frozen=True)
class Said:
    """The target's own token at a position, with its most likely ones there."""

    token_id: int
    logprobs: TokenLogprobs


Ask = Callable[[Sequence[int], int], Sequence[Said]]
"""Returns the target's greedy continuation of a sequence, this many tokens or fewer at the end."""


@dataclass(frozen=True)
class DraftErrors:
    """Errors of the replayed text: at each position with probability `rate`, keyed by `seed`."""

    rate: float
    seed: int = 0

    def at(self, position: int) -> bool:
        """Return whether the draft at a position differs from the target's token."""
        return self._number("place", position) < self.rate

    def instead_of(self, said: Said, position: int, vocab_size: int, never: frozenset[int]) -> int:
        """Return the token drafted there: one of the target's likely ones, or else any other."""
        rivals = [t for t in said.logprobs.top_token_ids[:_RIVALS] if t != said.token_id]
        rivals = [t for t in rivals if t not in never]
        if rivals:
            return rivals[int(self._number("token", position) * len(rivals))]
        return self.any_token(position, vocab_size, never | {said.token_id})

    def any_token(self, position: int, vocab_size: int, never: frozenset[int]) -> int:
        """Return some token not among `never`."""
        token = int(self._number("token", position) * vocab_size)
        while token in never:
            token = (token + 1) % vocab_size
        return token

    def _number(self, what: str, position: int) -> float:
        """Return a number in [0, 1), a function of the seed and the position."""
        key = f"{what} {self.seed} {position}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64


class ReplayModel:
    """A `Model` without weights, for greedy sampling only.

    `eos_token_ids` are never drafted by error. `num_asked` counts tokens requested from the target.
    Without `asks_after_errors`, drafts after an error are arbitrary, which only token-exact rules
    never notice. `pace` is a model that runs every draw as well, and whose tokens are dropped: then
    a draft costs what one of that model does.
    """

    def __init__(
        self,
        info: ModelInfo,
        num_slots: int,
        errors: DraftErrors,
        ask: Ask,
        eos_token_ids: Sequence[int] = (),
        asks_after_errors: bool = True,
        pace: Model | None = None,
    ) -> None:
        self.info = info
        self.cache: CacheTable = SlotTable(num_slots, info.context_length)
        if pace is not None:
            self.cache = pace.cache
        self.num_asked = 0
        self._pace = pace
        self._errors, self._ask, self._eos = errors, ask, frozenset(eos_token_ids)
        self._said: dict[int, Said] = {}
        self._gone_on: set[int] = set()
        self._asks_after_errors = asks_after_errors
        self._erred: set[int] = set()  # hashes of sequences with an error, unless it asks after it
        self._distributions: dict[tuple[int, DistributionSpec], TokenDistribution] = {}

    @property
    def bytes_per_token(self) -> int:
        return 0 if self._pace is None else self._pace.bytes_per_token

    @property
    def tree_refusal(self) -> str:
        return "a replayed text is a chain"

    def warm_up(self) -> None:
        """Warm up the model that it keeps pace with, if any."""
        if self._pace is not None:
            self._pace.warm_up()

    def synchronize(self) -> None:
        """Wait for that model's device."""
        if self._pace is not None:
            self._pace.synchronize()

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """Raise `InvalidArgumentError`: there are no logits."""
        raise InvalidArgumentError("a replayed continuation has no logits")

    def draw(self, draws: Sequence[Draw], interrupt: Interrupt = NEVER) -> list[Drafted]:
        """As `Model.draw`. Raises `InvalidArgumentError` for sampling."""
        if self._pace is None:
            self.cache.pending_copies.clear()
        else:
            self._pace.draw(draws, interrupt)
        return [self._draw(draw) for draw in draws]

    def _draw(self, draw: Draw) -> Drafted:
        slot, start, token_ids, num_rows, *_ = draw.step
        self.cache.reserve(slot, start, len(token_ids))
        self.cache.record(slot, start, token_ids)
        if draw.sampling is None:
            return Drafted([])
        if not draw.sampling.greedy or draw.sampling.needs_history:
            raise InvalidArgumentError("the replayed text was decoded greedily; leave sampling out")
        held = self.cache.held(slot)
        if num_rows > 1:
            return self._score(held, num_rows)
        sequence = TokenSequence(held)
        length = len(sequence)
        distributions: list[TokenDistribution] = []
        while len(sequence) < length + draw.max_tokens:
            token = self._token(sequence, length + draw.max_tokens)
            if draw.distribution is not None:
                distributions.append(self._distribution(sequence.hash, token, draw.distribution))
            erred = sequence.hash in self._erred or self._errors.at(len(sequence))
            sequence.extend([token])
            if erred and not self._asks_after_errors:
                self._erred.add(sequence.hash)
            if token in draw.stop_token_ids:
                break
        drawn = sequence.tokens[length:]
        error = next((p for p in range(length, len(sequence)) if self._errors.at(p)), 0)
        if error and self._asks_after_errors:
            self._go_on(sequence.tokens[: error + 1])
        self.cache.record(slot, length, drawn[:-1])  # but the last one, as `Model.draw` says
        return Drafted(drawn, [Origin.EXACT_MODEL] * len(drawn), distributions)

    def _score(self, tokens: Sequence[int], num_rows: int) -> Drafted:
        """Return what it would have drafted at each of these positions of the text."""
        sequence = TokenSequence(tokens[: len(tokens) - num_rows + 1])
        drawn = [self._token(sequence, len(tokens) + 1)]
        for token in tokens[len(sequence) :]:
            sequence.extend([token])
            drawn.append(self._token(sequence, len(tokens) + 1))
        return Drafted(drawn, [Origin.EXACT_MODEL] * num_rows)

    def _token(self, sequence: TokenSequence, end: int) -> int:
        """Return the next draft; the target's text up to the next error is requested at once."""
        position = len(sequence)
        if sequence.hash in self._erred:
            return self._errors.any_token(position, self.info.vocab_size, self._eos)
        if sequence.hash not in self._said:
            more = next((p for p in range(position, end) if self._errors.at(p)), end - 1)
            self._remember(sequence.tokens, more + 1 - position)
        said = self._said[sequence.hash]
        if not self._errors.at(position):
            return said.token_id
        return self._errors.instead_of(said, position, self.info.vocab_size, self._eos)

    def _go_on(self, tokens: Sequence[int]) -> None:
        """Request everything that may be drafted after an error in any round, once."""
        sequence = TokenSequence(tokens)
        end = min(len(sequence) + MOST_BY_AUTO, self.info.context_length)
        if sequence.hash in self._gone_on:
            return
        while len(sequence) < end:
            self._gone_on.add(sequence.hash)
            sequence.extend([self._token(sequence, end)])

    def _remember(self, tokens: Sequence[int], count: int) -> None:
        known = TokenSequence(tokens)
        for said in self._ask(tokens, count):
            self._said[known.hash] = said
            known.extend([said.token_id])
            self.num_asked += 1

    def _distribution(self, prefix: int, token: int, spec: DistributionSpec) -> TokenDistribution:
        """Return what a draft model as certain as the target would send.

        The target's most likely tokens keep its probabilities, the highest going to the drafted
        token; the rest of the probability is spread evenly over the other tokens. A point mass if
        the rule wants greedy drafts to be certain.
        """
        if spec.draw_from_it:
            return TokenDistribution()
        if (prefix, spec) not in self._distributions:
            self._distributions[prefix, spec] = self._make_distribution(
                self._said[prefix].logprobs, token, spec
            )
        return self._distributions[prefix, spec]

    def _make_distribution(
        self, logprobs: TokenLogprobs, token: int, spec: DistributionSpec
    ) -> TokenDistribution:
        values = dict(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))
        rest = max(1e-6, 1.0 - sum(map(math.exp, values.values())))
        floor = math.log(rest / max(1, self.info.vocab_size - len(values)))
        if values:
            best = max(values, key=lambda t: values[t])
            values[token], values[best] = values[best], values.get(token, floor)
        row = torch.full((1, self.info.vocab_size), floor)
        row[0, list(values)] = torch.tensor(list(values.values()))
        return round_off(row, spec).encode()[0]

"""Drafts with a model, one token a step, its keys and values in a slot of the model's cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from draft_service.drafters.base import DrafterSession, Drafting
from flyspec.engine.model import Draw, History, Model, Step
from flyspec.values.admin import DrafterInfo
from flyspec.values.rounds import DraftOpen
from flyspec.values.tokens import Drafted


class CachedPrefix:
    """A slot, how many of its positions hold the sequence's tokens, and how to draw behind them.

    `eos_token_ids` are held back for `min_tokens`.
    """

    def __init__(self, model: Model, open_: DraftOpen, eos_token_ids: frozenset[int]) -> None:
        self._cache = model.cache
        self._sampling, self._seed = open_.sampling, open_.seed
        self._distribution = open_.distribution
        self._prompt_length = open_.prompt_length or len(open_.token_ids)
        self._eos = eos_token_ids
        self._needs_history = open_.sampling.needs_history
        self._slot, self.length = model.cache.acquire(open_.token_ids)

    def keep(self, length: int) -> None:
        """Forget positions from `length` on."""
        self.length = min(self.length, length)

    def extend(
        self, tokens: Sequence[int], guess: Sequence[int] = (), max_tokens: int = 1
    ) -> Generator[Draw, Drafted, Drafted]:
        """Cache `tokens` and then `guess`; yields the draw that this takes.

        Returns the model's own token after the last of `tokens` and after each guessed one, with
        their distributions if the session sends them; without a guess perhaps more, up to
        `max_tokens` and the end of the text. `tokens` must stay until it returns. What was guessed,
        and all drawn but the last, counts as cached: call `keep` if it does not stand.
        """
        total = len(tokens)
        start = min(self.length, total - 1)
        step = Step(self._slot, start, [*tokens[start:], *guess], 1 + len(guess))
        history = None
        if self._needs_history:
            history = History(tokens, self._prompt_length, self._eos)
        drawn = yield Draw(
            step, self._sampling, self._seed, history, self._distribution, max_tokens, self._eos
        )
        self.length = start + len(step.token_ids) + len(drawn.token_ids) - step.num_logits
        return drawn

    def release(self) -> None:
        """Give the slot back."""
        self._cache.release(self._slot)


class ModelDrafter:
    """Draws from a causal LM with the target's sampling parameters and noise.

    `eos_token_ids` end a proposal, themselves included.
    """

    kind = "model"
    needs_model = True

    def __init__(self, model: Model, eos_token_ids: Sequence[int]) -> None:
        self.info = DrafterInfo(self.kind, self.kind, model.info)
        self._model = model
        self._eos = frozenset(eos_token_ids)

    def open(self, open_: DraftOpen) -> DrafterSession:
        """Take a slot; the first proposal fills it."""
        return ModelSession(self._model, self._eos, open_)


class ModelSession:
    """A sequence and the slot that caches it."""

    def __init__(self, model: Model, eos: frozenset[int], open_: DraftOpen) -> None:
        self._tokens = list(open_.token_ids)
        self._prefix = CachedPrefix(model, open_, eos)
        self._context_length = model.info.context_length
        self._eos = eos

    @property
    def token_ids(self) -> Sequence[int]:
        """The sequence with the last proposal."""
        return self._tokens

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        """Truncate, then append; what is cached of the kept tokens stays."""
        del self._tokens[keep_length:]
        self._tokens.extend(append_token_ids)
        self._prefix.keep(keep_length)

    def propose(self, max_tokens: int) -> Drafting:
        """One step a token; none after the last."""
        tokens = self._tokens
        left = min(max_tokens, self._context_length - len(tokens))
        while left > 0:
            drawn = yield from self._prefix.extend(tokens, max_tokens=left)
            tokens += drawn.token_ids
            yield drawn
            left = 0 if tokens[-1] in self._eos else left - len(drawn.token_ids)

    def close(self) -> None:
        """Release the slot."""
        self._prefix.release()

"""Drafts with a model, one token a step, its keys and values in a slot of the runner's cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from draft_service.drafters.base import Drafted, Work
from flyspec.engine.logits import History, needs_history
from flyspec.engine.runner import Draw, Drawn, ModelRunner
from flyspec.engine.scheduler import Step
from flyspec.values.admin import DrafterInfo
from flyspec.values.rounds import DraftOpen
from flyspec.values.tokens import Origin

_ONE_FROM_MODEL = (Origin.EXACT_MODEL,)


class CachedPrefix:
    """A slot, how many of its positions hold the sequence's tokens, and how to draw behind them.

    `eos_token_ids` are held back for `min_tokens`.
    """

    def __init__(
        self, runner: ModelRunner, open_: DraftOpen, eos_token_ids: frozenset[int]
    ) -> None:
        self._cache = runner.cache
        self._sampling, self._seed = open_.sampling, open_.seed
        self._distribution = open_.distribution
        self._prompt_length = open_.prompt_length or len(open_.token_ids)
        self._eos = eos_token_ids
        self._needs_history = needs_history(open_.sampling)
        self._slot, self.length = runner.cache.acquire(open_.token_ids)

    def keep(self, length: int) -> None:
        """Forget positions from `length` on."""
        self.length = min(self.length, length)

    def extend(
        self, tokens: Sequence[int], guess: Sequence[int] = ()
    ) -> Generator[Draw, Drawn, Drawn]:
        """Cache `tokens` and then `guess`; yields the draws that this takes.

        Returns the model's own token after the last of `tokens` and after each guessed one, with
        their distributions if the session sends them. `tokens` must stay until it returns. The
        guess counts as cached: call `keep` if it does not stand.
        """
        total = len(tokens)
        start = min(self.length, total - 1)
        step = Step(self._slot, start, [*tokens[start:], *guess], 1 + len(guess))
        history = None
        if self._needs_history:
            history = History(tokens, self._prompt_length, self._eos)
        drawn = yield Draw(step, self._sampling, self._seed, history, self._distribution)
        self.length = total + len(guess)
        return drawn

    def release(self) -> None:
        """Give the slot back."""
        self._cache.release(self._slot)


class ModelDrafter:
    """Draws from a causal LM with the target's sampling parameters and noise.

    `eos_token_ids` end a proposal, themselves included.
    """

    needs_model = True

    def __init__(self, runner: ModelRunner, eos_token_ids: Sequence[int]) -> None:
        self.info = DrafterInfo("model", "model", runner.info)
        self._runner = runner
        self._eos = frozenset(eos_token_ids)

    def open(self, open_: DraftOpen) -> ModelSession:
        """Take a slot; the first proposal fills it."""
        return ModelSession(self._runner, self._eos, open_)


class ModelSession:
    """A sequence and the slot that caches it."""

    def __init__(self, runner: ModelRunner, eos: frozenset[int], open_: DraftOpen) -> None:
        self._tokens = list(open_.token_ids)
        self._prefix = CachedPrefix(runner, open_, eos)
        self._context_length = runner.info.context_length
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

    def propose(self, max_tokens: int) -> Work:
        """One step a token; none after the last."""
        tokens, extend = self._tokens, self._prefix.extend
        for _ in range(min(max_tokens, self._context_length - len(tokens))):
            drawn = yield from extend(tokens)
            (token,) = drawn.token_ids
            tokens.append(token)
            yield Drafted(drawn.token_ids, _ONE_FROM_MODEL, drawn.distributions)
            if token in self._eos:
                return

    def close(self) -> None:
        """Release the slot."""
        self._prefix.release()

"""Drafts with a model, one token per step, with a slot in the model's KV cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import exp
from struct import unpack

from draft_service.drafters.base import Drafting, Foresight, Scored, SecondChoice
from flyspec.engine.model import Draw, History, Model, Step
from flyspec.values.admin import DrafterInfo
from flyspec.values.rounds import MAX_STAGED_ROUNDS, DistributionSpec, DraftOpen, TopTokens
from flyspec.values.tokens import Drafted, TokenDistribution, still_needed

NUM_COMPARED = 4
"""Most likely tokens among which a second choice is looked for."""


class ModelDrafter:
    """Draws from a causal LM with the target's sampling parameters and noise.

    A proposal ends with the first of `eos_token_ids`.
    """

    kind = "model"
    needs_model = True

    def __init__(self, model: Model, eos_token_ids: Sequence[int]) -> None:
        self.info = DrafterInfo(
            self.kind, self.kind, model.info, max_proposals_ahead=MAX_STAGED_ROUNDS
        )
        self.max_length = model.info.context_length
        self._model, self._eos = model, frozenset(eos_token_ids)

    def open(self, open_: DraftOpen) -> ModelSession:
        return ModelSession(self._model, self._eos, open_)


class ModelSession:
    """A sequence, and a slot that caches its first `cached` tokens."""

    def __init__(self, model: Model, eos: frozenset[int], open_: DraftOpen) -> None:
        self.token_ids = list(open_.token_ids)
        self._open, self._eos = open_, eos
        self._context_length, self._cache = model.info.context_length, model.cache
        self._slot, self.cached = model.cache.acquire(open_.token_ids)
        self.num_candidates = 0
        """If not 0, drafts come with distributions over as many most likely tokens, unless the
        session has its own."""

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        del self.token_ids[keep_length:]
        self.token_ids.extend(append_token_ids)
        self.cached = min(self.cached, keep_length)

    def learn(self, top: TopTokens) -> None: ...

    def propose(
        self, max_tokens: int, min_confidence: float = 0.0, num_scored: int = 0
    ) -> Drafting:
        """Propose in one step per token, with none after the last."""
        if num_scored:
            yield from self.score(num_scored)
        tokens = self.token_ids
        left = min(max_tokens, self._context_length - len(tokens))
        while left > 0:
            drawn = yield from self.extend(max_tokens=left, min_confidence=min_confidence)
            tokens += drawn.token_ids
            yield drawn
            min_confidence = still_needed(min_confidence, drawn.confidences)
            done = tokens[-1] in self._eos or min_confidence > 1
            left = 0 if done else left - len(drawn.token_ids)

    def score(self, count: int) -> Drafting:
        """Draw the last `count` tokens of the sequence (not its first) again and compare."""
        tokens, open_ = self.token_ids, self._open
        count = min(count, len(tokens) - 1)
        if not count:  # a step without logits would never end
            return
        start = min(self.cached, len(tokens) - 1 - count)
        step = Step(self._slot, start, tokens[start:-1], count)
        history = self._history(tokens[: len(tokens) - count])
        drawn = yield Draw(step, open_.sampling, open_.seed, history)
        self.cached = len(tokens) - 1
        behind = tokens[len(tokens) - count :]
        yield Scored([own == token for own, token in zip(drawn.token_ids, behind, strict=True)])

    def foresee(self, num_proposed: int) -> Generator[Draw, Drafted, Foresight]:
        """Read it from the rows of the proposal, which one step runs again.

        A second choice is the likeliest other token under the processed distribution, regardless of
        the noise.
        """
        tokens, open_ = self.token_ids, self._open
        first = max(1, len(tokens) - num_proposed)
        start = min(self.cached, first - 1)
        step = Step(self._slot, start, tokens[start:], len(tokens) - first + 1)
        drawn = yield Draw(
            step, open_.sampling, open_.seed, self._history(tokens[:first]),
            DistributionSpec(NUM_COMPARED),
        )  # fmt: skip
        self.cached = len(tokens)
        reached, choices = 1.0, []
        rows = zip(drawn.token_ids, drawn.distributions, strict=False)
        for position, (own, distribution) in enumerate(rows, first):
            chances = _probabilities(distribution)
            others = {t: c for t, c in chances.items() if t != own and t not in self._eos}
            if others:
                second = max(others, key=others.__getitem__)
                choices.append(SecondChoice(position, second, reached * others[second]))
            reached *= chances.get(own, 0.0)
        guess = drawn.token_ids[-1]
        ended = not self._eos.isdisjoint((*tokens[first:], guess))
        choices.sort(key=lambda choice: -choice.chance)
        return Foresight(None if ended else guess, reached, choices)

    def extend(
        self, guess: Sequence[int] = (), max_tokens: int = 1, min_confidence: float = 0.0
    ) -> Generator[Draw, Drafted, Drafted]:
        """Cache the sequence and then `guess`; yields the draw that does so.

        Returns the model's own token after the sequence and after each guessed one, with their
        distributions if the session sends them; without a guess perhaps more, up to `max_tokens`
        and the end of the text. Guessed tokens, and all drawn ones but the last, count as cached:
        lower `cached` if they are not accepted.
        """
        tokens, open_ = self.token_ids, self._open
        start = min(self.cached, len(tokens) - 1)
        step = Step(self._slot, start, [*tokens[start:], *guess], 1 + len(guess))
        drawn = yield Draw(
            step, open_.sampling, open_.seed, self._history(tokens), self._distribution,
            max_tokens, self._eos, min_confidence, confidences=True,
        )  # fmt: skip
        self.cached = start + len(step.token_ids) + len(drawn.token_ids) - step.num_logits
        return drawn

    @property
    def _distribution(self) -> DistributionSpec | None:
        candidates = DistributionSpec(self.num_candidates) if self.num_candidates else None
        return self._open.distribution or candidates

    def _history(self, tokens: Sequence[int]) -> History | None:
        """Return what precedes a row of logits, if sampling depends on it."""
        if not self._open.sampling.needs_history:
            return None
        prompt_length = self._open.prompt_length or len(self._open.token_ids)
        return History(tokens, prompt_length, self._eos)

    def close(self) -> None:
        self._cache.release(self._slot)


def _probabilities(distribution: TokenDistribution) -> dict[int, float]:
    """Return the listed tokens' probabilities."""
    ids = distribution.token_ids
    logs = unpack(f"<{len(ids)}e", distribution.log_probs)
    return dict(zip(ids, map(exp, logs), strict=True))

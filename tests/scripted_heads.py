"""Draft heads of a few lines, which hold their callers to the interface.

What a head holds is the tokens that it was told and, for each position, the hidden rows that came
with them. It checks that a row is the right one wherever it knows what that must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flyspec.engine.draft_heads.base import HeadStep
from flyspec.engine.model import Draw, Step, ends_after
from flyspec.values.tokens import Drafted, Origin, TokenDistribution

Guess = Callable[[Sequence[int]], int]
Expected = Callable[[Sequence[int], tuple[int, ...]], Sequence[torch.Tensor]]
CHANCE = 0.9


class ScriptedHead:
    """A `DraftHead` that drafts by a function of the tokens; `steps` are all that it was given.

    `expected` returns, for tokens and layers, the target's rows at each of the tokens; a sequence
    begins with `first`, which no head is told. Positions before a late start are missing: their
    tokens are None.
    """

    kind, num_parameters = "scripted", 7

    def __init__(
        self,
        guess: Guess,
        max_tokens: int = 5,
        hidden_layers: tuple[int, ...] = (0, -1),
        expected: Expected | None = None,
        fails: Callable[[HeadStep], bool] = lambda step: False,
        first: int = 0,
    ) -> None:
        self.guess, self.max_tokens, self.hidden_layers = guess, max_tokens, hidden_layers
        self.fingerprint = f"{id(self) % 2**32:032x}"
        self.expected, self.fails, self.first = expected, fails, first
        self.steps: list[HeadStep] = []
        self.batches: list[int] = []
        self._tokens: dict[int, list[int | None]] = {}

    def held(self, slot: int) -> int:
        return max(0, len(self._tokens.get(slot, [])) - 1)

    def forget(self, slot: int) -> None:
        self._tokens.pop(slot, None)

    def draft(self, steps: Sequence[HeadStep]) -> list[Drafted]:
        assert len({step.slot for step in steps}) == len(steps)
        self.batches.append(len(steps))
        return [self._draft(step) for step in steps]

    def _draft(self, step: HeadStep) -> Drafted:
        if self.fails(step):
            raise RuntimeError("the test makes the head fail")
        self.steps.append(step)
        count = len(step.token_ids)
        assert count >= 1
        assert len(step.hidden) == len(self.hidden_layers)
        assert all(len(rows) == count for rows in step.hidden)
        assert all(bool(torch.isfinite(rows).all()) for rows in step.hidden)
        tokens = self._tokens.setdefault(step.slot, [None])
        del tokens[step.start + 1 :]
        tokens += [None] * (step.start + 1 - len(tokens))
        tokens += step.token_ids
        self._check(step, tokens)
        return self._continue(step, tokens)

    def _check(self, step: HeadStep, tokens: list[int | None]) -> None:
        read = [token for token in (self.first, *tokens[1:-1]) if token is not None]
        if self.expected is None or len(read) < len(tokens) - 1:
            return
        wanted = self.expected(read, self.hidden_layers)
        for rows, own in zip(step.hidden, wanted, strict=True):
            torch.testing.assert_close(rows, own[step.start :], rtol=0, atol=1e-9)

    def _continue(self, step: HeadStep, tokens: list[int | None]) -> Drafted:
        text = [token for token in (self.first, *tokens[1:]) if token is not None]
        if not step.max_tokens:
            return Drafted([])
        drafts: list[int] = []
        while len(drafts) < step.max_tokens:
            drafts.append(self.guess([*text, *drafts]))
        chances = [CHANCE] * len(drafts)
        draw = Draw(
            Step(0, 0, [0]),
            stop_token_ids=step.stop_token_ids,
            min_confidence=step.min_confidence,
        )
        count = ends_after(draw, drafts, chances)
        drafts, chances = drafts[:count], chances[:count]
        # An empty distribution puts all probability on the token.
        sent = [TokenDistribution()] * (count if step.distribution else 0)
        return Drafted(drafts, [Origin.EXACT_MODEL] * count, sent, chances)

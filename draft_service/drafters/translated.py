"""Drafts with a model whose tokenizer is not the target's: translated here, through text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draft_service.drafters.base import Drafter, Drafting
from draft_service.translation import Alignment
from flyspec.engine.model import Draw
from flyspec.values.rounds import DraftOpen
from flyspec.values.tokens import Drafted, SamplingParams, TokenDistribution

DRAFTS_PER_TOKEN = 8
"""Most draft tokens drawn for a target's token; English has 4 to 5 bytes a token."""
SPARE_DRAFTS = 8


class TranslatedSession:
    """A target's sequence, and a session of the drafter that holds it in the draft's ids.

    `alignment` is of the sequence of `open_`. To make it is work that a long prompt makes long, for
    any thread. Raises as `Drafter.open` does.

    The drafter says what it takes for most likely, whatever the request's sampling: noise keyed by
    token does not reach across tokenizers, and without it a drawn token agrees with the target's
    less often than the likeliest. Penalties, biases and a least length are about the target's
    tokens, so the drafter goes without.
    """

    def __init__(self, drafter: Drafter, alignment: Alignment, open_: DraftOpen) -> None:
        self._alignment = alignment
        self._most = drafter.max_length // 2
        self._distributions = open_.distribution is not None
        alignment.sync(0)
        self._session = drafter.open(
            replace(
                open_,
                token_ids=alignment.draft_ids,
                sampling=SamplingParams(),
                prompt_length=0,
                distribution=None,
                tokenizer_fingerprint="",
            )
        )

    @property
    def token_ids(self) -> Sequence[int]:
        """The target's sequence with the last proposal."""
        return self._alignment.token_ids

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        """Truncate, then append; the drafter follows with its next proposal."""
        self._alignment.move(keep_length, append_token_ids)

    def propose(
        self, max_tokens: int, min_confidence: float = 0.0, num_scored: int = 0
    ) -> Drafting:
        """Draft until the text is enough for `max_tokens` of the target's tokens, within bounds.

        Neither the draft's probabilities nor its agreement are about the target's tokens.
        """
        if max_tokens <= 0:
            return
        alignment = self._alignment
        count = min(DRAFTS_PER_TOKEN * max_tokens + SPARE_DRAFTS, self._most)
        self._session.move(*alignment.sync(count))
        if not alignment.ready:
            return
        work = self._session.propose(count)
        left = max_tokens
        drawn: Drafted | None = None
        try:
            while left and not alignment.stopped:
                try:
                    item = next(work) if drawn is None else work.send(drawn)
                except StopIteration:
                    alignment.stop()
                else:
                    drawn = None
                    if isinstance(item, Draw):
                        # One by one: how many of its tokens are enough shows as they come.
                        drawn = yield item._replace(max_tokens=1)
                        continue
                    assert isinstance(item, Drafted)
                    alignment.feed(item.token_ids, item.origins)
                token_ids, origins = alignment.take(left)
                if token_ids:
                    # The draft's probabilities are not about these tokens: a point mass.
                    certain = [TokenDistribution()] * (len(token_ids) * self._distributions)
                    yield Drafted(token_ids, origins, certain)
                    left -= len(token_ids)
        finally:
            work.close()

    def close(self) -> None:
        """Close the drafter's session."""
        self._session.close()

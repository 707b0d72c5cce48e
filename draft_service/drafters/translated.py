"""Drafts with a model whose tokenizer is not the target's, translating through text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draft_service.drafters.base import Drafter, Drafting
from draft_service.translation import Alignment
from flyspec.engine.model import Draw
from flyspec.values.rounds import DraftOpen, TopTokens
from flyspec.values.tokens import Drafted, SamplingParams, TokenDistribution

DRAFTS_PER_TOKEN = 8
"""Maximum draft tokens drawn per target token; English has 4 to 5 bytes per token."""
SPARE_DRAFTS = 8


class TranslatedSession:
    """A target's sequence, and a drafter session that holds it in the draft's ids.

    `alignment` is that of the sequence of `open_`. Creating it takes long for a long prompt and may
    be done in any thread. Raises as `Drafter.open` does.

    The drafter is greedy, regardless of the request's sampling: noise keyed by token does not carry
    over to another tokenizer, and without it a drawn token agrees with the target's less often than
    the most likely one. Penalties, biases and minimum lengths apply to the target's tokens, so the
    drafter ignores them.
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
                sharing_scope="",
            )
        )

    @property
    def token_ids(self) -> Sequence[int]:
        return self._alignment.token_ids

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        self._alignment.move(keep_length, append_token_ids)

    def learn(self, top: TopTokens) -> None: ...

    def propose(
        self, max_tokens: int, min_confidence: float = 0.0, num_scored: int = 0
    ) -> Drafting:
        """Draft until the text is enough for `max_tokens` target tokens, within limits.

        Does not use confidences or score: the draft's probabilities do not apply to target tokens.
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
                        # One at a time, since only the text shows how many are enough.
                        drawn = yield item._replace(max_tokens=1)
                        continue
                    assert isinstance(item, Drafted)
                    alignment.feed(item.token_ids, item.origins)
                token_ids, origins = alignment.take(left)
                if token_ids:
                    # The draft's probabilities do not apply to these tokens: send a point mass.
                    certain = [TokenDistribution()] * (len(token_ids) * self._distributions)
                    yield Drafted(token_ids, origins, certain)
                    left -= len(token_ids)
        finally:
            work.close()

    def close(self) -> None:
        self._session.close()

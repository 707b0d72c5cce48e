"""Checks of a draft session's requests; ids that the draft model lacks are replaced.

Every check raises `InvalidArgumentError` with what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draft_service.drafters.base import Drafter
from draft_service.translation import Translator
from flyspec.config import DraftSettings
from flyspec.draft_trees import check_parents
from flyspec.errors import InvalidArgumentError
from flyspec.ranges import Range
from flyspec.rules import MAX_DIVERGENCE_TOP_K
from flyspec.validation import validate_sampling
from flyspec.values.rounds import (
    MAX_SCOPE_CHARACTERS,
    MAX_SCORED,
    MAX_TOP_TOKENS,
    DraftAdvance,
    DraftOpen,
    TopTokens,
)

MAX_TRANSLATED_LENGTH = 1 << 20
"""Maximum target tokens of a translated session; the drafter holds the end of the sequence."""

ANY_IDS = 1 << 32
"""The vocabulary size of a drafter without a model: ids have 32 bits."""


class RequestChecks:
    """The checks of one session.

    `named_tokenizer`: the session was opened with the draft model's own tokenizer, but the target's
    output layer may have more rows.
    """

    def __init__(
        self,
        drafter: Drafter,
        settings: DraftSettings,
        translator: Translator | None,
        named_tokenizer: bool,
    ) -> None:
        self._drafter, self._settings = drafter, settings
        self._max_length = drafter.max_length
        self._vocab_size, self._speaker = ANY_IDS, "draft model"
        if model := drafter.info.model:
            self._vocab_size = model.vocab_size
        if translator:
            self._max_length = MAX_TRANSLATED_LENGTH
            self._vocab_size, self._speaker = translator.target.vocab_size, "target"
        self._fits = named_tokenizer and translator is None
        self.max_proposals_ahead = 0 if translator else drafter.info.max_proposals_ahead

    def opened(self, open_: DraftOpen) -> DraftOpen:
        """Check how a session is opened; return it with ids that the draft model has."""
        open_ = self._fit_open(open_)
        self._check_open(open_)
        return open_

    def advanced(self, advance: DraftAdvance) -> DraftAdvance:
        """Check a request; return it with ids that the draft model has."""
        limit = self._settings.max_speculative_tokens
        if advance.max_tokens > limit:
            raise InvalidArgumentError(
                f"advance.max_tokens is {advance.max_tokens}, but this service proposes at most "
                f"{limit}; request fewer or raise --max-speculative-tokens"
            )
        if advance.max_tree_tokens and not advance.max_tokens <= advance.max_tree_tokens <= limit:
            raise InvalidArgumentError(
                f"advance.max_tree_tokens must be 0 or between max_tokens, {advance.max_tokens}, "
                f"and {limit}, got {advance.max_tree_tokens}"
            )
        Range(0.0, 1.0).check("advance.min_confidence", advance.min_confidence)
        if advance.score and len(advance.append_token_ids) > MAX_SCORED:
            raise InvalidArgumentError(
                f"advance.score: {len(advance.append_token_ids)} tokens are appended, but this "
                f"service scores at most {MAX_SCORED}; leave score unset"
            )
        advance = replace(advance, append_token_ids=self._fit_ids(advance.append_token_ids))
        self._check_ids("advance.append_token_ids", advance.append_token_ids)
        if advance.top_tokens:
            advance = replace(advance, top_tokens=self._fit_top_tokens(advance.top_tokens))
        length = advance.keep_length + len(advance.append_token_ids)
        if length > self._max_length:
            raise InvalidArgumentError(
                f"advance: {length} tokens kept and appended, but the drafter "
                f"{self._drafter.info.name} holds at most {self._max_length}; use another drafter "
                "for the rest"
            )
        self._check_ahead(advance)
        return advance

    def _check_ahead(self, advance: DraftAdvance) -> None:
        if (ahead := advance.ahead) is None:
            return
        most, limit = self.max_proposals_ahead, self._settings.max_speculative_tokens
        if ahead.num_proposals > most:
            raise InvalidArgumentError(
                f"advance.ahead.num_proposals is {ahead.num_proposals}, but the drafter "
                f"{self._drafter.info.name} makes at most {most} in this session; request fewer"
            )
        if ahead.max_tokens > limit:
            raise InvalidArgumentError(
                f"advance.ahead.max_tokens is {ahead.max_tokens}, but this service proposes at "
                f"most {limit}; request fewer or raise --max-speculative-tokens"
            )
        if ahead.num_unverified > len(advance.append_token_ids):
            raise InvalidArgumentError(
                f"advance.ahead.num_unverified is {ahead.num_unverified}, but "
                f"{len(advance.append_token_ids)} tokens are appended; append the whole proposal"
            )
        if ahead.unverified_ahead_id and not ahead.num_unverified:
            raise InvalidArgumentError(
                "advance.ahead.unverified_ahead_id: num_unverified is 0; append that proposal and "
                "say how many tokens it has"
            )
        if ahead.num_unverified and advance.max_tokens:
            raise InvalidArgumentError(
                "advance.ahead.num_unverified: there is a proposal already; set advance.max_tokens "
                "to 0"
            )

    def _check_open(self, open_: DraftOpen) -> None:
        length = len(open_.token_ids)
        self._check_ids("open.token_ids", open_.token_ids)
        if not length:
            raise InvalidArgumentError("open.token_ids is empty; send at least one token")
        if length > self._max_length:
            raise InvalidArgumentError(
                f"open.token_ids: {length} tokens, but the drafter {self._drafter.info.name} holds "
                f"at most {self._max_length}; shorten the prompt or use another drafter"
            )
        if len(open_.sharing_scope) > MAX_SCOPE_CHARACTERS:
            raise InvalidArgumentError(
                f"open.sharing_scope must be at most {MAX_SCOPE_CHARACTERS} characters, "
                f"got {len(open_.sharing_scope)}"
            )
        wanted = self._drafter.info.tokenizer_fingerprint
        if wanted and open_.tokenizer_fingerprint not in ("", wanted):
            raise InvalidArgumentError(
                f"open.tokenizer_fingerprint: the drafter {self._drafter.info.name} has a "
                "datastore of another tokenizer; build one with `flyspec datastore build` for this "
                "target, or use another drafter"
            )
        validate_sampling(open_.sampling)
        for token, _ in open_.sampling.logit_bias:
            if token >= self._vocab_size:
                raise InvalidArgumentError(f"open.sampling.logit_bias: {token} {self._not_an_id()}")
        if open_.prompt_length > length:
            raise InvalidArgumentError(
                f"open.prompt_length must be between 0 (all) and {length}, the number of "
                f"token_ids, got {open_.prompt_length}"
            )
        spec = open_.distribution
        if spec is not None and spec.top_k > MAX_DIVERGENCE_TOP_K:
            raise InvalidArgumentError(
                f"open.distribution.top_k must be between 0 (the whole vocabulary) and "
                f"{MAX_DIVERGENCE_TOP_K}, got {spec.top_k}"
            )

    def _check_ids(self, field: str, token_ids: Sequence[int]) -> None:
        size = self._vocab_size
        if max(token_ids, default=0) >= size:
            index = next(i for i, token in enumerate(token_ids) if token >= size)
            raise InvalidArgumentError(f"{field}[{index}]: {token_ids[index]} {self._not_an_id()}")

    def _fit_top_tokens(self, tops: Sequence[TopTokens]) -> Sequence[TopTokens]:
        """Apply `_fit_ids`, and check them. Raises `InvalidArgumentError`."""
        if len(tops) > MAX_TOP_TOKENS:
            raise InvalidArgumentError(
                f"advance.top_tokens: at most {MAX_TOP_TOKENS} rounds, got {len(tops)}"
            )
        fitted = []
        for index, top in enumerate(tops):
            name = f"advance.top_tokens[{index}]"
            if not 1 <= top.width <= MAX_TOP_TOKENS:
                raise InvalidArgumentError(
                    f"{name}: {len(top.token_ids)} token_ids for {len(top.context_token_ids)} "
                    "context_token_ids; send equally many, 1 to "
                    f"{MAX_TOP_TOKENS}, for each context token after the first"
                )
            check_parents(f"{name}.parents", top.parents, len(top.context_token_ids) - 2)
            contexts, likely = map(self._fit_ids, (top.context_token_ids, top.token_ids))
            top = TopTokens(contexts, likely, top.parents)
            self._check_ids(f"{name}.context_token_ids", top.context_token_ids)
            self._check_ids(f"{name}.token_ids", top.token_ids)
            fitted.append(top)
        return fitted

    def _not_an_id(self) -> str:
        return (
            f"is not below the {self._speaker}'s vocabulary size {self._vocab_size}; send ids "
            f"from the {self._speaker}'s own tokenizer"
        )

    def _fit_open(self, open_: DraftOpen) -> DraftOpen:
        """Apply `_fit_ids`, and drop biases of ids that the draft model does not have."""
        size = self._vocab_size
        if not self._fits:
            return open_
        biases = tuple(bias for bias in open_.sampling.logit_bias if bias[0] < size)
        return replace(
            open_,
            token_ids=self._fit_ids(open_.token_ids),
            sampling=replace(open_.sampling, logit_bias=biases),
        )

    def _fit_ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return ids within the draft model's vocabulary, if the session names its tokenizer.

        The tokenizer's table may be padded to more rows in the target than in the draft model.
        Padding rows stand for no text and are replaced by the draft model's last row.
        """
        size = self._vocab_size
        if not self._fits or max(token_ids, default=0) < size:
            return token_ids
        return [min(token, size - 1) for token in token_ids]

"""Sessions on the event loop: admission, request checks, proposals.

Work that needs the model is queued to the engine; long sequences are read in another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from draft_service.ahead import Branches
from draft_service.drafters.base import Drafter
from draft_service.drafters.translated import TranslatedSession
from draft_service.engine import Engine
from draft_service.proposal import SessionState, propose
from draft_service.tokenizers import Tokenizers
from draft_service.translation import Alignment, Translator
from flyspec import process
from flyspec.config import DraftSettings
from flyspec.draft_trees import check_parents
from flyspec.engine.cache_table import CacheTable
from flyspec.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from flyspec.rules import MAX_DIVERGENCE_TOP_K
from flyspec.validation import validate_sampling
from flyspec.values.admin import DraftServiceInfo
from flyspec.values.rounds import (
    MAX_SCOPE_CHARACTERS,
    MAX_SCORED,
    MAX_TOP_TOKENS,
    DraftAdvance,
    DraftChunk,
    DraftOpen,
    TopTokens,
)
from flyspec.values.sessions import SessionStatus

MAX_TRANSLATED_LENGTH = 1 << 20
"""Maximum target tokens of a translated session; the drafter holds the end of the sequence."""

ANY_IDS = 1 << 32
"""The vocabulary size of a drafter without a model: ids have 32 bits."""
LONG_SEQUENCE = 4096
"""Tokens of a sequence that take milliseconds to index, without a model."""


class Sessions:
    """A service's drafters and their open sessions. The first drafter is the default.

    `max_length` is the longest sequence that any of them holds, in tokens. `engine` runs the
    drafters that need a model (None: no model). `tokenizers` are targets' tokenizers that a session
    can use instead of the draft model's own.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        engine: Engine | None,
        settings: DraftSettings,
        tokenizers: Tokenizers | None = None,
    ) -> None:
        self._drafters = {d.info.name: d for d in drafters}
        self._default = drafters[0].info.name
        self._engine = engine
        self.settings = settings
        self.tokenizers = tokenizers or Tokenizers()
        self.max_length = max(
            MAX_TRANSLATED_LENGTH if d.info.model else d.max_length for d in drafters
        )
        self._active = self._opened_total = 0

    @property
    def cache(self) -> CacheTable | None:
        """The KV cache of the draft model; None without one."""
        return self._engine.model.cache if self._engine else None

    def describe(self) -> DraftServiceInfo:
        return DraftServiceInfo(
            drafters=tuple(d.info for d in self._drafters.values()),
            sessions=SessionStatus(self._active, self.settings.max_sessions, self._opened_total),
            max_speculative_tokens=self.settings.max_speculative_tokens,
            process=process.describe(self._engine.step_running_ns if self._engine else 0),
            tokenizer_fingerprints=self.tokenizers.fingerprints,
        )

    @contextmanager
    def open(self, open_: DraftOpen) -> Iterator[ClientSession]:
        """Open a session, closed at the end of the block.

        Raises `NotFoundError`, `InvalidArgumentError`, `ResourceExhaustedError`, or
        `PrefixMismatchError` for an unknown tokenizer.
        """
        drafter = self._drafters.get(open_.drafter or self._default)
        if drafter is None:
            raise NotFoundError(
                f"open.drafter: no drafter {open_.drafter!r}; "
                f"this service has {', '.join(self._drafters)}"
            )
        translator = self._translator(drafter, open_.tokenizer_fingerprint)
        session = ClientSession(
            drafter, open_, self._engine, self.settings, translator, self._may_branch
        )
        if self._active >= self.settings.max_sessions:
            raise ResourceExhaustedError(
                f"all {self.settings.max_sessions} sessions are in use; "
                "retry later or raise --max-sessions"
            )
        self._active += 1
        self._opened_total += 1
        try:
            yield session
        finally:
            self._active -= 1
            session.close()

    def _may_branch(self) -> bool:
        """Whether a slot is free besides those of all sessions that may still be opened."""
        cache = self.cache
        spare = cache.num_free if cache else 0
        return spare > self.settings.max_sessions - self._active

    def _translator(self, drafter: Drafter, fingerprint: str) -> Translator | None:
        model = drafter.info.model
        if model is None or fingerprint in ("", model.tokenizer_fingerprint):
            return None
        return self.tokenizers.translator(fingerprint)


class ClientSession:
    """One client's session: `prepare`, then per proposal `move` and `next_chunk` until the last.

    Raises `InvalidArgumentError` for a sequence that the drafter cannot hold.
    """

    def __init__(
        self,
        drafter: Drafter,
        open_: DraftOpen,
        engine: Engine | None,
        settings: DraftSettings,
        translator: Translator | None = None,
        may_branch: Callable[[], bool] = lambda: False,
    ) -> None:
        self.drafter, self._translator, self._settings = drafter, translator, settings
        self._engine = engine if drafter.needs_model else None
        model = drafter.info.model
        self._max_length = drafter.max_length
        self._vocab_size, self._speaker = ANY_IDS, "draft model"
        if model:
            self._vocab_size = model.vocab_size
        if translator:
            self._max_length = MAX_TRANSLATED_LENGTH
            self._vocab_size, self._speaker = translator.target.vocab_size, "target"
        # The tokenizer is the same, but the target's output layer may have more rows.
        self._fits = bool(open_.tokenizer_fingerprint) and translator is None
        self._open = open_ = self._fit_open(open_)
        self._check_open(open_)
        self._state = SessionState(partial(drafter.open, open_))
        self._chunks: asyncio.Queue[DraftChunk | Exception | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._branches: Branches | None = None
        if self._engine is not None and self._max_proposals_ahead:
            self._branches = Branches(
                drafter, open_, self._state, self._engine.add, may_branch, self._deliver_end
            )

    @property
    def _max_proposals_ahead(self) -> int:
        return 0 if self._translator else self.drafter.info.max_proposals_ahead

    async def prepare(self) -> None:
        """Read the sequence, in a thread if that takes long, so as not to delay others."""
        drafter, open_ = self.drafter, self._open
        if self._translator:
            alignment = await asyncio.to_thread(
                Alignment, self._translator, open_.token_ids, drafter.max_length
            )
            self._state = SessionState(partial(TranslatedSession, drafter, alignment, open_))
        elif self._engine is None and len(open_.token_ids) > LONG_SEQUENCE:
            await asyncio.to_thread(self._state.session)

    async def move(self, advance: DraftAdvance, arrival_ns: int) -> None:
        """Call `advance`, in a thread if it goes far back or appends much."""
        if self._engine is None:
            held = len(self._state.session().token_ids)
            if max(held - advance.keep_length, len(advance.append_token_ids)) > LONG_SEQUENCE:
                await asyncio.to_thread(self.advance, advance, arrival_ns)
                return
        self.advance(advance, arrival_ns)

    def advance(self, advance: DraftAdvance, arrival_ns: int) -> None:
        """Start a proposal after the previous one has ended. Raises `InvalidArgumentError`."""
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
        if not 0 <= advance.min_confidence <= 1:  # NaN too
            raise InvalidArgumentError(
                f"advance.min_confidence must be between 0 and 1, got {advance.min_confidence:g}"
            )
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
                f"{self.drafter.info.name} holds at most {self._max_length}; use another drafter "
                "for the rest"
            )
        self._check_ahead(advance)
        chunk_tokens, self._state.interrupted = self._settings.chunk_tokens, False
        work = propose(
            self._state, advance, chunk_tokens, arrival_ns, self._deliver, self._branches
        )
        if self._engine is None:
            for _ in work:
                raise AssertionError("a drafter without a model requested a step")
        else:
            self._engine.add(self._state, work, self._deliver)

    def interrupt(self) -> None:
        """End the current proposal after the current token."""
        self._state.interrupted = True
        if self._engine is not None:
            self._engine.nudge()

    async def next_chunk(self) -> DraftChunk:
        """Return the next chunk of the proposal, or raise the error that ended it."""
        chunk = await self._next()
        assert chunk is not None
        return chunk

    async def next_ahead(self) -> DraftChunk | None:
        """Return the next chunk of a proposal made ahead; None once there will be no more."""
        return await self._next() if self._branches is not None else None

    async def _next(self) -> DraftChunk | None:
        item = await self._chunks.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Close the session; its slots are free within one step."""
        if self._engine is None:
            self._state.close()
        else:
            self._engine.drop(self._state, self._close)

    def _close(self) -> None:
        """Close it in the engine's thread, and its branches, before the next step."""
        engine, branches = self._engine, self._branches
        assert engine is not None
        for chain in branches.apart if branches else ():
            engine.drop(chain, chain.close)
        self._state.close()

    def _deliver_end(self) -> None:
        self._deliver(None)

    def _deliver(self, item: DraftChunk | Exception | None) -> None:
        """Queue a chunk or an error, from any thread; None after what was made ahead."""
        # The event loop may already be closed during shutdown.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, item)

    def _check_ahead(self, advance: DraftAdvance) -> None:
        if (ahead := advance.ahead) is None:
            return
        most, limit = self._max_proposals_ahead, self._settings.max_speculative_tokens
        if ahead.num_proposals > most:
            raise InvalidArgumentError(
                f"advance.ahead.num_proposals is {ahead.num_proposals}, but the drafter "
                f"{self.drafter.info.name} makes at most {most} in this session; request fewer"
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
                f"open.token_ids: {length} tokens, but the drafter {self.drafter.info.name} holds "
                f"at most {self._max_length}; shorten the prompt or use another drafter"
            )
        if len(open_.sharing_scope) > MAX_SCOPE_CHARACTERS:
            raise InvalidArgumentError(
                f"open.sharing_scope must be at most {MAX_SCOPE_CHARACTERS} characters, "
                f"got {len(open_.sharing_scope)}"
            )
        wanted = self.drafter.info.tokenizer_fingerprint
        if wanted and open_.tokenizer_fingerprint not in ("", wanted):
            raise InvalidArgumentError(
                f"open.tokenizer_fingerprint: the drafter {self.drafter.info.name} has a datastore "
                "of another tokenizer; build one with `flyspec datastore build` for this target, "
                "or use another drafter"
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

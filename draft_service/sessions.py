"""Sessions on the event loop: admission, proposals.

Work that needs the model is queued to the engine; long sequences are read in another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from draft_service.drafters.base import Drafter
from draft_service.drafters.translated import TranslatedSession
from draft_service.proposal import Branches, SessionState, propose
from draft_service.request_checks import MAX_TRANSLATED_LENGTH, RequestChecks
from draft_service.tokenizers import Tokenizers
from draft_service.translation import Alignment, Translator
from flyspec import process
from flyspec.config import DraftSettings
from flyspec.engine.cache_table import CacheTable
from flyspec.engine.loop import StepLoop
from flyspec.engine.model import Draw
from flyspec.errors import NotFoundError, ResourceExhaustedError
from flyspec.values.admin import DraftServiceInfo
from flyspec.values.rounds import (
    DraftAdvance,
    DraftChunk,
    DraftOpen,
    SessionStatus,
)
from flyspec.values.tokens import Drafted

LONG_SEQUENCE = 4096
"""Tokens of a sequence that take milliseconds to index, without a model."""


class Engine(StepLoop[Drafted]):
    """Runs proposals (`draft_service.proposal`) on a model; session states own them."""

    service = "draft"

    def run_batch(self, wants: Sequence[Draw]) -> Sequence[Drafted]:
        return self.model.draw(wants, self.arrival)

    def steps_of(self, want: Draw, result: Drafted) -> int:
        """Return one step, plus one per token drawn after those of the first step's rows."""
        return 1 + len(result.token_ids) - want.step.num_logits


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
        """True if a slot is free besides those of all sessions that may still be opened."""
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
        named_tokenizer = bool(open_.tokenizer_fingerprint)
        self._checks = RequestChecks(drafter, settings, translator, named_tokenizer)
        self._open = open_ = self._checks.opened(open_)
        self._state = SessionState(partial(drafter.open, open_))
        self._chunks: asyncio.Queue[DraftChunk | Exception | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._limit: asyncio.TimerHandle | None = None
        self._branches: Branches | None = None
        if self._engine is not None and self._checks.max_proposals_ahead:
            ended = partial(self._deliver, None)
            self._branches = Branches(
                drafter, open_, self._state, self._engine.add, may_branch, ended
            )

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
        advance = self._checks.advanced(advance)
        state, chunk_tokens = self._state, self._settings.chunk_tokens
        state.interrupted = state.overdue = False
        work = propose(state, advance, chunk_tokens, arrival_ns, self._deliver, self._branches)
        if self._engine is None:
            for _ in work:
                raise AssertionError("a drafter without a model requested a step")
        else:
            self._engine.add(state, work, self._deliver)
            if advance.time_limit_ms:
                self._limit = self._loop.call_later(advance.time_limit_ms / 1000, self._expire)

    def _expire(self) -> None:
        """End the current proposal after the current token, if it has any."""
        assert self._engine is not None
        self._state.overdue = True
        self._engine.nudge()

    def interrupt(self) -> None:
        """End the current proposal after the current token."""
        self._state.interrupted = True
        if self._engine is not None:
            self._engine.nudge()

    async def next_chunk(self) -> DraftChunk:
        """Return the next chunk of the proposal, or raise the error that ended it."""
        chunk = await self._next()
        assert chunk is not None
        if chunk.last:
            self._forget_limit()
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
        self._forget_limit()
        if self._engine is None:
            self._state.close()
        else:
            self._engine.drop(self._state, self._close)

    def _forget_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    def _close(self) -> None:
        """Close it in the engine's thread, and its branches, before the next step."""
        engine, branches = self._engine, self._branches
        assert engine is not None
        for chain in branches.apart if branches else ():
            engine.drop(chain, chain.close)
        self._state.close()

    def _deliver(self, item: DraftChunk | Exception | None) -> None:
        """Queue a chunk or an error, from any thread; None after what was made ahead."""
        # The event loop may already be closed during shutdown.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, item)

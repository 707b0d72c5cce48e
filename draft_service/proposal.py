"""One proposal: drives a drafter's work and splits its output into chunks.

Runs in the engine's thread for drafters with a model, otherwise in the thread of the caller. Uses
no threads, no gRPC and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import perf_counter_ns
from typing import NamedTuple, Protocol

from draft_service.drafters.base import (
    DrafterSession,
    Drafting,
    Scored,
    TreeSession,
    check_move,
)
from flyspec.engine.loop import Ran, Work
from flyspec.engine.model import Draw
from flyspec.values.rounds import DraftAdvance, DraftAhead, DraftChunk, DraftTimings
from flyspec.values.tokens import Drafted, Origin, TokenDistribution, still_needed

MAX_CHUNK_BYTES = 1 << 20
"""Maximum bytes of distributions in a chunk of several tokens. A single distribution is smaller for
any current vocabulary (half a megabyte at 262,144 tokens)."""

MAX_TOKENS = 1 << 30
"""No limit on the tokens of a chunk."""

Deliver = Callable[[DraftChunk | Exception], None]


class Taken(NamedTuple):
    """A session's sequence has `length` tokens now, and then those that were `made` ahead.

    `ended`: there can be no more of those.
    """

    length: int
    made: Drafted = Drafted([])
    ended: bool = False


class AheadIds(NamedTuple):
    """A proposal made ahead, and the one that it follows, as in `DraftChunk`; 0: none."""

    ahead_id: int = 0
    follows_ahead_id: int = 0


NOT_AHEAD = AheadIds()


class Ahead(Protocol):
    """A session's drafts while its proposal is verified (`draft_service.ahead`)."""

    def take_over(self, advance: DraftAdvance) -> Taken:
        """Move the session, to what has been drafted ahead where that fits."""

    def go_on(
        self, round_id: int, ahead: DraftAhead, num_proposed: int, arrival_ns: int, deliver: Deliver
    ) -> Work[Drafted]:
        """Draft ahead of the verdict on the last `num_proposed` tokens."""


class SessionState:
    """A session's drafter state, opened by its first proposal in the thread that drives it.

    Setting `interrupted`, from any thread, ends a proposal with the tokens it has; `overdue` ends
    it once it has any.
    """

    __slots__ = ("_opener", "current", "interrupted", "overdue")

    def __init__(self, opener: Callable[[], DrafterSession]) -> None:
        self._opener = opener
        self.current: DrafterSession | None = None
        self.interrupted = self.overdue = False

    def session(self) -> DrafterSession:
        """Return the drafter's session. Raises `ResourceExhaustedError` if it cannot be opened."""
        if self.current is None:
            self.current = self._opener()
        return self.current

    def become(self, session: DrafterSession) -> None:
        """Continue with another session of the drafter instead; closes this one."""
        before, self.current = self.current, session
        if before is not None and before is not session:
            before.close()

    def close(self) -> None:
        """Release what the session holds; it may be opened again."""
        session, self.current = self.current, None
        if session is not None:
            session.close()


def propose(
    state: SessionState,
    advance: DraftAdvance,
    chunk_tokens: int,
    arrival_ns: int,
    deliver: Deliver,
    ahead: Ahead | None = None,
) -> Work[Drafted]:
    """Answer an `advance`: move the session, draft, and deliver the tokens in chunks.

    `deliver` receives every chunk, the last one flagged. A chunk is sent once `chunk_tokens` tokens
    wait in it and another step is due; existing tokens are not split unless their distributions
    exceed `MAX_CHUNK_BYTES`. `arrival_ns` is the `perf_counter_ns` of the request. Then goes on
    with the branches in `ahead`, if requested. Raises `PrefixMismatchError` or
    `InvalidArgumentError` for an impossible move.
    """
    held = len(state.session().token_ids)
    check_move(held, advance.keep_length, len(advance.append_token_ids))
    for top in advance.top_tokens:
        state.session().learn(top)
    if ahead is None:
        state.session().move(advance.keep_length, advance.append_token_ids)
        taken = Taken(len(state.session().token_ids))
    else:
        taken = ahead.take_over(advance)
    session, (begin, made, ended) = state.session(), taken
    chunks = Chunks(advance.round_id, session, deliver, begin)
    queue_ns, model_ns = perf_counter_ns() - arrival_ns, 0
    chunks.add(made)
    needed = still_needed(advance.min_confidence, made.confidences)
    left = 0 if ended or needed > 1 else advance.max_tokens - len(made.token_ids)
    if left > 0 or advance.score:
        num_scored = len(advance.append_token_ids) if advance.score else 0
        if advance.max_tree_tokens and not num_scored and isinstance(session, TreeSession):
            work = session.propose_tree(left, advance.max_tree_tokens, needed)
        else:
            work = session.propose(left, needed, num_scored)
        model_ns = yield from draft(state, work, chunks, chunk_tokens)
    chunks.flush(DraftTimings(queue_ns, model_ns, perf_counter_ns() - arrival_ns))
    state.overdue = False  # what is drafted ahead has no limit
    if ahead is not None and (wanted := advance.ahead):
        num_proposed = wanted.num_unverified or len(session.token_ids) - begin
        yield from ahead.go_on(advance.round_id, wanted, num_proposed, arrival_ns, deliver)


def draft(
    state: SessionState,
    work: Drafting,
    chunks: Chunks,
    chunk_tokens: int = MAX_TOKENS,
    also: Callable[[Drafted], None] = lambda _: None,
) -> Generator[Draw, Ran[Drafted], int]:
    """Run a proposal until it ends, or `state` ends it; return its time in the model, ns.

    Its tokens go to `chunks` as they are made, and to `also`.
    """
    model_ns = 0
    try:
        item = next(work, None)
        while item is not None:
            if isinstance(item, Drafted):
                chunks.add(item)
                also(item)
                item = next(work, None)
                continue
            if isinstance(item, Scored):
                chunks.agreements = item.agreements
                item = next(work, None)
                continue
            if state.interrupted or (state.overdue and chunks.num_tokens):
                break
            if chunks.waiting >= chunk_tokens:
                chunks.flush()
            if item.max_tokens > (room := chunk_tokens - chunks.waiting):
                item = item._replace(max_tokens=room)
            ran = yield item
            model_ns += ran.model_ns
            try:
                item = work.send(ran.result)
            except StopIteration:
                break
    finally:
        work.close()
    return model_ns


class Chunks:
    """The chunks of a proposal that continues the sequence of `session`, or its first `begin`
    tokens; `ahead` if it is made ahead."""

    def __init__(
        self,
        round_id: int,
        session: DrafterSession,
        deliver: Deliver,
        begin: int | None = None,
        ahead: AheadIds = NOT_AHEAD,
    ) -> None:
        self._round_id, self._deliver, self._ahead = round_id, deliver, ahead
        self._base = self._sent = len(session.token_ids) if begin is None else begin
        self._next_token_id = session.token_ids[self._base - 1]
        self.agreements: Sequence[bool] = ()
        self._clear()

    @property
    def waiting(self) -> int:
        return len(self._ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks so far."""
        return self._sent - self._base + self.waiting

    def add(self, drafted: Drafted) -> None:
        """Add tokens to the chunk, flushing it first where their distributions do not fit."""
        token_ids, origins, distributions, confidences, parents = drafted
        self._parents += parents
        if not distributions:
            self._ids += token_ids
            self._origins += origins
            self._confidences += confidences
            return
        for index, distribution in enumerate(distributions):
            # An id takes at most 3 bytes on the wire up to 2,097,152 tokens.
            size = len(distribution.log_probs) + 3 * len(distribution.token_ids)
            if self._ids and self._bytes + size > MAX_CHUNK_BYTES:
                self.flush()
            self._ids.append(token_ids[index])
            self._origins.append(origins[index])
            self._confidences += confidences[index : index + 1]
            self._distributions.append(distribution)
            self._bytes += size

    def flush(self, timings: DraftTimings | None = None) -> None:
        """Send the waiting tokens; with the proposal's timings, as the last chunk."""
        start = self._sent
        self._sent += len(self._ids)
        chunk = DraftChunk(
            round_id=self._round_id,
            keep_length=self._base - 1,
            next_token_id=self._next_token_id,
            start_position=start,
            token_ids=self._ids,
            origins=self._origins,
            last=timings is not None,
            timings=timings or DraftTimings(),
            distributions=self._distributions,
            confidences=self._confidences,
            agreements=self.agreements,
            ahead=self._ahead.ahead_id > 0,
            **self._ahead._asdict(),
            parents=self._parents,
        )
        self.agreements = ()
        self._clear()
        self._deliver(chunk)

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._origins: list[Origin] = []
        self._confidences: list[float] = []
        self._parents: list[int] = []
        self._distributions: list[TokenDistribution] = []
        self._bytes = 0

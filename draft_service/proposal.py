"""One proposal: drives a drafter's work and splits its output into chunks.

Runs in the engine's thread for drafters with a model, otherwise in the thread of the caller. Uses
no threads, no gRPC and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns

from draft_service.drafters.base import DrafterSession, Scored, TreeSession, check_move
from flyspec.engine.loop import Work
from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftTimings
from flyspec.values.tokens import Drafted, Origin, TokenDistribution

MAX_CHUNK_BYTES = 1 << 20
"""Maximum bytes of distributions in a chunk of several tokens. A single distribution is smaller for
any current vocabulary (half a megabyte at 262,144 tokens)."""

Deliver = Callable[[DraftChunk | Exception], None]


class SessionState:
    """A session's drafter state, opened by its first proposal in the thread that drives it.

    Setting `interrupted`, from any thread, ends a proposal with the tokens it has.
    """

    __slots__ = ("_opener", "_session", "interrupted")

    def __init__(self, opener: Callable[[], DrafterSession]) -> None:
        self._opener = opener
        self._session: DrafterSession | None = None
        self.interrupted = False

    def session(self) -> DrafterSession:
        """Return the drafter's session. Raises `ResourceExhaustedError` if it cannot be opened."""
        if self._session is None:
            self._session = self._opener()
        return self._session

    def close(self) -> None:
        """Release what the session holds; it may be opened again."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def propose(
    state: SessionState, advance: DraftAdvance, chunk_tokens: int, arrival_ns: int, deliver: Deliver
) -> Work[Drafted]:
    """Answer an `advance`: move the session, draft, and deliver the tokens in chunks.

    `deliver` receives every chunk, the last one flagged. A chunk is sent once `chunk_tokens` tokens
    wait in it and another step is due; existing tokens are not split unless their distributions
    exceed `MAX_CHUNK_BYTES`. `arrival_ns` is the `perf_counter_ns` of the request. Raises
    `PrefixMismatchError` or `InvalidArgumentError` for an impossible move.
    """
    session = state.session()
    check_move(len(session.token_ids), advance.keep_length, len(advance.append_token_ids))
    for top in advance.top_tokens:
        session.learn(top)
    session.move(advance.keep_length, advance.append_token_ids)
    chunks = _Chunks(advance, session, deliver)
    queue_ns, model_ns = perf_counter_ns() - arrival_ns, 0
    num_scored = len(advance.append_token_ids) if advance.score else 0
    if advance.max_tree_tokens and not num_scored and isinstance(session, TreeSession):
        work = session.propose_tree(
            advance.max_tokens, advance.max_tree_tokens, advance.min_confidence
        )
    else:
        work = session.propose(advance.max_tokens, advance.min_confidence, num_scored)
    try:
        item = next(work, None)
        while item is not None:
            if isinstance(item, Drafted):
                chunks.add(item)
                item = next(work, None)
                continue
            if isinstance(item, Scored):
                chunks.agreements = item.agreements
                item = next(work, None)
                continue
            if state.interrupted:
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
    chunks.flush(DraftTimings(queue_ns, model_ns, perf_counter_ns() - arrival_ns))


class _Chunks:
    """The chunks of a proposal that continues the sequence of `session`."""

    def __init__(self, advance: DraftAdvance, session: DrafterSession, deliver: Deliver) -> None:
        self._round_id, self._deliver = advance.round_id, deliver
        self._base = self._sent = len(session.token_ids)
        self._next_token_id = session.token_ids[-1]
        self.agreements: Sequence[bool] = ()
        self._clear()

    @property
    def waiting(self) -> int:
        return len(self._ids)

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

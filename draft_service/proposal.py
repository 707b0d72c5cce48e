"""One proposal on its way: drives a drafter's work and cuts what comes out into chunks.

Runs in the engine's thread for drafters with a model, on the event loop for those without. Knows no
threads, no gRPC and no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

from draft_service.drafters.base import Drafted, Drafter, DrafterSession, Work, check_move
from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftOpen, DraftTimings
from flyspec.values.tokens import Origin, TokenDistribution

if TYPE_CHECKING:
    from flyspec.engine.runner import Draw, Drawn

MAX_CHUNK_BYTES = 1 << 20
"""Most bytes of distributions in a chunk that has more than one token. A single one is smaller in
any vocabulary of today (half a megabyte at 262,144 tokens)."""

Deliver = Callable[[DraftChunk | Exception], None]


class SessionState:
    """A session's drafter state, opened by its first proposal in the thread that drives it."""

    __slots__ = ("_drafter", "_open", "_session")

    def __init__(self, drafter: Drafter, open_: DraftOpen) -> None:
        self._drafter, self._open = drafter, open_
        self._session: DrafterSession | None = None

    def session(self) -> DrafterSession:
        """The drafter's session. Raises `ResourceExhaustedError` if it cannot be opened."""
        if self._session is None:
            self._session = self._drafter.open(self._open)
        return self._session

    def close(self) -> None:
        """Give back what the session holds; it may be opened again."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


class Proposal:
    """The answer to one `advance`: `start`, then `resume` with what was drawn, to the end.

    `deliver` gets every chunk, the last one flagged. A chunk goes out once `chunk_tokens` tokens
    wait in it and a further step is due; what exists already is not split, unless its distributions
    exceed `MAX_CHUNK_BYTES`. `arrival_ns` is the `perf_counter_ns` of the request; `model_ns` is
    added to by whoever runs the steps.
    """

    __slots__ = (
        "_advance",
        "_arrival_ns",
        "_base",
        "_bytes",
        "_chunk_tokens",
        "_deliver",
        "_distributions",
        "_first_step_ns",
        "_ids",
        "_next_token_id",
        "_origins",
        "_sent",
        "_work",
        "model_ns",
        "state",
    )

    _work: Work

    def __init__(
        self,
        state: SessionState,
        advance: DraftAdvance,
        chunk_tokens: int,
        arrival_ns: int,
        deliver: Deliver,
    ) -> None:
        self.state = state
        self.model_ns = 0
        self._advance, self._chunk_tokens = advance, chunk_tokens
        self._arrival_ns, self._deliver = arrival_ns, deliver
        self._ids: list[int] = []
        self._origins: list[Origin] = []
        self._distributions: list[TokenDistribution] = []
        self._bytes = 0
        self._base = self._sent = self._next_token_id = self._first_step_ns = 0

    def start(self) -> Draw | None:
        """Move the session and ask for the first draw; None if the proposal is already complete.

        Raises `PrefixMismatchError` or `InvalidArgumentError` for a move that cannot be made.
        """
        advance, session = self._advance, self.state.session()
        check_move(len(session.token_ids), advance.keep_length, len(advance.append_token_ids))
        session.move(advance.keep_length, advance.append_token_ids)
        self._base = self._sent = len(session.token_ids)
        self._next_token_id = session.token_ids[-1]
        self._work = session.propose(advance.max_tokens)
        self._first_step_ns = perf_counter_ns()
        return self.resume(None)

    def resume(self, drawn: Drawn | None) -> Draw | None:
        """Hand over what the last draw gave; the next draw, or None when all is delivered.

        None begins.
        """
        work = self._work
        try:
            item = next(work) if drawn is None else work.send(drawn)
            while isinstance(item, Drafted):
                self._add(item)
                item = next(work)
        except StopIteration:
            self._flush(last=True)
            return None
        if len(self._ids) >= self._chunk_tokens:
            self._flush(last=False)
        return item

    def fail(self, error: Exception) -> None:
        """End with an error instead of a last chunk."""
        self._deliver(error)

    def cancel(self) -> None:
        """End without a word; nobody listens any more."""
        self._work.close()

    def _add(self, drafted: Drafted) -> None:
        """Put tokens into the chunk; where their distributions do not fit it goes out before."""
        token_ids, origins, distributions = drafted
        if not distributions:
            self._ids += token_ids
            self._origins += origins
            return
        for token, origin, distribution in zip(token_ids, origins, distributions, strict=True):
            # An id takes at most 3 bytes on the wire up to 2,097,152 tokens.
            size = len(distribution.log_probs) + 3 * len(distribution.token_ids)
            if self._ids and self._bytes + size > MAX_CHUNK_BYTES:
                self._flush(last=False)
            self._ids.append(token)
            self._origins.append(origin)
            self._distributions.append(distribution)
            self._bytes += size

    def _flush(self, last: bool) -> None:
        timings = DraftTimings()
        if last:
            now = perf_counter_ns()
            timings = DraftTimings(
                self._first_step_ns - self._arrival_ns, self.model_ns, now - self._arrival_ns
            )
        start = self._sent
        self._sent += len(self._ids)
        chunk = DraftChunk(
            round_id=self._advance.round_id,
            keep_length=self._base - 1,
            next_token_id=self._next_token_id,
            start_position=start,
            token_ids=self._ids,
            origins=self._origins,
            last=last,
            timings=timings,
            distributions=self._distributions,
        )
        self._ids, self._origins, self._distributions, self._bytes = [], [], [], 0
        self._deliver(chunk)

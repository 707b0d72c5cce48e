"""Proposals: drives a drafter's work, splits its output into chunks, and goes on ahead of verdicts.

While a proposal is verified, what follows its likeliest verdicts is drafted. A tree of branches
grows behind the proposal, the likeliest first: a branch follows a possible verdict on the one
before it. Branches behind each other that the drafter's own guesses lead to share a session
(`Chain`); its second choices need sessions of their own. When a verdict is known, what follows it
stays.

Runs in the engine's thread for drafters with a model, otherwise in the thread of the caller. Uses
no threads, no gRPC and no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter_ns
from typing import NamedTuple, TypeAlias, cast

from draft_service.drafters.base import (
    Drafter,
    DrafterSession,
    Drafting,
    ForeseeingSession,
    Foresight,
    Scored,
    SecondChoice,
    TreeSession,
    check_move,
)
from flyspec.engine.loop import Ran, Work
from flyspec.engine.model import Draw
from flyspec.errors import ResourceExhaustedError
from flyspec.prefix import num_same
from flyspec.values.rounds import DraftAdvance, DraftAhead, DraftChunk, DraftOpen, DraftTimings
from flyspec.values.tokens import Drafted, Origin, TokenDistribution, still_needed

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 1 << 20
"""Maximum bytes of distributions in a chunk of several tokens. A single distribution is smaller for
any current vocabulary (half a megabyte at 262,144 tokens)."""

MAX_TOKENS = 1 << 30
"""No limit on the tokens of a chunk."""

Deliver = Callable[[DraftChunk | Exception], None]
Spawn: TypeAlias = Callable[[Hashable, Work[Drafted], Callable[[Exception], None]], None]
"""Queues work for an owner, as `StepLoop.add` does."""
MAX_CHOICES = 4
"""Maximum second choices that are followed behind a proposal."""
MIN_CHANCE = 0.03
"""Estimated probability of a verdict below which a second choice is not followed."""
MIN_DEEP_CHANCE = 0.1
"""The same further behind, where it is that of all verdicts together; behind a guess that is less
likely nothing is drafted."""


class Taken(NamedTuple):
    """A session's sequence has `length` tokens now, and then those that were `made` ahead.

    `ended`: there can be no more of those.
    """

    length: int
    made: Drafted = Drafted([])
    ended: bool = False


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
    ahead: Branches | None = None,
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
    """The chunks of a proposal that continues the first `begin` tokens of `session`.

    `ahead_ids`: its own if it is made ahead, and that of the proposal which it follows, as in
    `DraftChunk`.
    """

    def __init__(
        self,
        round_id: int,
        session: DrafterSession,
        deliver: Deliver,
        begin: int,
        ahead_ids: tuple[int, int] = (0, 0),
    ) -> None:
        self._round_id, self._deliver = round_id, deliver
        self._ahead_id, self._follows = ahead_ids
        self._base = self._sent = begin
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
            ahead=self._ahead_id > 0,
            ahead_id=self._ahead_id,
            follows_ahead_id=self._follows,
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


class AheadRequest(NamedTuple):
    """The request that a branch is drafted for."""

    round_id: int
    max_tokens: int
    arrival_ns: int


class Branch:
    """Drafts behind `keep_length` tokens and `next_token_id`; `made` grows.

    It follows the branch `behind`, and has the estimated probability `chance`. The root, without
    one, is the proposal that is verified.
    """

    def __init__(
        self,
        ahead_id: int,
        behind: Branch | None,
        keep_length: int,
        next_token_id: int,
        chance: float,
        asked: AheadRequest,
    ) -> None:
        self.ahead_id, self.behind = ahead_id, behind
        self.keep_length, self.next_token_id = keep_length, next_token_id
        self.chance, self.asked = chance, asked
        self.made, self.model_ns = Drafted([]), 0
        self.ended = False
        """True if the drafter stopped by itself, so that there can be no more."""
        self.sent = False
        self.seen: Foresight | None = None
        self.choices: list[SecondChoice] = []
        """Those in `seen` that are to become branches yet, likeliest last."""

    @property
    def on(self) -> tuple[int, int]:
        return self.keep_length, self.next_token_id

    @property
    def is_first(self) -> bool:
        """True if it follows the proposal."""
        return self.behind is not None and self.behind.behind is None

    def add(self, drafted: Drafted) -> None:
        self.made = self.made.joined(drafted)

    def follows(self, other: Branch) -> bool:
        """True if this is the other branch, or one that follows it."""
        return self is other or (self.behind is not None and self.behind.follows(other))


class Chain:
    """A session and the branches in it, each behind the one before."""

    def __init__(self, session: DrafterSession, first: Branch) -> None:
        self.session, self.branches = session, [first]

    def close(self) -> None:
        self.session.close()


class Branches:
    """The branches of a client's session, since its last proposal.

    `state` is the client's session, `open_` as it was opened. `may_open` says whether there is a
    slot to spare for one more chain. `done` is called once all that is worth it has been drafted.
    """

    def __init__(
        self,
        drafter: Drafter,
        open_: DraftOpen,
        state: SessionState,
        spawn: Spawn,
        may_open: Callable[[], bool],
        done: Callable[[], None],
    ) -> None:
        prompt_length = open_.prompt_length or len(open_.token_ids)
        self._open = replace(open_, prompt_length=prompt_length)
        self._drafter, self._state, self._spawn = drafter, state, spawn
        self._may_open, self._done = may_open, done
        self._chains: list[Chain] = []
        self._pending: set[Chain] = set()
        self._ids = count(1)
        self._ahead, self._deliver = DraftAhead(0, 0), cast(Deliver, None)

    @property
    def apart(self) -> Sequence[Chain]:
        """The chains that have a session, and so a slot, of their own."""
        return [c for c in self._chains if c.session is not self._state.current]

    def take_over(self, advance: DraftAdvance) -> Taken:
        """Move the client's session, to where the branch of this verdict is if there is one.

        If the request confirms all of that branch, what follows it stays; all others are closed.
        """
        keep, append = advance.keep_length, advance.append_token_ids
        chain, chosen = self._chosen(advance)
        if chain is None or chosen is None:
            self._close_apart()
            self._state.session().move(keep, append)
            return Taken(keep + len(append))
        whole = [chosen.next_token_id, *chosen.made.token_ids] == [*append]
        if chosen.sent and whole and advance.ahead and advance.ahead.unverified_ahead_id:
            self._keep_what_follows(chosen, chain)
            return Taken(keep + len(append))
        self._close_apart(chain)
        self._state.become(chain.session)
        made, behind = chosen.made, keep + 1
        if len(append) > 1:  # these may be what it drafted: keep what it has of them
            behind += num_same(made.token_ids, append[1:])
            chain.session.move(behind, append[behind - keep :])
            return Taken(keep + len(append))
        num_made = min(len(made.token_ids), advance.max_tokens)
        chain.session.move(behind + num_made, ())
        ended = chosen.ended and num_made == len(made.token_ids)
        return Taken(behind, made.cut(num_made), ended)

    def _chosen(self, advance: DraftAdvance) -> tuple[Chain | None, Branch | None]:
        """Return the branch behind the proposal that a request goes on with, and its chain."""
        append, ahead = advance.append_token_ids, advance.ahead
        named = ahead.unverified_ahead_id if ahead else 0
        for chain in self._chains:
            for branch in chain.branches:
                right = branch.is_first and named in (0, branch.ahead_id)
                if right and append and branch.on == (advance.keep_length, append[0]):
                    return chain, branch
        return None, None

    def _keep_what_follows(self, root: Branch, own: Chain) -> None:
        for chain in self._chains:
            chain.branches = [b for b in chain.branches if b.follows(root)]
        for chain in self.apart:
            if not chain.branches:
                chain.close()
        self._state.become(own.session)
        self._chains = [chain for chain in self._chains if chain.branches]
        root.behind = None

    def _close_apart(self, but: Chain | None = None) -> None:
        for chain in self.apart:
            if chain is not but:
                chain.close()
        self._chains = []

    def go_on(
        self, round_id: int, ahead: DraftAhead, num_proposed: int, arrival_ns: int, deliver: Deliver
    ) -> Work[Drafted]:
        """Draft what follows the likeliest verdicts on the last `num_proposed` tokens.

        Goes on with what there is of it.
        """
        self._ahead, self._deliver = ahead, deliver
        asked = AheadRequest(round_id, ahead.max_tokens, arrival_ns)
        session = self._state.session()
        if not self._chains:
            start = len(session.token_ids) - num_proposed
            root = Branch(0, None, start - 1, session.token_ids[start - 1], 1.0, asked)
            root.made, root.sent = Drafted(session.token_ids[start:]), True
            self._chains = [Chain(session, root)]
        own = next(chain for chain in self._chains if chain.session is session)
        self._pending.update(self._chains)
        for chain in self.apart:
            self._start(chain, asked)
        yield from self._extend(own, asked)

    def _start(self, chain: Chain, asked: AheadRequest) -> None:
        self._pending.add(chain)
        self._spawn(chain, self._extend(chain, asked), partial(self._failed, chain))

    def _extend(self, chain: Chain, asked: AheadRequest) -> Work[Drafted]:
        """Go on at the end of a chain, for as long as it is worth it."""
        while not self._state.interrupted:
            tip = chain.branches[-1]
            if not tip.sent:
                yield from self._complete(tip, chain.session)
            likely = tip.behind is None or tip.chance >= MIN_DEEP_CHANCE
            if not (tip.sent and tip.made.token_ids and likely and self._has_room()):
                break
            if tip.seen is None:
                tip.seen = yield from self._foresee(chain.session, len(tip.made.token_ids))
                tip.choices = [*reversed(tip.seen.choices[:MAX_CHOICES])]
            follows = self._follow_guess(tip, chain, asked)
            self._branch_off(tip, chain.session, asked)
            if not follows:
                break
        self._ended(chain)

    def _has_room(self) -> bool:
        """True if one more branch may be drafted."""
        branches = sum(b.behind is not None for c in self._chains for b in c.branches)
        return branches < self._ahead.num_proposals

    def _foresee(
        self, session: DrafterSession, num_proposed: int
    ) -> Generator[Draw, Ran[Drafted], Foresight]:
        """Return what a session expects of the verdict on its last tokens."""
        work = cast(ForeseeingSession, session).foresee(num_proposed)
        try:
            want = next(work)
            while True:
                want = work.send((yield want).result)
        except StopIteration as stop:
            seen: Foresight = stop.value
        return seen

    def _follow_guess(self, tip: Branch, chain: Chain, asked: AheadRequest) -> bool:
        """Add the branch behind the drafter's own guess to its chain; return whether there is."""
        assert tip.seen is not None
        guess, chance = tip.seen.guess, tip.chance * tip.seen.chance
        if guess is None or not self._has_room():
            return False
        length = len(chain.session.token_ids)
        chain.session.move(length, [guess])
        chain.branches.append(Branch(next(self._ids), tip, length, guess, chance, asked))
        return True

    def _branch_off(self, tip: Branch, session: DrafterSession, asked: AheadRequest) -> None:
        """Start the chains behind the drafter's second choices, while there is room."""
        least = MIN_CHANCE if tip.behind is None else MIN_DEEP_CHANCE
        while tip.choices and self._has_room() and self._may_open():
            keep_length, token_id, chance = tip.choices[-1]
            if (chance := tip.chance * chance) < least:
                return
            tokens = [*session.token_ids[:keep_length], token_id]
            try:
                opened = self._drafter.open(replace(self._open, token_ids=tokens))
            except ResourceExhaustedError:
                return
            tip.choices.pop()
            branch = Branch(next(self._ids), tip, keep_length, token_id, chance, asked)
            chain = Chain(opened, branch)
            self._chains.append(chain)
            self._start(chain, asked)

    def _complete(self, branch: Branch, session: DrafterSession) -> Work[Drafted]:
        """Draft what a branch lacks, at the end of its session, and deliver it when it is whole."""
        ended = False

        def proposing() -> Drafting:
            nonlocal ended
            yield from session.propose(branch.asked.max_tokens - len(branch.made.token_ids))
            ended = True

        assert branch.behind is not None
        round_id, max_tokens, arrival_ns = branch.asked
        parts: list[DraftChunk | Exception] = []
        ahead = branch.ahead_id, branch.behind.ahead_id
        chunks = Chunks(round_id, session, parts.append, branch.keep_length + 1, ahead)
        chunks.add(branch.made)
        branch.model_ns += yield from draft(self._state, proposing(), chunks, also=branch.add)
        if not ended:
            return  # by the next request, which may want the rest of it
        branch.sent, branch.ended = True, len(branch.made.token_ids) < max_tokens
        if branch.made.token_ids:
            chunks.flush(DraftTimings(0, branch.model_ns, perf_counter_ns() - arrival_ns))
        for part in parts:
            self._deliver(part)

    def _failed(self, chain: Chain, error: Exception) -> None:
        log.debug("drafting ahead: %s", error)
        self._ended(chain)

    def _ended(self, chain: Chain) -> None:
        self._pending.discard(chain)
        if not self._pending:
            self._done()

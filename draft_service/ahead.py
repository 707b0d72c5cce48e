"""Drafting on while a proposal is verified: what follows its likeliest verdicts (`DraftAhead`).

A session's own continuation follows the verdict that accepts everything; others need a session of
their own for as long. When the verdict is known, the session that follows it becomes the client's.
Runs in the thread that drives the session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import TypeAlias, cast

from draft_service.drafters.base import (
    Drafter,
    DrafterSession,
    ForeseeingSession,
    Foresight,
    SecondChoice,
)
from draft_service.proposal import Chunks, Deliver, SessionState, draft
from flyspec.engine.loop import Ran, Work
from flyspec.engine.model import Draw
from flyspec.errors import ResourceExhaustedError
from flyspec.prefix import num_same
from flyspec.values.rounds import DraftAdvance, DraftAhead, DraftOpen, DraftTimings
from flyspec.values.tokens import Drafted

log = logging.getLogger(__name__)

Spawn: TypeAlias = Callable[[Hashable, Work[Drafted], Callable[[Exception], None]], None]
"""Queues work for an owner, as `StepLoop.add` does."""


class Branch:
    """A continuation behind `keep_length` tokens and `next_token_id`, of which `made` is drafted.

    `whole`: it has ended by itself, so there can be no more.
    """

    def __init__(self, session: DrafterSession, keep_length: int, next_token_id: int) -> None:
        self.session = session
        self.keep_length, self.next_token_id = keep_length, next_token_id
        self.made = Drafted([])
        self.whole = False

    def add(self, drafted: Drafted) -> None:
        self.made = self.made.joined(drafted)

    def close(self) -> None:
        self.session.close()


class Branches:
    """The branches of a client's session, since its last proposal.

    `state` is the client's session, `open_` as it was opened. `may_open` says whether there is a
    slot to spare for one more branch. `done` is called once all have been drafted.
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
        self._branches: list[Branch] = []
        self._pending: set[Branch] = set()

    @property
    def apart(self) -> Sequence[Branch]:
        """The branches that have a session, and so a slot, of their own."""
        return [b for b in self._branches if b.session is not self._state.current]

    def take_over(self, advance: DraftAdvance) -> tuple[Drafted, bool]:
        """Move the client's session, to where the branch of this verdict is if there is one.

        Returns the tokens that have been drafted behind it, which are part of the sequence now, and
        whether that is all there can be. Closes all other branches.
        """
        keep, append = advance.keep_length, advance.append_token_ids
        chosen = next(
            (
                branch
                for branch in self._branches
                if append and (branch.keep_length, branch.next_token_id) == (keep, append[0])
            ),
            None,
        )
        for branch in self.apart:
            if branch is not chosen:
                branch.close()
        self._branches = []
        if chosen is None:
            self._state.session().move(keep, append)
            return Drafted([]), False
        self._state.become(chosen.session)
        made, behind = chosen.made, keep + 1
        if len(append) > 1:  # these may be what it drafted: keep what it has of them
            behind += num_same(made.token_ids, append[1:])
            chosen.session.move(behind, append[behind - keep :])
            return Drafted([]), False
        count = min(len(made.token_ids), advance.max_tokens)
        chosen.session.move(behind + count, ())
        return made.cut(count), chosen.whole and count == len(made.token_ids)

    def go_on(
        self, round_id: int, ahead: DraftAhead, num_proposed: int, arrival_ns: int, deliver: Deliver
    ) -> Work[Drafted]:
        """Draft what follows the likeliest verdicts on the last `num_proposed` tokens."""
        session = self._state.session()
        own = Branch(session, len(session.token_ids), -1)
        if num_proposed and ahead.num_proposals > 0 and not self._state.interrupted:
            self._pending.add(own)
            if ahead.num_proposals > 1:
                seen = yield from self._foresee(num_proposed)
                self._branch_off(seen.choices, round_id, ahead, arrival_ns, deliver)
                guess = seen.guess
            else:
                guess = yield from self._guess(round_id, deliver)
            if guess is not None and not self._state.interrupted:
                own.next_token_id = guess
                yield from self._continue(own, round_id, ahead.max_tokens, arrival_ns, deliver)
        self._ended(own)

    def _foresee(self, num_proposed: int) -> Generator[Draw, Ran[Drafted], Foresight]:
        """Return what the session expects of the verdict."""
        session = cast(ForeseeingSession, self._state.session())
        work = session.foresee(num_proposed)
        try:
            want = next(work)
            while True:
                want = work.send((yield want).result)
        except StopIteration as stop:
            seen: Foresight = stop.value
        return seen

    def _guess(self, round_id: int, deliver: Deliver) -> Generator[Draw, Ran[Drafted], int | None]:
        """Return the session's own guess of the next token; None if it has none."""
        session, guess = self._state.session(), Branch(self._state.session(), 0, -1)
        work = session.propose(1)
        yield from draft(self._state, work, Chunks(round_id, session, deliver), also=guess.add)
        made = guess.made.token_ids
        session.move(len(session.token_ids) - len(made), ())
        return made[0] if made else None

    def _branch_off(
        self,
        choices: Sequence[SecondChoice],
        round_id: int,
        ahead: DraftAhead,
        arrival_ns: int,
        deliver: Deliver,
    ) -> None:
        """Start the branches that need a session of their own."""
        session = self._state.session()
        for keep_length, token_id, _ in choices[: ahead.num_proposals - 1]:
            if self._state.interrupted or not self._may_open():
                return
            tokens = [*session.token_ids[:keep_length], token_id]
            try:
                opened = self._drafter.open(replace(self._open, token_ids=tokens))
            except ResourceExhaustedError:
                return
            branch = Branch(opened, keep_length, token_id)
            self._branches.append(branch)
            self._pending.add(branch)
            drafting = self._draft(branch, round_id, ahead.max_tokens, arrival_ns, deliver)
            self._spawn(branch, drafting, partial(self._failed, branch))

    def _draft(
        self, branch: Branch, round_id: int, max_tokens: int, arrival_ns: int, deliver: Deliver
    ) -> Work[Drafted]:
        """Draft a branch with its own session and deliver its proposal."""
        chunks = Chunks(round_id, branch.session, deliver, ahead=True)
        work = branch.session.propose(max_tokens)
        model_ns = yield from draft(self._state, work, chunks, also=branch.add)
        self._drafted(branch, chunks, max_tokens, model_ns, arrival_ns)
        self._ended(branch)

    def _continue(
        self, own: Branch, round_id: int, max_tokens: int, arrival_ns: int, deliver: Deliver
    ) -> Work[Drafted]:
        """Go on with the client's session behind its own guess of the target's next token."""
        session = own.session
        session.move(own.keep_length, [own.next_token_id])
        self._branches.append(own)
        chunks = Chunks(round_id, session, deliver, ahead=True)
        work = session.propose(max_tokens)
        model_ns = yield from draft(self._state, work, chunks, also=own.add)
        self._drafted(own, chunks, max_tokens, model_ns, arrival_ns)

    def _drafted(
        self, branch: Branch, chunks: Chunks, max_tokens: int, model_ns: int, arrival_ns: int
    ) -> None:
        """Deliver a branch's proposal, unless the next request is there already."""
        if self._state.interrupted:
            return
        branch.whole = len(branch.made.token_ids) < max_tokens
        if chunks.waiting:
            chunks.flush(DraftTimings(0, model_ns, perf_counter_ns() - arrival_ns))

    def _failed(self, branch: Branch, error: Exception) -> None:
        log.debug("drafting ahead: %s", error)
        self._ended(branch)

    def _ended(self, branch: Branch) -> None:
        self._pending.discard(branch)
        if not self._pending:
            self._done()

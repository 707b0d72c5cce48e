"""Draft heads beside the target: what they hold of each slot, and their proposals for rounds.

A head reads the target's hidden rows, so that its cache follows the target's slots. The networks
are in `flyspec.engine.draft_heads`. Everything here runs in the engine's thread.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import NamedTuple

from flyspec.engine.draft_heads.base import DraftHead, HeadStep
from flyspec.engine.model import History, Rows, Step
from flyspec.errors import InvalidArgumentError
from flyspec.prefix import num_same
from flyspec.ranges import Range
from flyspec.values.admin import HeadInfo
from flyspec.values.rounds import HeadProposal, HeadRequest, Verdict
from flyspec.values.tokens import Drafted
from verify_service.sessions import TargetSession
from verify_service.verdicts import RoundContext

log = logging.getLogger(__name__)

_PROBABILITY = 1.001
"""1 plus rounding."""


class HeadTurn(NamedTuple):
    """A session's turn at a head."""

    name: str
    session: TargetSession
    step: HeadStep


class Heads:
    """The heads of one target, by name, and what each slot of them holds.

    `failures` counts the rounds that went without a proposal because a head failed.
    """

    def __init__(
        self,
        heads: Mapping[str, DraftHead],
        vocab_size: int,
        context_length: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self._heads, self._vocab_size = heads, vocab_size
        self._context_length, self._eos = context_length, frozenset(eos_token_ids)
        # By head and slot: the tokens of the positions that it holds, and the one after them.
        self._read: dict[str, dict[int, list[int]]] = {name: {} for name in heads}
        self.failures: Counter[str] = Counter(dict.fromkeys(heads, 0))
        self.infos = tuple(
            HeadInfo(name, h.kind, h.max_tokens, h.num_parameters, h.fingerprint)
            for name, h in heads.items()
        )

    def check(self, request: HeadRequest | None) -> None:
        """Raise `InvalidArgumentError` for a head that is not there, or bad values."""
        if request is None:
            return
        if request.name not in self._heads:
            have = f"choose from {', '.join(self._heads)}" if self._heads else "there is none"
            raise InvalidArgumentError(
                f"round.head.name: no head {request.name!r}; {have}, or start the verify service "
                "with --heads"
            )
        Range(0.0, 1.0).check("round.head.min_confidence", request.min_confidence)

    def wanted(self, session: TargetSession, request: HeadRequest | None) -> HeadRequest | None:
        """Return the request; None if its head has failed in this session."""
        return None if request and request.name in session.failed_heads else request

    def reader(self, request: HeadRequest | None) -> str:
        """Return the requested head's name if it reads hidden rows, for which the target reruns
        what it misses; empty for one that reads tokens alone."""
        return request.name if request and self.layers(request) else ""

    def layers(self, request: HeadRequest | None) -> tuple[int, ...]:
        """Return the layers whose hidden rows the requested head reads."""
        return self._heads[request.name].hidden_layers if request else ()

    def adopt(self, session: TargetSession) -> None:
        """Find what the heads hold of a session that has just got its slot, from one before it."""
        assert session.slot is not None
        for name, by_slot in self._read.items():
            read = by_slot.get(session.slot, [])
            session.heads[name] = max(0, num_same(read, session.sequence.tokens) - 1)

    def forget(self, slot: int) -> None:
        """Drop what all heads hold of a slot whose step failed."""
        for name in self._heads:
            self._forget(name, slot)

    def _forget(self, name: str, slot: int) -> None:
        self._read[name].pop(slot, None)
        with suppress(Exception):  # it may have just failed
            self._heads[name].forget(slot)

    def follow(
        self,
        steps: Sequence[Step],
        found: Sequence[Rows],
        rounds: Sequence[RoundContext],
        verdicts: Mapping[int, Verdict | Exception],
    ) -> tuple[dict[int, HeadProposal], int]:
        """Let the heads read what they need of a forward's rows, and draft after `verdicts`.

        `rounds` are those of the steps, `verdicts` and the returned proposals by index of the step.
        Also returns the time taken, in ns.
        """
        turns: dict[int, HeadTurn] = {}
        if not self._heads:
            return {}, 0
        for index, (step, rows, context) in enumerate(zip(steps, found, rounds, strict=True)):
            verdict = verdicts.get(index)
            if isinstance(verdict, Exception):
                continue
            if verdict is not None and verdict.failed:
                context.session.cut_heads(verdict.keep_length)
            if turn := self._turn(context, step, rows, verdict):
                turns[index] = turn
        return self._run_all(turns)

    def continues(self, context: RoundContext, verdict: Verdict | Exception) -> bool:
        """True if the round's head goes on with the next round by itself after a verdict."""
        request = context.head
        if request is None or not request.num_rounds or not request.max_tokens:
            return False
        if isinstance(verdict, Exception) or verdict.failed or not context.is_last:
            return False
        room = self._context_length - (verdict.keep_length + 1)
        ends = context.session.interrupted or self._ended(context, verdict)
        return room > 0 and not ends

    def _ended(self, context: RoundContext, verdict: Verdict) -> bool:
        """True if a verdict has ended the sequence, so that nothing needs to be drafted."""
        if context.head is not None and context.head.ignore_eos:
            return False
        drafts = context.round.draft_token_ids[: verdict.num_accepted]
        return not self._eos.isdisjoint((*drafts, verdict.next_token_id))

    def _turn(
        self, context: RoundContext, step: Step, rows: Rows, verdict: Verdict | None
    ) -> HeadTurn | None:
        """Return what the round's head reads after a step; None if it gets nothing from it.

        Without a `verdict`, the step was a piece of the session's prompt.
        """
        session, request = context.session, context.head
        if request is None:
            return None
        tokens, end = session.sequence.tokens, step.start + len(step.token_ids)
        if self.reader(request):
            if not step.hidden_count:
                return None
            start = end - step.hidden_count
        else:
            start = session.heads.get(request.name, 0)
        if verdict is None:
            if end <= start:
                return None
            following = tokens[start + 1 : end + 1]
        elif (end := verdict.keep_length) <= start:
            return None  # a failed window: the row that it needs was in an earlier step
        else:
            drafts = context.round.draft_token_ids[: verdict.num_accepted]
            following = [*tokens[start + 1 : end], *drafts, verdict.next_token_id]
        hidden = tuple(rows.hidden[len(context.hidden_layers) :])
        hidden = tuple(each[: end - start] for each in hidden)
        turn = HeadStep(step.slot, start, hidden, following, first_token_id=tokens[start])
        if verdict is not None and context.is_last and not self._ended(context, verdict):
            turn = self._drafting(turn, session, request)
        return HeadTurn(request.name, session, turn)

    def _drafting(self, step: HeadStep, session: TargetSession, request: HeadRequest) -> HeadStep:
        """Return the step that drafts as well, unless there is no room."""
        length = step.start + len(step.token_ids) + 1
        most = min(request.max_tokens, self._heads[request.name].max_tokens)
        most = min(most, self._context_length - length)
        if most <= 0:
            return step
        history = None
        if session.sampling.needs_history:
            tokens = [*session.sequence.tokens[: step.start + 1], *step.token_ids]
            history = History(tokens, session.prompt_length, self._eos)
        return step._replace(
            max_tokens=most,
            sampling=session.sampling,
            seed=session.seed,
            history=history,
            distribution=session.distribution,
            stop_token_ids=self._eos,
            min_confidence=request.min_confidence,
        )

    def _run_all(self, turns: Mapping[int, HeadTurn]) -> tuple[dict[int, HeadProposal], int]:
        """Run all turns, a batch for each head; return the proposals, and the time taken in ns.

        A head that fails harms no verdict: the turn has no proposal, and its session does without
        the head from then on.
        """
        if not turns:
            return {}, 0
        began = perf_counter_ns()
        batches: defaultdict[str, dict[int, HeadTurn]] = defaultdict(dict)
        for key, turn in turns.items():
            batches[turn.name][key] = turn
        found: dict[int, HeadProposal] = {}
        for name, batch in batches.items():
            found |= self._run(name, batch)
        return found, perf_counter_ns() - began

    def _run(self, name: str, batch: Mapping[int, HeadTurn]) -> dict[int, HeadProposal]:
        """Run one head's turns; if they fail together, each on its own."""
        steps = [turn.step for turn in batch.values()]
        try:
            drafted = self._heads[name].draft(steps)
            proposals = [
                self._checked(step, each) for step, each in zip(steps, drafted, strict=True)
            ]
        except Exception as error:
            if len(batch) > 1:
                alone = (self._run(name, {key: turn}) for key, turn in batch.items())
                return {key: each for found in alone for key, each in found.items()}
            for turn in batch.values():
                self._failed(turn, error)
            return {}
        found = {}
        for (key, turn), proposal in zip(batch.items(), proposals, strict=True):
            self._note(turn)
            if turn.step.max_tokens:
                found[key] = proposal
        return found

    def _failed(self, turn: HeadTurn, error: Exception) -> None:
        self.failures[turn.name] += 1
        log.warning("head %s failed, the round has no proposal: %r", turn.name, error)
        turn.session.failed_heads.add(turn.name)
        self._forget(turn.name, turn.step.slot)

    def _checked(self, step: HeadStep, drafted: Drafted) -> HeadProposal:
        """Return what a head drafted. Raises `ArithmeticError` for what no target may be sent."""
        tokens, chances = drafted.token_ids, drafted.confidences
        if len(tokens) > step.max_tokens or len(chances) != len(tokens):
            raise ArithmeticError(
                f"{len(tokens)} tokens with {len(chances)} confidences, of {step.max_tokens}"
            )
        if not all(0 <= token < self._vocab_size for token in tokens):
            raise ArithmeticError(f"tokens outside of the vocabulary: {max(tokens)}")
        if not all(0 <= chance <= _PROBABILITY for chance in chances):  # NaN too
            raise ArithmeticError("confidences that are no probabilities")
        if step.distribution is not None and len(drafted.distributions) != len(tokens):
            raise ArithmeticError(f"{len(drafted.distributions)} distributions")
        return HeadProposal(
            tuple(tokens), tuple(min(1.0, each) for each in chances), tuple(drafted.distributions)
        )

    def _note(self, turn: HeadTurn) -> None:
        """Record what the slot holds now."""
        start, following = turn.step.start, turn.step.token_ids
        session, read = turn.session, self._read[turn.name].setdefault(turn.step.slot, [])
        if len(read) <= start or session.heads.get(turn.name, 0) < start:
            read[:] = session.sequence.tokens[: start + 1]  # what came before is missing
        else:
            del read[start + 1 :]
        read += following
        session.heads[turn.name] = start + len(following)

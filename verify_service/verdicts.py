"""Turns the logits of rounds into their verdicts, with log-probabilities if requested."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from flyspec.engine.autojudge import AutoJudge
from flyspec.engine.distributions import decode
from flyspec.engine.model import History, Rows
from flyspec.engine.sampling import TARGET_STREAM
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.rounds import Decision, HeadRequest, Outcome, Verdict, VerifyRound
from flyspec.values.tokens import SamplingParams, TokenDistribution
from verify_service.rules import decide_all, prepare
from verify_service.rules.inquiry import Answers, Inquiry, PendingVerdict, Round
from verify_service.sessions import TargetSession
from verify_service.trees import path_of, rows_along

_GREEDY = SamplingParams()


class RoundContext(NamedTuple):
    """A session's round, and the distributions of its drafts, one per draft or none.

    `head` is the request for a proposal of a head, which drafts after the round's last verdict. If
    it goes on with the next round, `send` delivers the verdict before: it gets that and when the
    step and judging began (`perf_counter_ns`).
    """

    session: TargetSession
    round: VerifyRound
    distributions: Sequence[TokenDistribution] = ()
    head: HeadRequest | None = None
    is_last: bool = True
    send: Callable[[Verdict, int, int], None] | None = None

    @property
    def survivals(self) -> Sequence[float]:
        """The chances of drafts that may be left out; an open window needs all of its drafts."""
        whole = self.round.open_window or self.round.draft_parents
        return () if whole else self.round.draft_survivals

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose hidden rows judging needs besides the logits."""
        if not self.round.draft_token_ids or self.round.teacher_forced:
            return ()
        needed = {layer for r in self.session.rules for layer in RULE_PRESETS[r.name].hidden_layers}
        return tuple(sorted(needed))


class RoundJudge:
    """Judges the rounds of one model, given its special tokens and the judge of `autojudge`."""

    def __init__(
        self,
        eos_token_ids: Collection[int],
        control_token_ids: Collection[int],
        autojudge: AutoJudge | None = None,
    ) -> None:
        self.eos = frozenset(eos_token_ids)
        self._control = frozenset(control_token_ids)
        self.autojudge = autojudge

    def ends(self, session: TargetSession) -> frozenset[int]:
        """Return the tokens that end the session's text: to the rules, all are EOS."""
        return self.eos | session.stop_token_ids if session.stop_token_ids else self.eos

    def judge_all(
        self, rounds: Sequence[tuple[RoundContext, Rows]], at_once: bool | None = None
    ) -> list[Verdict | Exception]:
        """Return the verdict on each round's rows, or the error that it alone fails with.

        Logits are [K + 1, V]; drafts beyond K are left out. Hidden rows begin with those of
        `RoundContext.hidden_layers`. `at_once` is as in `decide_all`.
        """
        found: dict[int, Verdict | Exception] = {}
        prepared: dict[int, PendingVerdict] = {}
        for index, (context, rows) in enumerate(rounds):
            try:
                prepared[index] = self._prepare(context, rows)
            except Exception as error:
                found[index] = error
        found.update(zip(prepared, decide_all([*prepared.values()], at_once), strict=True))
        return [found[index] for index in range(len(rounds))]

    def _prepare(self, context: RoundContext, rows: Rows) -> PendingVerdict:
        round_ = context.round
        if not round_.draft_parents:
            return self._prepare_chain(context, rows)
        path = tuple(path_of(context.session, round_, rows.logits, self.eos))
        chain = context._replace(round=replace(round_.along(path), num_top_tokens=0))
        inquiry, decide = self._prepare_chain(chain, rows_along(rows, path))

        def decide_and_add(answers: Answers) -> Verdict:
            top = ()
            if count := min(round_.num_top_tokens, rows.logits.shape[1]):
                top = tuple(rows.logits.topk(count, dim=-1).indices.flatten().tolist())
            return replace(decide(answers), path=path, top_token_ids=top)

        return PendingVerdict(inquiry, decide_and_add)

    def _prepare_chain(self, context: RoundContext, rows: Rows) -> PendingVerdict:
        session, round_, distributions, *_ = context
        logits = rows.logits
        drafts = round_.draft_token_ids[: logits.shape[0] - 1]
        if round_.teacher_forced:
            pending = _prepare_forced(session, drafts, logits)
        else:
            spec = session.distribution
            rule, *other_rules = session.rules
            pending = prepare(
                rule,
                drafts,
                logits,
                sampling=session.sampling,
                seed=session.seed,
                start_position=len(session.sequence),
                eos_token_ids=self.ends(session),
                control_token_ids=self._control,
                budget=round_.budget,
                exact_until_position=round_.exact_until_position,
                open_window=round_.open_window,
                num_speculative_tokens=round_.num_speculative_tokens,
                other_rules=other_rules,
                rule_segments=round_.rule_segments,
                draft_distributions=decode(
                    distributions[: len(drafts)],
                    drafts,
                    session.info.vocab_size,
                    renormalise=spec is not None and spec.draw_from_it,
                    device=logits.device,
                )
                if distributions
                else None,
                history=History(session.sequence.tokens, session.prompt_length, self.eos),
                hidden_rows=rows.hidden[0][-len(logits) :] if context.hidden_layers else None,
                autojudge=self.autojudge,
                resolved=True,
            )
        num_top = round_.num_top_tokens if drafts else 0
        if session.logprobs is None and not num_top:
            return pending
        inquiry, decide = pending

        def decide_and_add(answers: Answers) -> Verdict:
            verdict = decide(answers)
            if session.logprobs is not None:
                verdict = _with_logprobs(verdict, round_, answers)
            if num_top:
                verdict = replace(verdict, top_token_ids=tuple(answers.top_tokens()))
            return verdict

        inquiry = inquiry._replace(top_logprobs=session.logprobs, num_top_tokens=num_top)
        return PendingVerdict(inquiry, decide_and_add)


def _prepare_forced(session: TargetSession, drafts: Sequence[int], rows: Tensor) -> PendingVerdict:
    """Judge so that all drafts are accepted."""
    start, count = len(session.sequence), len(drafts)

    def decide(answers: Answers) -> Verdict:
        *_, following = answers.tokens(TARGET_STREAM, 0, count + 1)  # all must be finite
        return Verdict(
            keep_length=start + count,
            next_token_id=following,
            decisions=(Decision(Outcome.EXACT),) * count,
            start_length=start,
        )

    round_ = Round(drafts, rows, _GREEDY, session.seed, start)
    return PendingVerdict(Inquiry(round_, (TARGET_STREAM,), ()), decide)


def _with_logprobs(verdict: Verdict, round_: VerifyRound, answers: Answers) -> Verdict:
    """Add log-probabilities of the accepted tokens, and of the target's token in an open window."""
    if verdict.failed:
        assert round_.open_window is not None
        given = round_.open_window.target_logprobs
        assert given is not None, "checked in TargetSession.begin"
        return replace(verdict, logprobs=(given,))
    count, start = verdict.num_accepted, verdict.start_length
    tokens = [*round_.draft_token_ids[:count], verdict.next_token_id]
    logprobs = tuple(answers.logprobs(0, tokens))
    window = verdict.open_window
    if window is not None and window.position >= start:
        (own,) = answers.logprobs(window.position - start, [window.target_token_id])
        window = window._replace(target_logprobs=own)
    return replace(verdict, open_window=window, logprobs=logprobs)

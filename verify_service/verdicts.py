"""Turns a round's logits into its verdict, with log-probabilities if requested."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from flyspec.engine.distributions import decode
from flyspec.engine.logits import token_logprobs
from flyspec.engine.model import History
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.rounds import Decision, Outcome, Verdict, VerifyRound
from flyspec.values.tokens import TokenDistribution
from verify_service.rules import judge
from verify_service.sessions import TargetSession


class RoundJudge:
    """Judges the rounds of one model, given its special tokens."""

    def __init__(self, eos_token_ids: Collection[int], control_token_ids: Collection[int]) -> None:
        self.eos = frozenset(eos_token_ids)
        self._control = frozenset(control_token_ids)

    def decide(
        self,
        session: TargetSession,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution],
        rows: Tensor,
    ) -> Verdict:
        """Return the verdict on a round's logits [K + 1, V]."""
        drafts = round_.draft_token_ids
        if round_.teacher_forced:
            return _with_logprobs(_forced(session, drafts, rows), round_, rows, session)
        verdict = judge(
            session.rule,
            drafts,
            rows,
            sampling=session.sampling,
            seed=session.seed,
            start_position=len(session.sequence),
            eos_token_ids=self.eos,
            control_token_ids=self._control,
            budget=round_.budget,
            exact_until_position=round_.exact_until_position,
            open_window=round_.open_window,
            num_speculative_tokens=round_.num_speculative_tokens,
            draft_distributions=decode(
                distributions,
                drafts,
                session.info.vocab_size,
                renormalise=RULE_PRESETS[session.rule.name].draws,
                device=rows.device,
            )
            if distributions
            else None,
            history=History(session.sequence.tokens, session.prompt_length, self.eos),
        )
        if session.logprobs is None:
            return verdict
        return _with_logprobs(verdict, round_, rows, session)


def _forced(session: TargetSession, drafts: Sequence[int], rows: Tensor) -> Verdict:
    """Return the verdict that accepts all drafts."""
    start = len(session.sequence)
    return Verdict(
        keep_length=start + len(drafts),
        next_token_id=int(rows[-1].argmax()),
        decisions=(Decision(Outcome.EXACT),) * len(drafts),
        start_length=start,
    )


def _with_logprobs(
    verdict: Verdict, round_: VerifyRound, rows: Tensor, session: TargetSession
) -> Verdict:
    """Add log-probabilities of the accepted tokens, and of the target's token in an open window."""
    top = session.logprobs or 0
    if verdict.failed:
        assert round_.open_window is not None
        given = round_.open_window.target_logprobs
        assert given is not None, "checked in TargetSession.begin"
        return replace(verdict, logprobs=(given,))
    count, start = verdict.num_accepted, verdict.start_length
    tokens = [*round_.draft_token_ids[:count], verdict.next_token_id]
    logprobs = tuple(token_logprobs(rows[: count + 1], tokens, top))
    window = verdict.open_window
    if window is not None and window.position >= start:
        row = rows[window.position - start : window.position - start + 1]
        (own,) = token_logprobs(row, [window.target_token_id], top)
        window = window._replace(target_logprobs=own)
    return replace(verdict, open_window=window, logprobs=logprobs)

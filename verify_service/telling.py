"""Tells the verdicts of a round, with the times that they took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import NamedTuple

from flyspec.errors import UnavailableError
from flyspec.self_drafting import following_round
from flyspec.values.rounds import HeadProposal, Verdict, VerifyRound, VerifyTimings
from flyspec.values.tokens import TokenDistribution


class ToJudge(NamedTuple):
    """A round, when it arrived or began (`perf_counter_ns`), and its drafts if a head went on.

    `distributions` has one per draft or none; `drafting_ns` is the time that a head's drafts took.
    """

    round_: VerifyRound
    since_ns: int
    distributions: Sequence[TokenDistribution] = ()
    drafts: HeadProposal | None = None
    drafting_ns: int = 0

    def following(self, verdict: Verdict, drafting_ns: int) -> ToJudge:
        """Return the round that the head goes on with, given the verdict with its proposal.

        Raises `UnavailableError` if the head failed and an open window needs drafts.
        """
        drafts = verdict.proposal or HeadProposal()
        following = following_round(self.round_, verdict, drafts.token_ids)
        if not drafts.token_ids and following.open_window:
            raise UnavailableError("a head failed, and the open window needs drafts")
        return ToJudge(following, perf_counter_ns(), drafts.distributions, drafts, drafting_ns)


class Telling:
    """Delivers a round's verdicts; `early_ns` returns the time of a step that ran before it."""

    def __init__(
        self, round_: ToJudge, deliver: Callable[[Verdict], None], early_ns: Callable[[], int]
    ) -> None:
        self._round, self._deliver, self._early_ns = round_, deliver, early_ns
        self._since_ns = round_.since_ns

    def tell(
        self, verdict: Verdict, began_ns: int, judging_ns: int, head_ns: int = 0, last: bool = True
    ) -> None:
        """Deliver a verdict; its step and judging began then, and heads took `head_ns` since."""
        now_ns, round_ = perf_counter_ns(), self._round
        timings = VerifyTimings(
            queue_ns=began_ns - self._since_ns,
            forward_ns=judging_ns - began_ns + self._early_ns(),
            judge_ns=now_ns - judging_ns - head_ns,
            service_ns=now_ns - self._since_ns,
            head_ns=head_ns + round_.drafting_ns,
        )
        round_id, drafts = round_.round_.round_id, round_.drafts
        self._deliver(
            replace(verdict, round_id=round_id, last=last, timings=timings, drafts=drafts)
        )
        self._since_ns = now_ns

    def tell_and_go_on(self, verdict: Verdict, began_ns: int, judging_ns: int) -> None:
        """Deliver the verdict after which the head goes on with the next round."""
        following = self._round.round_.round_id + 1
        self.tell(replace(verdict, started_staged_round_id=following), began_ns, judging_ns)

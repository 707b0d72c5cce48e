"""A target and a drafter that exist as costs in ns and a chance: what a pace makes of them.

No clock: time is counted. Rounds go as in `orchestrator.generation.rounds`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from flyspec.values.admin import MeasuredStep
from flyspec.values.rounds import (
    Decision,
    DraftChunk,
    DraftTimings,
    Outcome,
    Verdict,
    VerifyTimings,
)
from flyspec.values.tokens import Origin
from orchestrator.generation.following import Overtaken
from orchestrator.generation.pace import CheckedRound, Pace
from orchestrator.pace.policy import Experience

MS = 1_000_000
EXACT, REJECTED = Decision(Outcome.EXACT), Decision(Outcome.REJECTED, 1, None, 1.0)
NOT_REACHED = Decision(Outcome.NOT_REACHED)


@dataclass(frozen=True)
class Costs:
    """Times in ns. A target's step of n rows takes `step_ns` and n - 1 times `row_ns`.

    `burst` tokens of plain decoding are a verdict, which takes `hop_ns` on top of the steps where
    it is the first; a round with drafts has it once for each model.
    """

    step_ns: int = 10 * MS
    row_ns: int = 100_000
    draft_ns: int = 1 * MS
    hop_ns: int = 1 * MS
    read_ns: int = 20_000
    prompt_ns: int = 40 * MS
    burst: int = 2
    relative_size: float = 0.3

    def target_ns(self, num_rows: int) -> int:
        return self.step_ns + (num_rows - 1) * self.row_ns

    def round_ns(self, k: int) -> int:
        return 2 * self.hop_ns + k * self.draft_ns + self.target_ns(k + 1)

    def best_ns(self, agreement: float, most: int) -> float:
        """Return the time per token with the best K for tokens that agree with this probability."""
        rates = [self.step_ns / 1.0]
        for k in range(1, most + 1):
            tokens = sum(agreement**i for i in range(k + 1))
            rates.append(self.round_ns(k) / tokens)
        return min(rates)


class Spent(NamedTuple):
    """The cost of a text: `time_ns` for `tokens`, `drafted` of them in rounds with drafts."""

    time_ns: int
    tokens: int
    drafted: int


class Asked(NamedTuple):
    """A proposal on its way: K tokens behind the first `length`, there at `ready_ns`."""

    k: int
    length: int
    since_ns: int
    ready_ns: int
    scored: int
    service_ns: int


@dataclass
class Simulation:
    """A text of which the drafter knows token i if `agrees(i)`; its `confidence` says so or not."""

    costs: Costs
    agreement: Callable[[int], float]
    seed: int = 0
    confident: bool = False
    now_ns: int = 0
    position: int = 0
    follows_ns: list[int] = field(default_factory=list)
    plain_ns: int = 0
    spent: list[Spent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._known: list[bool] = []
        self._read = 0
        self._has_read = False
        self._overtaken: DraftChunk | None = None
        self._follower: Asked | None = None

    def experience(self) -> Experience:
        """That of an orchestrator whose target has measured its steps."""
        sizes = (1, 2, 4, 8, 16, 32, 64)
        return Experience([MeasuredStep(n, self.costs.target_ns(n)) for n in sizes])

    def agrees(self, position: int) -> bool:
        while len(self._known) <= position:
            self._known.append(self._rng.random() < self.agreement(len(self._known)))
        return self._known[position]

    def run(self, pace: Pace, num_tokens: int) -> Spent:
        """Add that many tokens."""
        began, start, drafted = self.now_ns, self.position, 0
        if not start:
            if k := pace.follows():
                self._follower = self._ask(k, scores=False)
            self.now_ns += self.costs.prompt_ns
            self._plain(pace, 1, self.costs.prompt_ns)
        while self.position - start < num_tokens:
            before = self.position
            if self._round(pace):
                drafted += self.position - before
        self.spent.append(Spent(self.now_ns - began, self.position - start, drafted))
        return self.spent[-1]

    def _round(self, pace: Pace) -> bool:
        """Run one round; return whether it had drafts."""
        began, turn, costs = self.now_ns, pace.turn(), self.costs
        proposal, self._overtaken = self._overtaken, None
        if proposal is None and turn.num_drafts and self._follower is None:
            asked = self._ask(turn.num_drafts, scores=False)
            patience, drafts = turn.patience_ns, self._proposal(asked, turn.min_confidence)
            ready_ns = began + costs.hop_ns + drafts.timings.model_ns
            if patience is not None and ready_ns - began > patience:
                self.now_ns += patience
                self._follower = asked
            else:
                self.now_ns, proposal = ready_ns, drafts
        if proposal is None:
            left = min(costs.burst, turn.max_plain_tokens or costs.burst)
            self.now_ns += left * costs.target_ns(1) + (costs.hop_ns if turn.num_drafts else 0)
            self._plain(pace, left, self.now_ns - began)
            return False
        k, forward_ns = len(proposal.token_ids), costs.target_ns(len(proposal.token_ids) + 1)
        self.now_ns += costs.hop_ns + forward_ns
        accepted = 0
        while accepted < k and self.agrees(self.position + accepted):
            accepted += 1
        rejected = [REJECTED] * (accepted < k)
        decisions = [EXACT] * accepted + rejected
        decisions += [NOT_REACHED] * (k - len(decisions))
        verdict = Verdict(
            self.position + accepted, 1, tuple(decisions), start_length=self.position,
            timings=VerifyTimings(forward_ns=forward_ns),
        )  # fmt: skip
        self.position += accepted + 1
        pace.checked(CheckedRound(proposal, verdict, accepted + 1, self.now_ns - began))
        return True

    def _plain(self, pace: Pace, count: int, round_ns: int) -> None:
        self.position += count
        self.plain_ns += round_ns
        before = (7,) * (count - 1)
        verdict = Verdict(
            self.position - 1, 1, start_length=self.position - count, plain_token_ids=before,
            timings=VerifyTimings(forward_ns=count * self.costs.target_ns(1)),
        )  # fmt: skip
        pace.checked(CheckedRound(DraftChunk(), verdict, count, round_ns))
        follower = self._follower
        if follower is None:
            if k := pace.follows():
                scores = self._read > 0  # the first time it reads the prompt
                self._follower = self._ask(k, scores)
                self.follows_ns.append(self._follower.service_ns)
            return
        if follower.ready_ns > self.now_ns:
            return
        self._follower, proposal = None, self._proposal(follower, 0.0)
        behind = self.position - follower.length
        matched = 0
        while matched < min(behind, follower.k) and self.agrees(follower.length + matched):
            matched += 1
        asked_ns = self.now_ns - follower.since_ns
        pace.followed(Overtaken(proposal, matched, behind, asked_ns))
        if matched == behind and pace.turn().num_drafts:
            rest = proposal.cut(matched, matched + pace.turn().num_drafts)
            if rest.token_ids:
                self._overtaken = rest

    def _ask(self, k: int, scores: bool) -> Asked:
        costs, unread = self.costs, self.position - self._read
        reading_ns = 0 if self._has_read else costs.prompt_ns * costs.relative_size
        model_ns = int(unread * costs.read_ns + k * costs.draft_ns + reading_ns)
        scored = unread if scores else 0
        self._read = self.position
        self._has_read = True
        ready = self.now_ns + costs.hop_ns + model_ns
        return Asked(k, self.position, self.now_ns, ready, scored, model_ns)

    def _proposal(self, asked: Asked, min_confidence: float) -> DraftChunk:
        confidences: list[float] = []
        for i in range(asked.k):
            sure = 0.95 if self.agrees(asked.length + i) else 0.4
            confidences.append(sure)
            left = 1.0
            for confidence in confidences:
                left *= confidence
            if self.confident and left < min_confidence:
                break
        count = len(confidences)
        model_ns = asked.service_ns - (asked.k - count) * self.costs.draft_ns
        first = asked.length - asked.scored
        return DraftChunk(
            token_ids=[7] * count,
            origins=[Origin.EXACT_MODEL] * count,
            timings=DraftTimings(0, model_ns, model_ns),
            confidences=confidences if self.confident else (),
            agreements=[self.agrees(first + i) for i in range(asked.scored)],
            drafter="model",
        )

"""Adaptive K: each round drafts as many tokens as promise the most tokens per second. Pure.

A round of K drafts yields one token and the accepted drafts (`acceptance`), in a time (`costs`).
Both are uncertain, so the best K is chosen as if they were off by a drawn number of standard errors
(Thompson sampling), so that what is little known is tried; an account bounds what that may cost.

While decoding is plain, drafting begins by asking a light drafter beside the target, so that nobody
waits while it reads; what it proposes is verified as far as the text has not overtaken it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from flyspec.drafter_names import PREDICTION
from flyspec.recent import Share
from flyspec.rules.presets import RULE_PRESETS
from flyspec.speculation_length import MOST_BY_AUTO
from flyspec.values.admin import MeasuredStep
from flyspec.values.rounds import DraftChunk
from orchestrator.generation.following import Overtaken
from orchestrator.generation.pace import CheckedRound, FirstToken, NextRound, Pace
from orchestrator.generation.plan import GenerationPlan
from orchestrator.pace.acceptance import MEMORY, Acceptance, SharedAcceptance
from orchestrator.pace.costs import Costs

MAX_LOSS = 0.02
"""Share of the time of plain decoding that drafts may cost all texts beyond what they saved."""
MAX_TEXT_LOSS = 0.06
"""The same for a single text."""
PATIENCE = 3.0
"""Multiple of a round's time that its proposal may take."""


class Account:
    """Time saved by a drafter under a rule, less its cost, ns; `length`: usual tokens of a text."""

    def __init__(self, rule: str) -> None:
        self.acceptance = SharedAcceptance(not RULE_PRESETS[rule].token_exact, MOST_BY_AUTO)
        self.saved_ns: float | None = None
        self.length = Share()

    def add(self, saved_ns: float, most_owed_ns: float = math.inf) -> None:
        """Add to what was saved; little is owed, so that drafting is tried again before long."""
        self.saved_ns = max(-most_owed_ns, (self.saved_ns or 0.0) * MEMORY + saved_ns)


class Experience:
    """Everything that generations with one target share."""

    def __init__(self, step_costs: Sequence[MeasuredStep] = ()) -> None:
        self.costs = Costs(step_costs)
        self._accounts: dict[tuple[str, str], Account] = {}
        self.z_plain = self.z_round = 0.0

    def account(self, drafter: str, rule: str) -> Account:
        return self._accounts.setdefault((drafter, rule), Account(rule))


class AdaptivePace(Pace):
    """The pace of one generation, with the `drafter` that is to propose at first."""

    def __init__(
        self, experience: Experience, plan: GenerationPlan, drafter: str, first: FirstToken
    ) -> None:
        self._experience, self._plan, self._costs = experience, plan, experience.costs
        self._drafter, self._size = drafter, first.relative_size
        self._rule, self._room = plan.judging.main_rule.name, plan.judging.room
        self._account = experience.account(drafter, self._rule)
        self._acceptance = Acceptance(self._account.acceptance)
        self._first, self._num_tokens = first, 0
        self._unread = self._unlent = first.prompt_length
        self._saved_ns = self._owed_ns = self._rate_owed = 0.0
        self._disturbs = self._entered = self._asks = False
        self._drafted_at = self._draw_at = self._k = 0
        draws = random.Random(plan.seed)
        # Plain decoding is never taken for slower than it is known to be.
        experience.z_plain, experience.z_round = -abs(draws.gauss(0, 1)), draws.gauss(0, 1)
        if self._account.saved_ns is None:
            self._account.saved_ns = self._loss_allowed()
        self._z, self._turn, self._seen = 0.0, NextRound(0), self._costs.num_disturbances
        self._choose()
        if self._k:
            delayed = first.is_delayed(self._k)
            self._turn = NextRound(0, max_plain_tokens=1) if delayed else self._drafting()

    def close(self) -> None:
        self._disturb(False)
        self._account.add(-self._owed_ns)
        self._account.acceptance.ended(self._acceptance)
        self._account.length.observe(self._num_tokens, MEMORY)
        self._costs.ended(self._drafter, self._size)

    @property
    def saved_ns(self) -> int:
        return int(self._saved_ns)

    @property
    def lets_go_on(self) -> bool:
        """Not with others, for whom drafts of little worth are left out of a step."""
        return self._turn.num_drafts > 0 and self._costs.running <= 1

    def turn(self) -> NextRound:
        return self._turn

    def checked(self, round_: CheckedRound) -> None:
        """Learn from a round, and choose the next K."""
        verdict, proposal, costs = round_.verdict, round_.proposal, self._costs
        begun, self._num_tokens = self._num_tokens > 0, self._num_tokens + round_.num_emitted
        entered, self._entered = self._entered, False
        if verdict.decisions and proposal.drafter != PREDICTION:
            self._take(proposal.drafter)
            self._unread = 0
            self._drafted_at = self._draw_at = self._num_tokens
            shared, k = self._account.acceptance, len(proposal.token_ids)
            matches = shared.checked(verdict.decisions, proposal.confidences, self._room)
            self._acceptance.saw(matches)
            if begun and not entered:
                costs.checked(self._drafter, self._size, k, round_.round_ns)
        elif not verdict.decisions:
            self._unread += round_.num_emitted
            self._acceptance.fade(max(0, round_.num_emitted))
        if begun:  # before that, a round's time includes the prompt
            self._settle(round_)
        if verdict.decisions or self._turn.num_drafts or self._num_tokens >= self._draw_at:
            self._choose()
        if self._turn.num_drafts or not (begun and self._first.is_light):
            self._turn = self._drafting() if self._k and not self._asks else NextRound(0)
            self._entered = self._k > 0 and not verdict.decisions and not round_.asked_head
        self._borrow()

    def _settle(self, round_: CheckedRound) -> None:
        """Charge a round's time to the account while anybody drafts; else learn from it."""
        costs = self._costs
        drafted = self._disturbs or costs.drafting or costs.num_disturbances != self._seen
        self._seen, emitted = costs.num_disturbances, round_.num_emitted
        if drafted or round_.verdict.decisions or emitted <= 0:
            repaid_ns = min(self._owed_ns, emitted * self._rate_owed)
            self._owed_ns -= repaid_ns
            saved_ns = emitted * costs.plain_ns() - round_.round_ns - repaid_ns
            self._save(saved_ns, predicted=round_.proposal.drafter == PREDICTION)
        else:
            costs.decoded(emitted, round_.round_ns)
            self._account.acceptance.matches.fade(MEMORY**emitted)
            self._account.add(MAX_LOSS * round_.round_ns)

    def _save(self, saved_ns: float, predicted: bool = False) -> None:
        self._saved_ns += saved_ns
        if not predicted:
            self._account.add(saved_ns, max(1, self._costs.running) * self._loss_allowed())

    def _borrow(self) -> None:
        """Let the tokens to come pay for the prompt, which the drafter reads once."""
        self._disturb(self._turn.num_drafts > 0 or self._asks)
        if self._disturbs and self._unlent:
            self._owed_ns = self._costs.reading_ns(self._size, self._unlent)
            self._rate_owed, self._unlent = self._owed_ns / self._num_left(), 0
            if self._num_tokens:  # else nobody knows how long the first token would have taken
                self._save(self._owed_ns)

    def _loss_allowed(self) -> float:
        """Return what this text may lose, ns."""
        return MAX_TEXT_LOSS * self._costs.plain_ns() * (self._num_tokens + self._num_left())

    def _num_left(self) -> float:
        """Return the likely number of tokens to come: as in other texts, or as many as so far."""
        usual, longest = self._account.length, self._plan.limits.max_tokens
        length = usual.held / usual.seen if usual.seen else longest
        return max(1.0, min(longest, max(length, 2 * self._num_tokens)) - self._num_tokens)

    def _choose(self) -> None:
        """Choose K; 0 if the account is overdrawn, or plain decoding is faster."""
        if self._num_tokens >= self._draw_at:
            self._draw_at = 2 * self._num_tokens - self._drafted_at + 1
            self._z = random.Random(hash((self._plan.seed, self._num_tokens))).gauss(0, 1)
        costs, experience, drafts = self._costs, self._experience, self._plan.drafts
        self._k, self._rate = 0, 1.0 / costs.plain_ns(experience.z_plain)
        left_ns = min(self._account.saved_ns or 0.0, self._saved_ns + self._loss_allowed())
        unread = 0 if self._turn.num_drafts else self._unread
        reading_ns = costs.reading_ns(self._size, unread) / self._num_left()
        accepted = self._acceptance.accepted(drafts.num_speculative_tokens, self._room, self._z)
        for k, number in enumerate(accepted, 1):
            round_ns = costs.round_ns(self._drafter, self._size, k, experience.z_round)
            if round_ns > costs.plain_ns() + left_ns:
                break
            rate = 1.0 / (round_ns / (1.0 + number) + reading_ns)
            if rate > self._rate:
                self._k, self._rate = k, rate

    def _drafting(self) -> NextRound:
        """Return a round of K drafts that ends where one more is not worth its time."""
        costs, drafter, size = self._costs, self._drafter, self._size
        usual_ns = costs.round_ns(drafter, size, self._k)
        worth = (costs.round_ns(drafter, size, self._k + 1) - usual_ns) * self._rate
        confidence = self._account.acceptance.confidence_for(worth)
        reading_ns = costs.reading_ns(size, self._unread)
        return NextRound(self._k, confidence, patience_ns=int(PATIENCE * (usual_ns + reading_ns)))

    def _disturb(self, disturbs: bool) -> None:
        self._costs.drafting += disturbs - self._disturbs
        self._costs.num_disturbances += disturbs > self._disturbs
        self._disturbs = disturbs

    def _take(self, drafter: str) -> None:
        """Use the experience with the drafter that proposes now."""
        if drafter != self._drafter:
            self._drafter, self._account = drafter, self._experience.account(drafter, self._rule)
            self._acceptance = Acceptance(self._account.acceptance)

    def nothing_drafted(self) -> None:
        """Decode plainly until the drafter, asked beside that, has something to propose."""
        self._turn = NextRound(0)

    def follows(self) -> int:
        """Return how many drafts to ask for beside plain decoding; 0: none."""
        may_ask = self._first.is_light if self._num_tokens else self._first.may_share
        self._asks = self._k > 0 and not self._turn.num_drafts and may_ask
        self._borrow()
        return self._k if self._asks else 0

    def followed(self, overtaken: Overtaken) -> None:
        """Learn from a proposal made beside plain decoding, and draft if K still says so."""
        proposal, costs = overtaken.proposal, self._costs
        if not self._asks and proposal.drafter == self._drafter:  # a round did not wait for it
            late_ns = overtaken.asked_ns + costs.plain_ns()
            costs.checked(self._drafter, self._size, len(proposal.token_ids), late_ns)
        self._asks, self._unread = False, 0
        self._take(proposal.drafter)
        drafts = [True] * overtaken.num_matched + [False] * overtaken.missed
        matches = [*proposal.agreements, *drafts]
        self._acceptance.saw(matches, in_round=False)
        self._account.acceptance.matches.observe(sum(matches), MEMORY, len(matches))
        self._choose()
        if self._k and proposal.token_ids:
            self._turn, self._entered = self._drafting(), True
        self._disturb(self._turn.num_drafts > 0)

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        if proposal.drafter == PREDICTION:
            return ()
        return self._acceptance.chances(proposal.confidences, len(proposal.token_ids))

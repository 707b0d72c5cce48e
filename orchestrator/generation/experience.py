"""Measurements shared by generations: how long things take, and how good drafts are.

Times are in ns, under the current load. A generation starts from what others measured, and learns
the acceptance in its own text.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.room import ANYWHERE, Room
from flyspec.speculation_length import MOST_BY_AUTO
from flyspec.step_costs import StepCosts
from flyspec.values.admin import MeasuredStep
from flyspec.values.rounds import DraftChunk, Outcome, Verdict
from orchestrator.generation.acceptance import SharedAcceptance
from orchestrator.generation.load_trials import LoadTrials
from orchestrator.generation.recent import Recent, RecentSlope
from orchestrator.generation.staging_trial import StagingTrial

MOST_SHARING, MOST_ROWS = 128, 256
"""Maximum generations in a step, and maximum rows of a step, that are distinguished."""
PLAIN_MEMORY, OVERHEAD_MEMORY = 0.99, 0.9
"""Memory (`recent.MEMORY`) of the time per plain token, and of the rest of a round's time."""
SCALE_PRIOR, PLAIN_PRIOR = 2.0, 16.0
"""Weights of the step times that the target reports: in steps, and in plain tokens."""
READING_MEMORY, READING_PRIOR = 0.9, 500.0
"""Memory of the cost per token read by a drafter, and weight of its prior in tokens."""
OVERHEAD_PRIOR = 3.0
"""Weight of the prior overhead, in rounds."""
START_ALLOWANCE_NS, MOST_ALLOWANCE_NS, MOST_DEBT_NS = 10e6, 20e6, 100e6
"""Allowance for queries at the start and at most, and maximum debt, which must be paid back."""
MOST_ALLOWANCE_TOKENS = 4
"""Maximum allowance in plain tokens, if that is longer: one bad round of a slow target costs that
much, and should not end drafting that has just saved many times as much."""
TRIAL_NS, TRIAL_TOKENS, TRIAL_ROUNDS = 50e6, 8, 4
"""What the first rounds with a drafter may lose, in ns, or in plain tokens if that is longer, and
how many have it to lose: the first one of a process may take very long."""
LOOSENING_MEMORY, LOOSENING_PRIOR = 0.98, 8.0
"""Memory per draft that differs from the target, and weight of the prior in such drafts."""
ALONE_NS = 200e6
"""Time a generation must have run alone to count as alone: others may follow shortly."""
PRIOR_ACCEPTANCE = 0.8
FAR = 2.0
"""Factor by which the time of a step or round counts at most as longer than usual, or shorter."""
KNOWN = 64
"""Tokens of evidence needed to judge a drafter by other texts."""
AT_ONCE_MEMORY, PLAIN_EVERY, MOST_LOSSES = 0.9, 16, 6
"""For texts drafted from their start: memory per round, every how many texts one is decoded
plainly, and the maximum number of consecutive losses that double the texts left out."""
CONFIDENCES = 0.5, 0.75, 0.88, 0.94, 0.97
"""The target's mean confidence in its own tokens that separates kinds of text; each step about
halves its uncertainty."""
SHARPNESS_STEP = 0.05
LEAST_SHARPNESS, MOST_SHARPNESS = 0.05, 4.0


class TextKind:
    """Texts with similar confidence of the target, for one drafter and rule.

    `num_unasked` is the number of tokens decoded plainly in such texts since the drafter was last
    queried in one.
    """

    def __init__(self) -> None:
        self.acceptance = SharedAcceptance(PRIOR_ACCEPTANCE, MOST_BY_AUTO)
        self.num_unasked = 0

    @property
    def is_known(self) -> bool:
        """Whether there is enough evidence of the acceptance in such texts."""
        return self.acceptance.num_seen >= KNOWN


class AtOnce:
    """Decides which texts are drafted from their start, by what that has recently saved.

    Some are left out regularly to keep timing plain decoding. After a loss several are left out,
    more with each consecutive one.
    """

    def __init__(self) -> None:
        self._saved_ns = Recent(0.0, AT_ONCE_MEMORY)
        self._num_texts = self._left_out = self._num_losses = 0
        self.samples_plain = False
        """Whether the last text was left out to time plain decoding."""

    def next(self) -> bool:
        """Return whether to draft the next text from its start."""
        self.samples_plain = False
        if self._left_out:
            self._left_out -= 1
            return False
        if self._saved_ns.value < 0:
            self._saved_ns = Recent(0.0, AT_ONCE_MEMORY)
            self._num_losses = min(MOST_LOSSES, self._num_losses + 1)
            self._left_out = 2**self._num_losses - 1
            return False
        self._num_texts += 1
        self.samples_plain = self._num_texts % PLAIN_EVERY == 0
        return not self.samples_plain

    def saved(self, duration_ns: float) -> None:
        """Record the time a round of such a text saved over plain decoding."""
        self._saved_ns.observe(duration_ns)
        if self._saved_ns.value > 0:
            self._num_losses = 0


class DrafterExperience:
    """Experience with one drafter under one rule.

    `acceptance` covers its drafts in all texts; `loosening` is the share accepted of drafts that
    differ from the target's tokens. A draft with confidence c is accepted with probability about
    c ** `sharpness`. `draft_ns` is the drafter's time per further token, `overhead_ns` a round's
    time besides those and the target's step, `reading_ns` the delay of plain decoding per token
    that the drafter reads alongside it. `allowance_ns` is what may be spent on queries (nothing if
    below 0), `num_in_vain` the number of consecutive queries after which drafting did not pay off.
    """

    def __init__(self, lossy: bool = False) -> None:
        self.acceptance = SharedAcceptance(PRIOR_ACCEPTANCE, MOST_BY_AUTO)
        self._kinds = [TextKind() for _ in range(len(CONFIDENCES) + 1)]
        self.at_once = AtOnce()
        self.loosening = Recent(0.5 * lossy, LOOSENING_MEMORY, LOOSENING_PRIOR)
        self.overhead_ns = Recent(2e6, OVERHEAD_MEMORY, OVERHEAD_PRIOR)
        self.draft_ns = RecentSlope()
        self.reading_ns = Recent(50_000.0, READING_MEMORY, READING_PRIOR)
        self.allowance_ns = START_ALLOWANCE_NS
        self.num_in_vain = 0
        self.sharpness = 1.0
        self._lost = 0.0  # share of what the rounds on trial may lose

    @property
    def is_known(self) -> bool:
        """Whether there is enough evidence from other texts."""
        return self.draft_ns.known and self.acceptance.num_seen >= KNOWN

    @property
    def is_on_trial(self) -> bool:
        """Whether rounds are to find out about the drafter, even if they are slower.

        That is until it is known, or they have lost too much.
        """
        return not self.is_known and self._lost < 1.0

    def tried(self, saved_ns: float, plain_ns: float) -> None:
        """Record the time that a round on trial saved.

        A token of plain decoding takes `plain_ns`.
        """
        lost = -saved_ns / max(TRIAL_NS, TRIAL_TOKENS * plain_ns)
        self._lost = max(0.0, self._lost + min(lost, 1 / TRIAL_ROUNDS))

    def earn(self, duration_ns: float, plain_ns: float) -> None:
        """Add `duration_ns` to the allowance; a negative duration has been spent.

        A token of plain decoding takes `plain_ns`.
        """
        most_ns = max(MOST_ALLOWANCE_NS, MOST_ALLOWANCE_TOKENS * plain_ns)
        allowed = self.allowance_ns + duration_ns
        self.allowance_ns = min(most_ns, max(-MOST_DEBT_NS, allowed))

    def kind_of(self, confidence: float) -> TextKind:
        """Return the kind of text by the target's confidence; drafters foresee what it foresees."""
        return self._kinds[bisect(CONFIDENCES, confidence)]

    def checked(
        self, proposal: DraftChunk, verdict: Verdict, round_ns: int, room: Room = ANYWHERE
    ) -> float:
        """Learn from the verdict on a proposal; return the credit of a refused draft.

        Where the rule's window has no `room`, no draft may differ from the target's token. That
        says nothing about other rounds: the credit is the chance that it is accepted there.
        """
        timings, drafted = proposal.timings, len(proposal.token_ids)
        if drafted and timings.service_ns:  # else it is the rest of a follower's proposal
            drafted += proposal.ahead
            self.draft_ns.observe(timings.model_ns, drafted)
            drafting_ns = min(timings.model_ns, drafted * self.draft_ns.value)
            rest = round_ns - drafting_ns - verdict.timings.forward_ns
            self.overhead_ns.observe(max(0, rest))
        outcomes = [decision.outcome for decision in verdict.decisions]
        for index, outcome in enumerate(outcomes):
            differs = outcome in (Outcome.LOOSE, Outcome.PROVISIONAL, Outcome.REJECTED)
            if differs and room.at(index, len(outcomes)):
                self.loosening.observe(outcome is not Outcome.REJECTED)
        accepted = verdict.num_accepted
        no_room = accepted < len(outcomes) and not room.at(accepted, len(outcomes))
        credit = self.loosening.value if no_room else 0.0
        self.acceptance.checked(len(outcomes), accepted, credit)
        chances = self.survivals(proposal.confidences[: len(outcomes)])
        if chances and not verdict.failed and not credit:
            surplus = (sum(chances) - min(accepted, len(chances))) / len(chances)
            sharpness = self.sharpness * (1.0 + SHARPNESS_STEP * surplus)
            self.sharpness = min(MOST_SHARPNESS, max(LEAST_SHARPNESS, sharpness))
        return credit

    def followed(self, proposal: DraftChunk, asked_ns: int) -> None:
        """Learn from a proposal made during plain decoding, `asked_ns` after it was requested.

        This way a drafter that was slow once can be found to be fast again.
        """
        timings, drafted = proposal.timings, len(proposal.token_ids)
        if not drafted:
            return
        # This includes reading and scoring tokens alongside a busy target: an upper bound.
        if not self.draft_ns.known or timings.model_ns < drafted * self.draft_ns.value:
            self.draft_ns = RecentSlope()
            self.draft_ns.observe(timings.model_ns, drafted)
        if (rest := max(0, asked_ns - timings.model_ns)) < self.overhead_ns.value:
            self.overhead_ns.observe(rest)

    def would_accept(self, agreements: Sequence[bool]) -> list[bool]:
        """Return whether each token would have been accepted, given the drafter's agreement.

        Of those it disagreed with, the recent share of accepted ones, evenly spread.
        """
        accepted, owed = [], 0.5
        for agreed in agreements:
            owed += 0.0 if agreed else self.loosening.value
            accepted.append(agreed or owed >= 1.0)
            owed -= not agreed and owed >= 1.0
        return accepted

    def survivals(self, confidences: Sequence[float]) -> list[float]:
        """Return the probability of each token of a proposal to be reached and accepted."""
        loosening = self.loosening.value
        chance, chances = 1.0, []
        for confidence in confidences:
            agreed = min(1.0, max(0.0, confidence)) ** self.sharpness
            chance *= agreed + (1.0 - agreed) * loosening
            chances.append(chance)
        return chances


class Experience:
    """Experience of an orchestrator with its target, currently shared by `running` generations.

    `step_costs` are the step times reported by the target.
    """

    def __init__(self, step_costs: Sequence[MeasuredStep] = ()) -> None:
        costs = StepCosts(step_costs)
        self._costs = [costs(rows) for rows in range(MOST_ROWS)]
        self._measured = bool(step_costs)
        self._scale, self._cold_ns = Recent(1.0, prior=SCALE_PRIOR), Recent(0.0)
        self._plain_ns = Recent(0.0, PLAIN_MEMORY)
        if self._measured:
            self._plain_ns = Recent(costs(1), PLAIN_MEMORY, prior=PLAIN_PRIOR)
        self._drafters: dict[tuple[str, str], DrafterExperience] = {}
        self._staging: dict[str, StagingTrial] = {}
        self._load = LoadTrials()
        self._alone_ns = ALONE_NS
        self.running = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Count a generation as running within the context."""
        self.running += 1
        if self.running > 1:
            self._alone_ns = 0.0
        try:
            yield
        finally:
            self.running -= 1

    def with_drafter(self, drafter: str, rule: str) -> DrafterExperience:
        key = drafter, rule
        if key not in self._drafters:
            self._drafters[key] = DrafterExperience(not RULE_PRESETS[rule].token_exact)
        return self._drafters[key]

    def staging_with(self, drafter: str) -> StagingTrial:
        """Return the trial that decides whether rounds with a drafter are staged."""
        return self._staging.setdefault(drafter, StagingTrial())

    @property
    def may_draft(self) -> bool:
        """Whether generations may draft under the current load."""
        among_others = self.running > 1 or self._alone_ns < ALONE_NS
        trial = self._load.at(max(2, self.running)) if among_others else None
        return trial is None or trial.drafts

    def emitted(self, num_tokens: int, duration_ns: int) -> None:
        """Record that a generation emitted `num_tokens` in `duration_ns`, drafted or not."""
        if self.running == 1:
            self._alone_ns += duration_ns
        if trial := self._load.at(self.running):
            trial.emitted(num_tokens, duration_ns, self.running, self.plain_ns)

    def decoded(self, num_tokens: int, duration_ns: int) -> None:
        """Record `num_tokens` consecutive tokens of plain decoding in `duration_ns`."""
        if num_tokens > 0:
            took_ns = self._credible(duration_ns, num_tokens * self.plain_ns)
            self._plain_ns.observe(took_ns, num_tokens, num_tokens)

    def stepped(self, num_rows: int, forward_ns: int) -> None:
        """Record the target's forward time for `num_rows` rows; ignored if steps may be shared."""
        if self.running == 1 and num_rows < MOST_ROWS:
            cost = self._costs[num_rows]
            usual_ns = self._scale.value * cost
            took_ns = self._credible(forward_ns, usual_ns)
            if num_rows == 1:
                self._scale.observe(took_ns, max(1, int(cost)))
            else:
                self._cold_ns.observe(took_ns - usual_ns)

    def _credible(self, duration_ns: float, usual_ns: float) -> float:
        """Return a time within a factor of two of the usual one.

        A step that was interrupted, or the first one of a process, says nothing about others, and
        nothing may correct it for long: while drafting pays off, no token is decoded plainly.
        """
        if not self._measured:
            return duration_ns
        return max(usual_ns / FAR, min(duration_ns, FAR * usual_ns))

    @property
    def plain_ns(self) -> float:
        """Time per token of plain decoding."""
        return max(1.0, self._plain_ns.value if self._plain_ns.known else self.verify_ns(0))

    def verify_ns(self, num_drafts: int) -> float:
        """Return the time of a round's forward pass, plus the delay its drafts cause to others.

        Drafts lengthen the step for all generations in it. Charging that to the one that sends
        them means none are sent when all together are better off without.
        """
        sharing = min(max(1, self.running), MOST_SHARING)
        alone = self._costs[sharing]
        longer = self._costs[min(sharing + num_drafts, MOST_ROWS - 1)] - alone
        # Between rounds the processor does other work, between plain tokens it does not.
        cold_ns = self._cold_ns.value if num_drafts else 0.0
        return max(1.0, self._scale.value * (alone + sharing * longer) + cold_ns)

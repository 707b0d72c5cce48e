"""What generations learn for each other: how long things take, and how good drafts are.

Times are those of now, under the present load, in ns. A generation begins with what the others
found, and finds its own text's acceptance by itself.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flyspec.rules.presets import RULE_PRESETS
from flyspec.speculation_length import MOST_BY_AUTO
from flyspec.step_costs import StepCosts
from flyspec.values.admin import MeasuredStep
from flyspec.values.rounds import DraftChunk, Outcome, Verdict
from orchestrator.generation.acceptance import SharedAcceptance
from orchestrator.generation.load_trials import LoadTrials

MEMORY = 0.8
"""What an observation is worth when another one has been made."""
MOST_SHARING, MOST_ROWS = 128, 256
"""Generations in a step, and its rows, that are told from more."""
PLAIN_MEMORY, OVERHEAD_MEMORY = 0.99, 0.9
"""The same of a token of plain decoding, and of a round outside the models."""
READING_MEMORY, READING_PRIOR = 0.9, 500.0
"""Of the cost of a token that a drafter reads; tokens that the beginning is worth."""
OVERHEAD_PRIOR = 3.0
"""Rounds that the beginning is worth."""
START_ALLOWANCE_NS, MOST_ALLOWANCE_NS, MOST_DEBT_NS = 10e6, 20e6, 100e6
"""What may be spent on finding out whether drafts pay: to begin with, and saved up at most. What
was spent beyond is paid back, this much of it."""
LOOSENING_MEMORY, LOOSENING_PRIOR = 0.98, 8.0
"""What a draft that differs is worth when another one has been seen, and how many the beginning."""
ALONE_NS = 200e6
"""So long a generation must have run alone to count as that: others may be about to follow those
that have just ended."""
PRIOR_ACCEPTANCE = 0.8
KNOWN = 64
"""Tokens of evidence that tell how good a drafter is in other texts."""
AT_ONCE_MEMORY, PLAIN_EVERY, MOST_LOSSES = 0.9, 16, 6
"""Of texts drafted from their start: what a round counts when another one has come, which of them
is decoded plainly, and how many losses one after the other double how many are."""
CONFIDENCES = 0.5, 0.75, 0.88, 0.94, 0.97
"""Of the target in its own tokens, between which texts are alike: each halves its doubt."""
SHARPNESS_STEP = 0.05
LEAST_SHARPNESS, MOST_SHARPNESS = 0.05, 4.0


class Recent:
    """An amount for each one of something, the last ones counting most.

    `value` is `otherwise` before any is known, which counts as much as `prior` observations.
    """

    __slots__ = ("_amount", "_count", "_memory", "value")

    def __init__(self, otherwise: float, memory: float = MEMORY, prior: float = 0.0) -> None:
        self.value, self._memory = otherwise, memory
        self._amount, self._count = otherwise * prior, prior

    @property
    def known(self) -> bool:
        """Whether there was an observation, or a prior."""
        return self._count > 0

    def observe(self, amount: float, count: float = 1, weight: int = 1) -> None:
        """Take in the amount of so many; as `weight` observations."""
        fade = self._memory**weight
        self._amount = self._amount * fade + amount
        self._count = self._count * fade + count
        self.value = self._amount / self._count


class TextKind:
    """Texts of which the target is about as sure, with one drafter under one rule.

    `num_unasked` are the tokens decoded plainly in such texts since the drafter was asked in one.
    """

    def __init__(self) -> None:
        self.acceptance = SharedAcceptance(PRIOR_ACCEPTANCE, MOST_BY_AUTO)
        self.num_unasked = 0

    @property
    def is_known(self) -> bool:
        """Whether there is evidence of how good drafts are in them."""
        return self.acceptance.num_seen >= KNOWN


class AtOnce:
    """Whether texts are drafted from their start, by what that has saved lately.

    Now and then one is not, so that what plain decoding takes stays known; after a loss so many
    are not, more of them with every further one.
    """

    def __init__(self) -> None:
        self._saved_ns = Recent(0.0, AT_ONCE_MEMORY)
        self._num_texts = self._left_out = self._num_losses = 0
        self.samples_plain = False
        """Whether the last text was left out to time plain decoding."""

    def next(self) -> bool:
        """Whether the next text is."""
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
        """A round of such a text has taken so much less than plain decoding would have."""
        self._saved_ns.observe(duration_ns)
        if self._saved_ns.value > 0:
            self._num_losses = 0


class DrafterExperience:
    """With one drafter under one rule.

    `acceptance` is of its drafts in all texts; `loosening` the share accepted of drafts that
    differ. A draft that the drafter gives the probability c stands with
    about c ** `sharpness`. `overhead_ns` is of a round outside both models, `draft_ns` of a token.
    `reading_ns` is what it costs plain decoding that the drafter reads a token beside it.
    `allowance_ns` is what may be spent now on finding out whether drafts pay: below 0, nothing;
    `num_in_vain` is how often in a row that was done and they did not.
    """

    def __init__(self, lossy: bool = False) -> None:
        self.acceptance = SharedAcceptance(PRIOR_ACCEPTANCE, MOST_BY_AUTO)
        self._kinds = [TextKind() for _ in range(len(CONFIDENCES) + 1)]
        self.at_once = AtOnce()
        self.loosening = Recent(0.5 * lossy, LOOSENING_MEMORY, LOOSENING_PRIOR)
        self.overhead_ns = Recent(2e6, OVERHEAD_MEMORY, OVERHEAD_PRIOR)
        self.draft_ns = Recent(0.0)
        self.reading_ns = Recent(50_000.0, READING_MEMORY, READING_PRIOR)
        self.allowance_ns = START_ALLOWANCE_NS
        self.num_in_vain = 0
        self.sharpness = 1.0

    @property
    def is_known(self) -> bool:
        """Whether it has drafted for other texts."""
        return self.draft_ns.known and self.acceptance.num_seen >= KNOWN

    def earn(self, duration_ns: float) -> None:
        """Allow so much more to be spent; less than 0 has been spent."""
        allowed = self.allowance_ns + duration_ns
        self.allowance_ns = min(MOST_ALLOWANCE_NS, max(-MOST_DEBT_NS, allowed))

    def kind_of(self, confidence: float) -> TextKind:
        """The texts of which the target is about as sure: what it can foresee, drafters can."""
        return self._kinds[bisect(CONFIDENCES, confidence)]

    def checked(self, proposal: DraftChunk, verdict: Verdict, round_ns: int) -> None:
        """A proposal was checked."""
        timings, drafted = proposal.timings, len(proposal.token_ids)
        if timings.service_ns:  # or it is the rest of what a follower proposed
            self.draft_ns.observe(timings.model_ns, drafted + proposal.ahead)
            rest = round_ns - timings.model_ns - verdict.timings.forward_ns
            self.overhead_ns.observe(max(0, rest))
        outcomes = [decision.outcome for decision in verdict.decisions]
        for outcome in outcomes:
            if outcome in (Outcome.LOOSE, Outcome.PROVISIONAL, Outcome.REJECTED):
                self.loosening.observe(outcome is not Outcome.REJECTED)
        accepted = verdict.num_accepted
        self.acceptance.checked(len(outcomes), accepted)
        chances = self.survivals(proposal.confidences[: len(outcomes)])
        if chances and not verdict.failed:
            surplus = (sum(chances) - accepted) / len(chances)
            sharpness = self.sharpness * (1.0 + SHARPNESS_STEP * surplus)
            self.sharpness = min(MOST_SHARPNESS, max(LEAST_SHARPNESS, sharpness))

    def followed(self, proposal: DraftChunk, asked_ns: int) -> None:
        """It proposed while the target decoded plainly, `asked_ns` from question to answer.

        So a drafter that was slow once is found to be quick again, though nobody waits for it.
        """
        timings, drafted = proposal.timings, len(proposal.token_ids)
        if not drafted:
            return
        # It has read and scored tokens besides, beside a busy target: it is no slower than that.
        if not self.draft_ns.known or timings.model_ns < drafted * self.draft_ns.value:
            self.draft_ns = Recent(0.0)
            self.draft_ns.observe(timings.model_ns, drafted)
        if (rest := max(0, asked_ns - timings.model_ns)) < self.overhead_ns.value:
            self.overhead_ns.observe(rest)

    def would_accept(self, agreements: Sequence[bool]) -> list[bool]:
        """Whether tokens would have been accepted, that the drafter agreed with or not.

        Of those that differ as many as were accepted lately, spread evenly.
        """
        accepted, owed = [], 0.5
        for agreed in agreements:
            owed += 0.0 if agreed else self.loosening.value
            accepted.append(agreed or owed >= 1.0)
            owed -= not agreed and owed >= 1.0
        return accepted

    def survivals(self, confidences: Sequence[float]) -> list[float]:
        """The chance of each token of a proposal to be reached and accepted."""
        loosening = self.loosening.value
        chance, chances = 1.0, []
        for confidence in confidences:
            agreed = min(1.0, max(0.0, confidence)) ** self.sharpness
            chance *= agreed + (1.0 - agreed) * loosening
            chances.append(chance)
        return chances


class Experience:
    """Of an orchestrator with its target; `running` generations share it now.

    `step_costs` are what the target says of its steps.
    """

    def __init__(self, step_costs: Sequence[MeasuredStep] = ()) -> None:
        costs = StepCosts(step_costs)
        self._costs = [costs(rows) for rows in range(MOST_ROWS)]
        self._scale, self._cold_ns = Recent(1.0), Recent(0.0)
        self._plain_ns = Recent(0.0, PLAIN_MEMORY)
        self._drafters: dict[tuple[str, str], DrafterExperience] = {}
        self._load = LoadTrials()
        self._alone_ns = ALONE_NS
        self.running = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """While a generation runs."""
        self.running += 1
        if self.running > 1:
            self._alone_ns = 0.0
        try:
            yield
        finally:
            self.running -= 1

    def with_drafter(self, drafter: str, rule: str) -> DrafterExperience:
        """That with a drafter under a rule."""
        key = drafter, rule
        if key not in self._drafters:
            self._drafters[key] = DrafterExperience(not RULE_PRESETS[rule].token_exact)
        return self._drafters[key]

    @property
    def may_draft(self) -> bool:
        """Whether generations may draft under the present load."""
        among_others = self.running > 1 or self._alone_ns < ALONE_NS
        trial = self._load.at(max(2, self.running)) if among_others else None
        return trial is None or trial.drafts

    def emitted(self, num_tokens: int, duration_ns: int) -> None:
        """One of the generations had so many tokens in this time, drafted or not."""
        if self.running == 1:
            self._alone_ns += duration_ns
        if trial := self._load.at(self.running):
            trial.emitted(num_tokens, duration_ns, self.running, self.plain_ns)

    def decoded(self, num_tokens: int, duration_ns: int) -> None:
        """So many tokens came of plain decoding in this time, one after the other."""
        if num_tokens > 0:
            self._plain_ns.observe(duration_ns, num_tokens, num_tokens)

    def stepped(self, num_rows: int, forward_ns: int) -> None:
        """The target took so long for a round of so many rows; of a shared step nobody can tell."""
        if self.running == 1 and num_rows < MOST_ROWS:
            cost = self._costs[num_rows]
            if num_rows == 1:
                self._scale.observe(forward_ns, max(1, int(cost)))
            else:
                self._cold_ns.observe(forward_ns - self._scale.value * cost)

    @property
    def plain_ns(self) -> float:
        """Time of a token of plain decoding."""
        return max(1.0, self._plain_ns.value if self._plain_ns.known else self.verify_ns(0))

    def verify_ns(self, num_drafts: int) -> float:
        """Time of a round's forward, and of what its drafts delay the others that run.

        Drafts lengthen the step for everyone in it: so they are charged to whoever sends them, and
        not sent where all together are better off without.
        """
        sharing = min(max(1, self.running), MOST_SHARING)
        alone = self._costs[sharing]
        longer = self._costs[min(sharing + num_drafts, MOST_ROWS - 1)] - alone
        # Between two rounds the processor does other things, between tokens of plain decoding none.
        cold_ns = self._cold_ns.value if num_drafts else 0.0
        return max(1.0, self._scale.value * (alone + sharing * longer) + cold_ns)

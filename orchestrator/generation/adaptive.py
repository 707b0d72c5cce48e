"""K adapts: each round drafts as many tokens as pay under its rule, none included. Pure.

The first token waits for no drafter. Where drafts paid well in other texts, all behind it are
drafted from the start. Elsewhere decoding is plain; after a while the drafter follows the text and
is asked what it would have said and what it says next. Once drafts promise more tokens a second
than plain decoding gives, rounds draft; when the rounds themselves show that they do not, decoding
is plain again, longer each time. What finding out costs is taken from an allowance, which is a
share of the time of plain decoding and what drafts have saved. Among others it drafts only where
that makes all of them together faster (`load_trials`).
"""

from __future__ import annotations

from collections.abc import Sequence

from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.rounds import DraftChunk
from orchestrator.generation.acceptance import Acceptance
from orchestrator.generation.experience import (
    MOST_ALLOWANCE_NS,
    Experience,
    Recent,
    TextKind,
)
from orchestrator.generation.following import Overtaken
from orchestrator.generation.pace import CheckedRound, NextRound
from orchestrator.generation.question import Question
from orchestrator.generation.speedup import best_k, drafting, round_ns

ENTER, ENTER_AT_ONCE = 1.1, 1.2
"""Drafting begins where it promises so many times plain decoding's tokens a second; by what other
texts were like, with the second token."""
EVIDENCE = 6
"""Tokens of this text that the promise rests on, at least."""
CONFIDENCE_MEMORY = 0.95
"""What the target's confidence in a token counts when another one has come."""
SEED_ROUNDS = 1.0
"""Rounds that the promise counts for when the first ones are measured."""
SLOWER = 0.8
"""What rounds before the last one count in the measured speed."""
SHORT_REST, FIRST_REST, LONGEST_REST = 8, 32, 128
"""Tokens of plain decoding before the drafter is asked again: where too little was found out, and
where it does not pay; that doubles."""
SELDOM = 1000
"""Tokens of plain decoding between two questions in texts of a kind where drafts do not pay."""
QUICK_NS = 500_000
"""A token's time for which these numbers of tokens are. Where tokens take longer, fewer are so much
time, and to be wrong costs fewer."""
FOLLOWING_DRAFTS, LEAST_DRAFTS = 15, 8
"""Drafts that tell something: as many as the allowance is for, within these bounds."""
FOLLOWING_SHARE = 0.02
"""Of the time of plain decoding, what may be spent on finding out whether drafts pay."""
DEARER, DEAREST = 0.25, 4.0
"""How much dearer a question gets with every one before it that was in vain, and at most."""
LIKELY_TOKENS = 64
"""How much longer a text is taken to go on, when a question has to pay."""
ENDING_NS = 6_000_000
"""The most of the first round's time, a plain token's apart, that plain decoding took to end."""
CAUGHT_UP = 0.5
"""Of a round's time outside both models, what it takes when its drafts are there already."""
HOPE = [0.985**k for k in range(1, 33)]
"""Survivals of the drafts of a very predictable text."""


class AdaptivePace:
    """Of one generation, up to `most` drafts a round; `rule` by its name."""

    def __init__(
        self, experience: Experience, drafter: str, rule: str, most: int, prompt_length: int = 0
    ) -> None:
        self._experience, self._rule, self._most = experience, rule, most
        self._drafter = experience.with_drafter(drafter, rule)
        self._exact = RULE_PRESETS[rule].token_exact
        self._acceptance = Acceptance(self._drafter.acceptance, most)
        self._confidence = Recent(0.0, CONFIDENCE_MEMORY)  # of the target in this text's tokens
        self._kind: TextKind | None = None  # of texts, which this one is
        self._gain_ns: float | None = None  # in texts of this kind, once it is worked out
        self._may_pay: bool | None = None  # with very good drafts, once it is worked out
        self._tokens = self._time_ns = 0.0  # of the rounds with drafts since they began
        self._rest = FIRST_REST
        self._begun = self._entered = False
        self._question = Question(prompt_length)
        self._saved_ns = self._saved_before_ns = 0
        self._first_k, self._first_promise = 0, 0.0
        self._undisturbed = 0  # first tokens that are left alone to time plain decoding
        # Where not much is known, what may be is tried.
        if self._drafter.is_known and experience.may_draft:
            hopeful = self._drafter.acceptance.survivals(most, hopeful=True)
            k, self._first_promise = self._best(hopeful)
            if self._first_promise * experience.plain_ns >= ENTER_AT_ONCE:
                at_once = self._drafter.at_once
                self._first_k = k if at_once.next() else 0
                self._undisturbed = LIKELY_TOKENS if at_once.samples_plain else 0
        self._at_once = self._first_k > 0
        self._turn = NextRound(0, max_plain_tokens=1 if self._first_k else None)

    @property
    def repeats(self) -> bool:
        """Nothing is repeated."""
        return False

    @property
    def saved_ns(self) -> int:
        """By the time of a plain token at each round."""
        return self._saved_ns

    def turn(self) -> NextRound:
        """The best K now."""
        return self._turn

    def checked(self, round_: CheckedRound) -> None:
        """Learn; go on, with another K perhaps, or decode plainly from here on."""
        experience, verdict = self._experience, round_.verdict
        if self._begun:  # before that its time is the prompt's
            experience.emitted(round_.num_emitted, round_.round_ns)
        if not verdict.decisions:
            self._decoded(round_)
            return
        self._begun = True
        self._question.drafted()
        self._take(round_.proposal.drafter)
        usual_ns = self._usual_ns(round_)
        self._drafter.checked(round_.proposal, verdict, usual_ns)
        experience.stepped(len(verdict.decisions) + 1, verdict.timings.forward_ns)
        self._acceptance.checked(len(verdict.decisions), verdict.num_accepted)
        if self._kind:
            self._kind.acceptance.checked(len(verdict.decisions), verdict.num_accepted)
        saved_ns = int(round_.num_emitted * experience.plain_ns - round_.round_ns)
        self._saved_ns += saved_ns
        self._drafter.earn(saved_ns)
        if self._at_once:
            self._drafter.at_once.saved(saved_ns)
        self._measure(round_._replace(round_ns=usual_ns))
        if not experience.may_draft:
            self._turn = NextRound(0)

    def _usual_ns(self, round_: CheckedRound) -> int:
        """What the round would have taken behind another one.

        The first one also ends plain decoding, which tells nothing of those behind it.
        """
        entered, self._entered = self._entered, False
        if not entered:
            return round_.round_ns
        usual_ns = int(self._round_ns(len(round_.proposal.token_ids)))
        ending_ns = ENDING_NS + int(self._experience.plain_ns)
        return min(round_.round_ns, max(usual_ns, round_.round_ns - ending_ns))

    def _decoded(self, round_: CheckedRound) -> None:
        """Tokens of plain decoding have come."""
        experience, begun = self._experience, self._begun
        self._begun = True
        self._drafter.earn(FOLLOWING_SHARE / max(1, experience.running) * round_.round_ns)
        if not begun:  # its time is the prompt's
            if self._first_k:
                self._enter(self._first_k, self._first_promise)
            return
        self._hear(round_)
        if self._turn.num_drafts:  # the drafter had nothing, or was late
            self._measure(round_)
        elif self._question.is_open:
            self._question.delayed(round_.round_ns - round_.num_emitted * experience.plain_ns)
        else:
            forward_ns = round_.verdict.timings.forward_ns
            experience.decoded(round_.num_emitted, round_.round_ns)
            experience.stepped(1, forward_ns // max(1, round_.num_emitted))

    def _hear(self, round_: CheckedRound) -> None:
        """How sure the target is of this text tells of what kind it is."""
        confidence, count = round_.verdict.plain_confidence, round_.num_emitted
        if not confidence:
            return
        self._confidence.observe(confidence * count, count, count)
        kind = self._drafter.kind_of(self._confidence.value)
        kind.num_unasked += count
        if kind is not self._kind:
            self._kind, self._gain_ns = kind, None
            if kind.is_known:
                self._acceptance.compare(kind.acceptance)

    def _measure(self, round_: CheckedRound) -> None:
        """Whether rounds with drafts are still worth it, and with how many."""
        self._tokens = self._tokens * SLOWER + round_.num_emitted
        self._time_ns = self._time_ns * SLOWER + round_.round_ns
        k, promised = self._best()
        if self._tokens * self._experience.plain_ns < self._time_ns:
            self._stop()
        else:
            measured = self._tokens / self._time_ns
            self._turn = self._drafting(k or self._turn.num_drafts, max(promised, measured))

    def nothing_drafted(self) -> None:
        """No drafts, no gain; behind other tokens there may be some."""
        self._stop()
        self._rest = min(self._rest, SHORT_REST)

    def window_failed(self) -> None:
        """It cost what the verdicts said."""

    def follows(self, num_tokens: int) -> int:
        """When it has rested and that is allowed; soon where it pays in texts of this kind.

        Seldom where it does not, or where even good drafts would not pay.
        """
        if self._first_k and not self._begun:
            # A longer proposal would not be ready when the target has read the prompt.
            return min(self._first_k, FOLLOWING_DRAFTS)
        drafter, kind, rest = self._drafter, self._kind, self._rest
        # This is asked all the time: what takes long comes last.
        if drafter.allowance_ns <= 0 or num_tokens < self._lasting(min(rest, SHORT_REST)):
            return 0
        if num_tokens < self._lasting(self._undisturbed):
            return 0
        if not self._experience.may_draft:
            return 0
        if kind and kind.is_known:
            if self._gain_ns is None:
                self._gain_ns = self._gained()
            if self._gain_ns > self._question.cost_ns(num_tokens, drafter):
                rest = min(rest, SHORT_REST)
            elif not self._gain_ns and kind.num_unasked < self._lasting(SELDOM):
                return 0
        if num_tokens < self._lasting(rest):
            return 0
        if self._may_pay is None:
            self._may_pay = self._best(HOPE[: self._most])[0] > 0
        if drafter.allowance_ns < MOST_ALLOWANCE_NS and not self._may_pay:
            return 0
        if kind:
            kind.num_unasked = 0
        self._question.ask(num_tokens)
        self._undisturbed = 0
        allowed = int(drafter.allowance_ns / max(1.0, drafter.draft_ns.value))
        return min(self._most, FOLLOWING_DRAFTS, max(LEAST_DRAFTS, allowed))

    def _gained(self) -> float:
        """What drafts may save in a text as long as most, ns; 0 where they do not pay."""
        plain_ns, (_, promised) = self._experience.plain_ns, self._best()
        return LIKELY_TOKENS * (plain_ns - 1.0 / promised) if promised * plain_ns > ENTER else 0.0

    def followed(self, overtaken: Overtaken) -> None:
        """Learn how good drafts would have been; draft from here on if that promises enough."""
        proposal = overtaken.proposal
        self._take(proposal.drafter)
        drafter = self._drafter
        spent_ns = self._question.answered(overtaken, drafter)
        drafter.earn(-spent_ns * min(DEAREST, 1.0 + DEARER * drafter.num_in_vain))
        drafter.num_in_vain += 1
        agreements = proposal.agreements
        if not agreements:
            agreements = [True] * overtaken.num_matched + [False] * overtaken.missed
        self._gain_ns = None
        accepted = drafter.would_accept(agreements)
        self._acceptance.followed(accepted)
        drafter.acceptance.followed(accepted)
        if self._kind:
            self._kind.acceptance.followed(accepted)
        k, promised = self._best()
        enough = promised * self._experience.plain_ns > ENTER
        known = self._acceptance.num_seen >= self._lasting(EVIDENCE)
        if k and enough and known:
            self._enter(k, promised)
        elif sure := self._sure_of(overtaken):
            self._enter(len(proposal.token_ids), sure)
        elif not known:
            self._rest = SHORT_REST
        elif not enough:
            self._stop()

    def _sure_of(self, overtaken: Overtaken) -> float:
        """Tokens a ns of rounds like this proposal, by its drafter's confidence; 0: too few.

        What is left of it has cost its time already. A drafter that was wrong in one place may be
        right in what would follow.
        """
        matched, proposal = overtaken.num_matched, overtaken.proposal
        chances = self._drafter.survivals(proposal.confidences[matched + overtaken.missed :])
        if not chances:
            return 0.0
        num_tokens, k = 1.0 + sum(chances), len(chances)
        usual_ns = next_ns = self._round_ns(k)
        if not overtaken.missed:
            next_ns = CAUGHT_UP * self._drafter.overhead_ns.value + self._experience.verify_ns(k)
        pays = num_tokens * self._experience.plain_ns >= ENTER * next_ns
        return num_tokens / usual_ns if pays else 0.0

    def _enter(self, k: int, promised: float) -> None:
        """Draft from here on; the promise, tokens a ns, counts as if some rounds had kept it."""
        self._drafter.num_in_vain = 0
        if not self._experience.may_draft:
            return
        self._time_ns = SEED_ROUNDS * self._round_ns(k)
        self._tokens = promised * self._time_ns
        self._turn = self._drafting(k, promised)
        self._saved_before_ns = self._saved_ns
        self._entered = True

    def _lasting(self, num_tokens: int) -> float:
        """The number of this target's tokens that take as long as so many of a quick one's."""
        return max(1.0, num_tokens * min(1.0, QUICK_NS / self._experience.plain_ns))

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        """By the drafter's confidence where it has any, else by what was accepted before."""
        if proposal.confidences:
            return self._drafter.survivals(proposal.confidences)
        return self._acceptance.survivals(min(self._most, len(proposal.token_ids)))

    def _take(self, drafter: str) -> None:
        """Another drafter may have taken over."""
        other = self._experience.with_drafter(drafter, self._rule)
        if other is not self._drafter:
            self._drafter, self._kind = other, None

    def _best(self, survivals: Sequence[float] = ()) -> tuple[int, float]:
        """The best K and its tokens a ns, with drafts as good as those so far if not as given."""
        survivals = survivals or self._acceptance.survivals(self._most)
        return best_k(self._experience, self._drafter, survivals)

    def _drafting(self, k: int, rate: float) -> NextRound:
        return drafting(self._experience, self._drafter, k, rate, self._exact)

    def _round_ns(self, k: int) -> float:
        return round_ns(self._experience, self._drafter, k)

    def _stop(self) -> None:
        """Decode plainly, and let the drafter rest, longer than the last time."""
        paid = self._turn.num_drafts and self._saved_ns > self._saved_before_ns
        self._rest = FIRST_REST if paid else min(LONGEST_REST, max(FIRST_REST, 2 * self._rest))
        self._turn, self._at_once = NextRound(0), False

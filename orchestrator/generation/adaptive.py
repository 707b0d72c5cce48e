"""Adaptive K: each round drafts as many tokens as pay off under its rule, possibly none. Pure.

The first token waits for no drafter, unless that is quick beside the target. Where drafts paid off
well in other texts, all later tokens are drafted from the start, as they are to try a new drafter.
Elsewhere decoding is plain; after a while the drafter follows the text and is queried for what it
would have proposed and what it proposes next. Once drafts promise more tokens/s than plain
decoding, rounds draft; when measured rounds show otherwise, decoding is plain again, for longer
each time. Queries are paid from an allowance: a share of the time of plain decoding plus what
drafts have saved. Concurrent generations draft only if that makes all of them together faster
(`load_trials`).
"""

from __future__ import annotations

from collections.abc import Sequence

from flyspec.drafter_names import PREDICTION
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.room import ANYWHERE, Room
from flyspec.values.rounds import DraftChunk
from orchestrator.generation.acceptance import Acceptance
from orchestrator.generation.beginning import FOLLOWING_DRAFTS, beginning
from orchestrator.generation.experience import FAR, MOST_ALLOWANCE_NS, Experience, TextKind
from orchestrator.generation.following import Overtaken
from orchestrator.generation.pace import CheckedRound, FirstToken, NextRound, Pace
from orchestrator.generation.question import Question
from orchestrator.generation.recent import Recent
from orchestrator.generation.speedup import best_k, drafting, hoped_k, lasting, round_ns

ENTER = 1.1
"""Multiple of plain decoding's tokens/s that drafting must promise to begin within a text."""
EVIDENCE = 6
"""Minimum tokens of this text that the promise must rest on."""
CONFIDENCE_MEMORY = 0.95
"""Factor by which the target's confidence in a token fades with each further token."""
SEED_ROUNDS = 1.0
"""Weight of the promise, in rounds, when the first rounds are measured."""
SLOWER = 0.8
"""Factor by which earlier rounds fade in the measured speed with each further round."""
SHORTER = 0.6
"""Share of their drafts up to which rounds are tried before drafting ends as too slow."""
SHORT_REST, FIRST_REST, LONGEST_REST = 8, 32, 128
"""Tokens of plain decoding before the drafter is queried again: short after too little evidence,
else the first, which doubles up to the longest while drafting does not pay off."""
SELDOM = 1000
"""Tokens of plain decoding between queries in kinds of text where drafts do not pay off."""
LEAST_DRAFTS = 8
"""Minimum drafts per query; up to `FOLLOWING_DRAFTS`, as many as the allowance covers."""
FOLLOWING_SHARE = 0.02
"""Share of the time of plain decoding that may be spent on queries."""
DEARER, DEAREST = 0.25, 4.0
"""Increase of a query's price, as a factor, per fruitless query before it, and its maximum."""
LATE = 1.05
"""Multiple of its usual time from which plain decoding counts as delayed by a query."""
LIKELY_TOKENS = 64
"""Assumed remaining length of a text when deciding whether a query pays off; of a longer one, as
much again."""
WORTH = 2.0
"""Multiple of a query's cost that drafts must promise to save, since many queries are in vain."""
ENDING_NS = 6_000_000
"""Maximum time of the first round, besides a plain token's, attributed to ending plain decoding."""
CAUGHT_UP = 0.5
"""Share of a round's time outside both models that remains if its drafts already exist."""
PLAIN_FIRST = FirstToken(1.0, 0)
"""A drafter as slow as the target."""
HOPE = [0.985**k for k in range(1, 33)]
"""Survivals of drafts in a very predictable text."""


class AdaptivePace(Pace):
    """The pace of one generation, with up to `most` drafts per round.

    `rule` is the rule's name, and `room` is where in a round its drafts may differ from the target.
    """

    def __init__(
        self,
        experience: Experience,
        drafter: str,
        rule: str,
        most: int,
        first: FirstToken = PLAIN_FIRST,
        room: Room = ANYWHERE,
    ) -> None:
        self._experience, self._rule, self._most = experience, rule, most
        self._drafter = experience.with_drafter(drafter, rule)
        self._exact, self._room = RULE_PRESETS[rule].token_exact, room
        self._acceptance = Acceptance(self._drafter.acceptance, most)
        self._confidence = Recent(0.0, CONFIDENCE_MEMORY)  # of the target in this text's tokens
        self._kind: TextKind | None = None  # the kind of this text
        self._gain_ns: float | None = None  # in texts of this kind; None until computed
        self._may_pay: bool | None = None  # with very good drafts; None until computed
        self._tokens = self._time_ns = 0.0  # in rounds with drafts since drafting began
        self._rest = FIRST_REST
        self._begun = self._entered = False
        self._question = Question(first.prompt_length)
        self._saved_ns = self._saved_before_ns = 0
        begins = beginning(experience, self._drafter, most, room)
        self._first_k, self._first_rate, self._at_once = begins.k, begins.rate, begins.judged
        self._first_plain = begins.num_plain  # tokens left before those rounds
        self._turn = NextRound(0, max_plain_tokens=begins.num_plain if begins.k else None)
        self._num_tokens = 0
        if self._first_plain == 1 and not first.is_delayed(self._first_k):
            self._first_plain = 0
            self._draft_first()

    @property
    def saved_ns(self) -> int:
        """Time saved so far, based on the time per plain token as of each round."""
        return self._saved_ns

    @property
    def lets_go_on(self) -> bool:
        """Not with others, for whom drafts of little worth are left out of a step."""
        return self._turn.num_drafts > 0 and self._experience.running <= 1

    def turn(self) -> NextRound:
        return self._turn

    def checked(self, round_: CheckedRound) -> None:
        """Learn from a round; continue, possibly with another K, or switch to plain decoding."""
        experience, verdict = self._experience, round_.verdict
        self._num_tokens += round_.num_emitted
        begun = self._begun  # before that, a round's time includes the prompt
        if begun:
            experience.emitted(round_.num_emitted, round_.round_ns)
        if not verdict.decisions:
            self._decoded(round_)
            return
        self._begun = True
        if round_.proposal.drafter == PREDICTION:  # says nothing about the drafter
            if begun:
                self._saved_ns += int(round_.num_emitted * experience.plain_ns - round_.round_ns)
            return
        if not begun:
            without_prompt_ns = int(self._round_ns(len(verdict.decisions)))
            round_ = round_._replace(round_ns=min(without_prompt_ns, round_.round_ns))
        self._question.drafted()
        self._take(round_.proposal.drafter)
        usual_ns, on_trial = self._usual_ns(round_), self._drafter.is_on_trial
        credit = self._drafter.checked(round_.proposal, verdict, usual_ns, self._room)
        if begun:
            num_rows = 1 + max(round_.num_drafted, len(verdict.decisions))
            experience.stepped(num_rows, verdict.timings.forward_ns)
        judged = len(verdict.decisions), verdict.num_accepted, credit
        self._acceptance.checked(*judged)
        if self._kind:
            self._kind.acceptance.checked(*judged)
        saved_ns = int(round_.num_emitted * experience.plain_ns - round_.round_ns)
        self._saved_ns += saved_ns
        if not on_trial:
            self._drafter.earn(saved_ns, experience.plain_ns)
        round_ = round_._replace(round_ns=usual_ns)
        if self._at_once:
            self._drafter.at_once.saved(round_.num_emitted * experience.plain_ns - usual_ns)
        self._measure(round_)
        if not experience.may_draft:
            self._turn = NextRound(0)

    def _usual_ns(self, round_: CheckedRound) -> int:
        """Return the time the round would have taken after another round with drafts.

        The first one also ends plain decoding, which says nothing about later rounds, nor does one
        that was interrupted.
        """
        entered, self._entered = self._entered, False
        usual_ns = int(self._round_ns(len(round_.proposal.token_ids)))
        if entered:
            ending_ns = ENDING_NS + int(self._experience.plain_ns)
            return min(round_.round_ns, max(usual_ns, round_.round_ns - ending_ns))
        if self._drafter.is_known:
            return min(round_.round_ns, int(FAR * usual_ns))
        return round_.round_ns

    def _decoded(self, round_: CheckedRound) -> None:
        experience, begun = self._experience, self._begun
        self._begun = True
        share = FOLLOWING_SHARE / max(1, experience.running)
        self._drafter.earn(share * round_.round_ns, experience.plain_ns)
        self._first_plain -= round_.num_emitted
        if not begun:  # the first round's time includes the prompt
            self._draft_first()
            return
        self._hear(round_)
        if self._turn.num_drafts and round_.asked_head:
            self._entered = False  # drafts come with the next round, and so does their gain
        elif self._turn.num_drafts:  # the drafter proposed nothing or was late
            self._measure(round_)
        elif self._question.is_open:
            usual_ns = round_.num_emitted * experience.plain_ns
            self._question.delayed(round_.round_ns - LATE * usual_ns)
        elif self._entered:  # but no draft came; the time includes ending plain decoding
            self._entered = False
        else:
            forward_ns = round_.verdict.timings.forward_ns
            experience.decoded(round_.num_emitted, round_.round_ns)
            experience.stepped(1, forward_ns // max(1, round_.num_emitted))
        self._draft_first()

    def _hear(self, round_: CheckedRound) -> None:
        """Determine the kind of text from the target's confidence."""
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
        """Update the measured speed, and choose the next K or stop drafting."""
        self._tokens = self._tokens * SLOWER + round_.num_emitted
        self._time_ns = self._time_ns * SLOWER + round_.round_ns
        k, promised = self._best()
        plain_ns, drafter = self._experience.plain_ns, self._drafter
        if drafter.is_on_trial:
            drafter.tried(round_.num_emitted * plain_ns - round_.round_ns, plain_ns)
            k = k or hoped_k(self._experience, drafter, self._most, self._room)[0]
        slower = self._tokens * plain_ns < self._time_ns
        much_shorter = 0 < k <= SHORTER * len(round_.verdict.decisions)
        if slower and much_shorter:  # what was measured says little of such rounds
            self._seed(k, promised)
        elif slower and not (k and drafter.is_on_trial):
            self._stop()
        else:
            measured = self._tokens / self._time_ns
            self._turn = self._drafting(k or self._turn.num_drafts, max(promised, measured))

    def nothing_drafted(self) -> None:
        """Stop drafting, but query soon: the drafter may propose something after other tokens."""
        self._stop()
        self._rest = min(self._rest, SHORT_REST)

    def follows(self, num_tokens: int) -> int:
        """Return the number of drafts to query for: 0 until rested and within the allowance.

        The rest is short in kinds of text where drafts pay off, long where they do not, or where
        even good drafts would not.
        """
        if self._first_k:
            # A longer proposal would not be ready when the target has read the prompt.
            at_once = self._first_plain == 1 and not self._begun
            return min(self._first_k, FOLLOWING_DRAFTS) if at_once else 0
        drafter, kind, rest = self._drafter, self._kind, self._rest
        # Called very often, so expensive checks come last.
        if drafter.allowance_ns <= 0 or num_tokens < self._lasting(min(rest, SHORT_REST)):
            return 0
        if not self._experience.may_draft:
            return 0
        if kind and (kind.is_known or drafter.is_known):
            if self._gain_ns is None:
                self._gain_ns = self._gained()
            cost_ns = self._question.cost_ns(num_tokens, drafter)
            if kind.is_known and self._gain_ns > cost_ns:
                rest = min(rest, SHORT_REST)
            elif self._is_in_vain(kind, cost_ns):
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
        allowed = int(drafter.allowance_ns / max(1.0, drafter.draft_ns.value))
        return min(self._most, FOLLOWING_DRAFTS, max(LEAST_DRAFTS, allowed))

    def _is_in_vain(self, kind: TextKind, cost_ns: float) -> bool:
        """Whether a query for `cost_ns` is unlikely to pay off in this text, of a `kind`."""
        if self._gain_ns:
            longer = max(1.0, self._num_tokens / LIKELY_TOKENS)
            return longer * self._gain_ns < WORTH * cost_ns
        own = self._acceptance.num_seen >= self._lasting(EVIDENCE)
        return (own or kind.is_known) and kind.num_unasked < self._lasting(SELDOM)

    def _gained(self) -> float:
        """Return the ns that drafts may save in a text of typical length; 0 if none."""
        plain_ns, (_, promised) = self._experience.plain_ns, self._best()
        return LIKELY_TOKENS * (plain_ns - 1.0 / promised) if promised * plain_ns > ENTER else 0.0

    def followed(self, overtaken: Overtaken) -> None:
        """Learn how good drafts would have been, and start drafting if they promise enough."""
        proposal = overtaken.proposal
        self._take(proposal.drafter)
        drafter = self._drafter
        spent_ns = self._question.answered(overtaken, drafter)
        price = min(DEAREST, 1.0 + DEARER * drafter.num_in_vain)
        drafter.earn(-price * spent_ns, self._experience.plain_ns)
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
        """Return the tokens per ns of rounds like this proposal, by its confidences; 0 if too slow.

        The rest of the proposal has already been paid for. A drafter that was wrong at one token
        may be right about those after it.
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
        """Start drafting; the promised tokens per ns count like measured rounds."""
        self._drafter.num_in_vain = 0
        if not self._experience.may_draft:
            return
        self._seed(k, promised)
        self._saved_before_ns = self._saved_ns
        self._entered = True

    def _seed(self, k: int, promised: float) -> None:
        """Draft `k` tokens per round, with the promise in place of measured rounds."""
        self._time_ns = SEED_ROUNDS * self._round_ns(k)
        self._tokens = promised * self._time_ns
        self._turn = self._drafting(k, promised)

    def _draft_first(self) -> None:
        """Start the text's first rounds with drafts, once the tokens before them are decoded."""
        if self._first_k and self._first_plain <= 0:
            k, self._first_k, self._turn = self._first_k, 0, NextRound(0)
            self._enter(k, self._first_rate)

    def _lasting(self, num_tokens: int) -> float:
        return lasting(num_tokens, self._experience)

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        """Return the drafts' survivals, by the drafter's confidences or else by past acceptance."""
        if proposal.drafter == PREDICTION:
            return ()
        if proposal.confidences:
            return self._drafter.survivals(proposal.confidences)
        return self._acceptance.survivals(min(self._most, len(proposal.token_ids)))

    def _take(self, drafter: str) -> None:
        """Switch to another drafter's experience if it has taken over."""
        other = self._experience.with_drafter(drafter, self._rule)
        if other is not self._drafter:
            self._drafter, self._kind = other, None

    def _best(self, survivals: Sequence[float] = ()) -> tuple[int, float]:
        """Return the best K and its tokens per ns, by `survivals` or else past acceptance."""
        survivals = survivals or self._acceptance.survivals(self._most)
        return best_k(self._experience, self._drafter, survivals, self._room)

    def _drafting(self, k: int, rate: float) -> NextRound:
        return drafting(self._experience, self._drafter, k, rate, self._exact)

    def _round_ns(self, k: int) -> float:
        return round_ns(self._experience, self._drafter, k)

    def _stop(self) -> None:
        """Switch to plain decoding and let the drafter rest, longer each time it does not pay."""
        paid = self._turn.num_drafts and self._saved_ns > self._saved_before_ns
        self._rest = FIRST_REST if paid else min(LONGEST_REST, max(FIRST_REST, 2 * self._rest))
        self._turn, self._at_once, self._gain_ns = NextRound(0), False, None

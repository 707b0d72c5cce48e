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
from orchestrator.generation.beginning import beginning
from orchestrator.generation.experience import FAR, Experience
from orchestrator.generation.following import FOLLOWING_DRAFTS, Overtaken
from orchestrator.generation.pace import CheckedRound, FirstToken, NextRound, Pace
from orchestrator.generation.queries import Queries
from orchestrator.generation.speedup import drafting, round_ns
from orchestrator.generation.text_evidence import ENTER, TextEvidence

SEED_ROUNDS = 1.0
"""Weight of the promise, in rounds, when the first rounds are measured."""
SLOWER = 0.8
"""Factor by which earlier rounds fade in the measured speed with each further round."""
SHORTER = 0.6
"""Share of their drafts up to which rounds are tried before drafting ends as too slow."""
FOLLOWING_SHARE = 0.02
"""Share of the time of plain decoding that may be spent on queries."""
ENDING_NS = 6_000_000
"""Maximum time of the first round, besides a plain token's, attributed to ending plain decoding."""
PLAIN_FIRST = FirstToken(1.0, 0)
"""A drafter as slow as the target."""


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
        self._experience, self._exact = experience, RULE_PRESETS[rule].token_exact
        self._text = TextEvidence(experience, drafter, rule, most, room)
        self._queries = Queries(first.prompt_length)
        self._tokens = self._time_ns = 0.0  # in rounds with drafts since drafting began
        self._begun = self._entered = False
        self._saved_ns = self._saved_before_ns = 0
        begins = beginning(experience, self._text)
        self._first_k, self._first_rate, self._at_once = begins.k, begins.rate, begins.judged
        self._first_plain = begins.num_plain  # tokens left before those rounds
        self._turn = NextRound(0, max_plain_tokens=begins.num_plain if begins.k else None)
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
        self._text.num_tokens += round_.num_emitted
        begun = self._begun  # before that, a round's time includes the prompt
        if begun:
            experience.emitted(round_.num_emitted, round_.round_ns)
        if not verdict.decisions:
            self._decoded(round_)
            return
        self._begun = True
        if round_.proposal.drafter == PREDICTION:  # says nothing about the drafter
            if begun:
                self._saved_ns += int(round_.saved_ns(experience.plain_ns))
            return
        if not begun:
            without_prompt_ns = int(self._round_ns(len(verdict.decisions)))
            round_ = round_._replace(round_ns=min(without_prompt_ns, round_.round_ns))
        self._queries.drafted()
        self._text.take(round_.proposal.drafter)
        drafter, usual_ns = self._text.drafter, self._usual_ns(round_)
        on_trial = drafter.is_on_trial
        self._text.checked(round_.proposal, verdict, usual_ns)
        if begun:
            num_rows = 1 + max(round_.num_drafted, len(verdict.decisions))
            experience.stepped(num_rows, verdict.timings.forward_ns)
        saved_ns = int(round_.saved_ns(experience.plain_ns))
        self._saved_ns += saved_ns
        if not on_trial:
            drafter.earn(saved_ns, experience.plain_ns)
        round_ = round_._replace(round_ns=usual_ns)
        if self._at_once:
            drafter.at_once.saved(round_.saved_ns(experience.plain_ns))
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
        if self._text.drafter.is_known:
            return min(round_.round_ns, int(FAR * usual_ns))
        return round_.round_ns

    def _decoded(self, round_: CheckedRound) -> None:
        experience, begun = self._experience, self._begun
        self._begun = True
        share = FOLLOWING_SHARE / max(1, experience.running)
        self._text.drafter.earn(share * round_.round_ns, experience.plain_ns)
        self._first_plain -= round_.num_emitted
        if not begun:  # the first round's time includes the prompt
            self._draft_first()
            return
        self._text.hear(round_.verdict, round_.num_emitted)
        if self._turn.num_drafts and round_.asked_head:
            self._entered = False  # drafts come with the next round, and so does their gain
        elif self._turn.num_drafts:  # the drafter proposed nothing or was late
            self._measure(round_)
        elif self._queries.is_open:
            self._queries.delayed(round_.round_ns, round_.num_emitted * experience.plain_ns)
        elif self._entered:  # but no draft came; the time includes ending plain decoding
            self._entered = False
        else:
            forward_ns = round_.verdict.timings.forward_ns
            experience.decoded(round_.num_emitted, round_.round_ns)
            experience.stepped(1, forward_ns // max(1, round_.num_emitted))
        self._draft_first()

    def _measure(self, round_: CheckedRound) -> None:
        """Update the measured speed, and choose the next K or stop drafting."""
        self._tokens = self._tokens * SLOWER + round_.num_emitted
        self._time_ns = self._time_ns * SLOWER + round_.round_ns
        k, promised = self._text.best()
        plain_ns, drafter = self._experience.plain_ns, self._text.drafter
        if drafter.is_on_trial:
            drafter.tried(round_.saved_ns(plain_ns), plain_ns)
            k = k or self._text.hoped()[0]
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
        self._queries.rest_briefly()

    def follows(self, num_tokens: int) -> int:
        """Return how many drafts to query for now, in plain decoding; 0: none."""
        if self._first_k:
            # A longer proposal would not be ready when the target has read the prompt.
            at_once = self._first_plain == 1 and not self._begun
            return min(self._first_k, FOLLOWING_DRAFTS) if at_once else 0
        if not self._experience.may_draft:
            return 0
        return self._queries.num_drafts(self._text, num_tokens)

    def followed(self, overtaken: Overtaken) -> None:
        """Learn how good drafts would have been, and start drafting if they promise enough."""
        text, plain_ns = self._text, self._experience.plain_ns
        text.take(overtaken.proposal.drafter)
        self._queries.answered(overtaken, text.drafter, plain_ns)
        text.followed(overtaken)
        k, promised = text.best()
        enough = promised * plain_ns > ENTER
        if k and enough and text.is_enough:
            self._enter(k, promised)
        elif sure := text.sure_of(overtaken):
            self._enter(len(overtaken.proposal.token_ids), sure)
        elif not text.is_enough:
            self._queries.rest_briefly()
        elif not enough:
            self._stop()

    def _enter(self, k: int, promised: float) -> None:
        """Start drafting; the promised tokens per ns count like measured rounds."""
        self._text.drafter.num_in_vain = 0
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

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        return () if proposal.drafter == PREDICTION else self._text.survivals(proposal)

    def _drafting(self, k: int, rate: float) -> NextRound:
        return drafting(self._experience, self._text.drafter, k, rate, self._exact)

    def _round_ns(self, k: int) -> float:
        return round_ns(self._experience, self._text.drafter, k)

    def _stop(self) -> None:
        """Switch to plain decoding and let the drafter rest, longer each time it does not pay."""
        paid = self._turn.num_drafts > 0 and self._saved_ns > self._saved_before_ns
        self._queries.rest(paid)
        self._turn, self._at_once = NextRound(0), False

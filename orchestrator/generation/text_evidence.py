"""What is known of drafts in one text: how many are accepted, in what kind of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from flyspec.rules.room import ANYWHERE, Room
from flyspec.values.rounds import DraftChunk, Verdict
from orchestrator.generation.acceptance import Acceptance
from orchestrator.generation.experience import Experience, TextKind
from orchestrator.generation.following import Overtaken
from orchestrator.generation.recent import Recent
from orchestrator.generation.speedup import best_k, round_ns

ENTER = 1.1
"""Multiple of plain decoding's tokens/s that drafting must promise to begin within a text."""
EVIDENCE = 6
"""Minimum tokens of this text that the promise must rest on."""
CONFIDENCE_MEMORY = 0.95
"""Factor by which the target's confidence in a token fades with each further token."""
QUICK_NS = 500_000
"""Time per token of plain decoding that numbers of tokens are meant for. Slower targets have fewer
tokens in the same time, and being wrong costs them fewer."""
LIKELY_TOKENS = 64
"""Assumed remaining length of a text; of a longer one, as much again."""
CAUGHT_UP = 0.5
"""Share of a round's time outside both models that remains if its drafts already exist."""
HOPE = [0.985**k for k in range(1, 33)]
"""Survivals of drafts in a very predictable text."""


class TextEvidence:
    """The evidence of one text, with up to `most` drafts per round.

    `drafter` is the experience with the current drafter in all texts. `kind` is the kind of text,
    None until the target has said how sure it is. `num_tokens` is the length of the text so far.
    """

    def __init__(
        self, experience: Experience, drafter: str, rule: str, most: int, room: Room = ANYWHERE
    ) -> None:
        self._experience, self._rule, self._room = experience, rule, room
        self.drafter = experience.with_drafter(drafter, rule)
        self.most = most
        self.kind: TextKind | None = None
        self.num_tokens = 0
        self._acceptance = Acceptance(self.drafter.acceptance, most)
        self._confidence = Recent(0.0, CONFIDENCE_MEMORY)  # of the target in this text's tokens
        self._gain_ns: float | None = None  # None until computed
        self._may_pay: bool | None = None

    def take(self, drafter: str) -> None:
        """Switch to another drafter's experience if it has taken over."""
        other = self._experience.with_drafter(drafter, self._rule)
        if other is not self.drafter:
            self.drafter, self.kind = other, None

    def hear(self, verdict: Verdict, num_emitted: int) -> None:
        """Determine the kind of text from the target's confidence in tokens decoded plainly."""
        confidence = verdict.plain_confidence
        if not confidence:
            return
        self._confidence.observe(confidence * num_emitted, num_emitted, num_emitted)
        kind = self.drafter.kind_of(self._confidence.value)
        kind.num_unasked += num_emitted
        if kind is not self.kind:
            self.kind, self._gain_ns = kind, None
            if kind.is_known:
                self._acceptance.compare(kind.acceptance)

    def checked(self, proposal: DraftChunk, verdict: Verdict, round_ns: int) -> None:
        """Learn from the verdict on a proposal; a round like it takes `round_ns`."""
        credit = self.drafter.checked(proposal, verdict, round_ns, self._room)
        judged = len(verdict.decisions), verdict.num_accepted, credit
        self._acceptance.checked(*judged)
        if self.kind:
            self.kind.acceptance.checked(*judged)
        self._gain_ns = None

    def followed(self, overtaken: Overtaken) -> None:
        """Learn from what the drafter would have proposed during plain decoding."""
        agreements = overtaken.proposal.agreements
        if not agreements:
            agreements = [True] * overtaken.num_matched + [False] * overtaken.missed
        accepted = self.drafter.would_accept(agreements)
        self._acceptance.followed(accepted)
        self.drafter.acceptance.followed(accepted)
        if self.kind:
            self.kind.acceptance.followed(accepted)
        self._gain_ns = None

    @property
    def is_enough(self) -> bool:
        """Whether the text itself has shown how many drafts are accepted."""
        return self._acceptance.num_seen >= self.lasting(EVIDENCE)

    def best(self, survivals: Sequence[float] = ()) -> tuple[int, float]:
        """Return the best K and its tokens per ns, by `survivals` or else past acceptance."""
        survivals = survivals or self._acceptance.survivals(self.most)
        return best_k(self._experience, self.drafter, survivals, self._room)

    def hoped(self) -> tuple[int, float]:
        """Return the best K and its tokens per ns, by the drafter's acceptance in all texts.

        Optimistic on little evidence: a drafter of which nothing is known is taken for very good.
        """
        return self.best(self.drafter.acceptance.survivals(self.most, hopeful=True))

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        """Return the drafts' survivals, by the drafter's confidences or else by past acceptance.

        What is said of a draft depends on those before it, not on itself or on what follows.
        """
        chances = self.drafter.survivals(proposal.confidences)
        if (known := len(chances)) < (count := min(self.most, len(proposal.token_ids))):
            least = chances[-1] if chances else 1.0
            usual = self._acceptance.survivals(count)
            chances += [min(least, chance) for chance in usual[known:]]
        return chances

    def sure_of(self, overtaken: Overtaken) -> float:
        """Return the tokens per ns of rounds like this proposal, by its confidences; 0 if too slow.

        The rest of the proposal has already been paid for. A drafter that was wrong at one token
        may be right about those after it.
        """
        matched, proposal = overtaken.num_matched, overtaken.proposal
        chances = self.drafter.survivals(proposal.confidences[matched + overtaken.missed :])
        if not chances:
            return 0.0
        num_tokens, k = 1.0 + sum(chances), len(chances)
        usual_ns = next_ns = round_ns(self._experience, self.drafter, k)
        if not overtaken.missed:
            next_ns = CAUGHT_UP * self.drafter.overhead_ns.value + self._experience.verify_ns(k)
        pays = num_tokens * self._experience.plain_ns >= ENTER * next_ns
        return num_tokens / usual_ns if pays else 0.0

    @property
    def gain_ns(self) -> float:
        """The ns that drafts may save in `LIKELY_TOKENS` more tokens; 0 if none."""
        if self._gain_ns is None:
            plain_ns, (_, rate) = self._experience.plain_ns, self.best()
            pays = rate * plain_ns > ENTER
            self._gain_ns = LIKELY_TOKENS * (plain_ns - 1.0 / rate) if pays else 0.0
        return self._gain_ns

    @property
    def likely_gain_ns(self) -> float:
        """The ns that drafts may save in the rest of the text."""
        return self.gain_ns * max(1.0, self.num_tokens / LIKELY_TOKENS)

    @property
    def may_pay(self) -> bool:
        """Whether very good drafts would pay off."""
        if self._may_pay is None:
            self._may_pay = self.best(HOPE[: self.most])[0] > 0
        return self._may_pay

    def lasting(self, num_tokens: float) -> float:
        """Return how many of this target's tokens take as long as `num_tokens` of a quick one's."""
        return max(1.0, num_tokens * min(1.0, QUICK_NS / self._experience.plain_ns))

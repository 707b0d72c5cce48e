"""Chances of drafts to be accepted, with their uncertainty; recent evidence counts most. Pure.

A draft that equals the target's token is accepted; one that differs is where the rule's window has
room, in a share of cases that is learned. The shares of drafts that are equal, by position, are
those of all texts with the drafter and rule. A text is described by one number: its misses, as a
multiple of those that other texts lead one to expect (a Gamma distribution).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from flyspec.recent import Share
from flyspec.rules.room import Room
from flyspec.values.rounds import Decision, Outcome

MEMORY = 0.999
"""Factor by which the evidence of all texts fades with each draft: about 1,000 drafts count."""
TEXT_MEMORY = 0.97
"""The same for a single text: about 33 drafts count."""
PRIOR = 0.8
"""Share of drafts that equal the target's tokens before anything is known."""
PRIOR_WEIGHT = 4.0
"""Weight of that share, in drafts."""
GRADES = 16
"""Distinguished confidences of a drafter."""


class SharedAcceptance:
    """Evidence of all texts with one drafter and rule."""

    def __init__(self, lossy: bool, most: int) -> None:
        self.matches = Share()
        self._positions = [Share() for _ in range(most)]
        self._grades = [Share() for _ in range(GRADES)]
        self._loosened = Share(PRIOR_WEIGHT, PRIOR_WEIGHT / 2 if lossy else 0.0)
        self._texts = Share(), Share()  # squared differences, and what chance explains of them

    @property
    def mean(self) -> float:
        """Share of reached drafts that equal the target's token."""
        return self.matches.value(PRIOR, PRIOR_WEIGHT)

    def loosened(self, z: float = 0.0) -> float:
        """Return the share accepted of drafts that differ where they may."""
        share, seen = self._loosened.held / self._loosened.seen, self._loosened.seen
        error = math.sqrt(share * (1.0 - share) / (seen + 1.0))
        return min(1.0, max(0.0, share + z * error))

    @property
    def text_weight(self) -> float:
        """Weight in one text, in misses, of what others expect: large where texts are alike."""
        differing, chance = self._texts
        variance = (1.0 + max(0.0, differing.held - chance.held)) / (1.0 + differing.seen)
        return min(1.0 / (1.0 - TEXT_MEMORY), 1.0 / max(variance, 1e-9))

    def positions(self, most: int) -> list[float]:
        """Return for each position the share of drafts reached there that equal the target's."""
        usual = PRIOR_WEIGHT * self.mean
        shares = self._positions[:most]
        return [(share.held + usual) / (share.seen + PRIOR_WEIGHT) for share in shares]

    def checked(
        self, decisions: Sequence[Decision], confidences: Sequence[float], room: Room
    ) -> list[bool]:
        """Learn from decisions; return of each draft that was reached whether it matched."""
        matches = []
        for index, decision in enumerate(decisions):
            if decision.outcome is Outcome.NOT_REACHED:
                break
            matched = decision.outcome is Outcome.EXACT
            matches.append(matched)
            if index < len(self._positions):
                self._positions[index].observe(matched, MEMORY)
            if index < len(confidences):
                self._grade(confidences[index]).observe(matched, MEMORY)
            if not matched and room.at(index, len(decisions)):
                self._loosened.observe(decision.outcome is not Outcome.REJECTED, MEMORY)
        self.matches.observe(sum(matches), MEMORY, len(matches))
        return matches

    def ended(self, text: Acceptance) -> None:
        """Learn from a whole text how much texts differ."""
        if expected := text.expected:
            differing, chance = self._texts
            differing.observe((text.misses / expected - 1.0) ** 2, TEXT_MEMORY)
            chance.observe(1.0 / expected, TEXT_MEMORY)

    def _grade(self, confidence: float) -> Share:
        return self._grades[min(GRADES - 1, int(max(0.0, confidence) * GRADES))]

    def chance(self, confidence: float) -> float:
        """Return the chance that a draft of this confidence is accepted, where it may differ."""
        confidence = min(1.0, max(0.0, confidence))
        matches = self._grade(confidence).value(confidence, PRIOR_WEIGHT)
        return matches + (1.0 - matches) * self.loosened()

    def confidence_for(self, chance: float) -> float:
        """Return the least confidence at which drafts are accepted with at least this chance."""
        grades = (grade / GRADES for grade in range(GRADES))
        return next((c for c in grades if self.chance(c) >= chance), 1.0 - 1.0 / GRADES)


class Acceptance:
    """The chances of one text's drafts."""

    def __init__(self, shared: SharedAcceptance) -> None:
        self._shared = shared
        self.misses = self.expected = 0.0

    def saw(self, matches: Sequence[bool], in_round: bool = True) -> None:
        """Learn of consecutive tokens whether the drafter's equalled the target's."""
        count = len(matches)
        self.fade(count)
        usual = self._shared.positions(count) if in_round else [self._shared.mean] * count
        self.misses += count - sum(matches)
        self.expected += count - sum(usual)

    def fade(self, num_tokens: int) -> None:
        """Forget as much as with so many drafts."""
        fade = TEXT_MEMORY**num_tokens
        self.misses, self.expected = self.misses * fade, self.expected * fade

    def equal(self, most: int, z: float = 0.0) -> list[float]:
        """Return for each position the chance of a draft reached there to equal the target's token.

        It is `z` standard errors above what is known of this text.
        """
        weight = self._shared.text_weight
        misses, expected = self.misses + weight, self.expected + weight
        ratio = max(0.0, misses - z * math.sqrt(misses)) / expected
        chances = self._shared.positions(most)
        return [max(0.0, 1.0 - ratio * (1.0 - chance)) for chance in chances]

    def accepted(self, most: int, room: Room, z: float = 0.0) -> list[float]:
        """Return how many drafts of a round of 1 up to `most` are accepted on average."""
        equal, loosened = self.equal(most, z), self._shared.loosened(z)
        either = [chance + (1.0 - chance) * loosened for chance in equal]
        numbers: list[float] = []
        chance, number = 1.0, 0.0  # to get to a position, and the drafts accepted until there
        judged = room.length or most
        for first in range(0, most, judged + 1):  # behind a window's round is a bonus token
            free = [(chance, number)]
            for index in range(first, min(most, first + judged)):
                chance *= either[index]
                number += chance
                free.append((chance, number))
            for k in range(1, min(most - first, judged + 1) + 1):
                begins = max(0, min(k, judged) - room.reach) if room.reach else min(k, judged)
                chance, number = free[begins]
                for index in range(first + begins, first + k):
                    chance *= equal[index]
                    number += chance
                numbers.append(number)
        return numbers

    def chances(self, confidences: Sequence[float], most: int) -> list[float]:
        """Return each draft's chance to be reached and accepted, by confidence as far as known.

        It depends on the drafts before it, not on itself or on what follows.
        """
        shared, known = self._shared, len(confidences)
        loosened = shared.loosened()
        usual = [m + (1.0 - m) * loosened for m in self.equal(most)[known:]]
        return list(accumulate([*map(shared.chance, confidences), *usual], mul))

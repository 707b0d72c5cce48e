"""Stretches of a round: consecutive drafts that one rule judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flyspec.engine.autojudge import AutoJudge
from flyspec.engine.sampling import SECOND_STREAM, TARGET_STREAM
from flyspec.rules import Rule
from flyspec.validation import distribution_spec
from flyspec.values.rounds import Budget, DistributionSpec, RuleSegment
from flyspec.values.tokens import SamplingParams
from verify_service.rules.criteria import Measure
from verify_service.rules.guard import Purse
from verify_service.rules.inquiry import THREE_LOGITS, Inquiry, Round
from verify_service.rules.presets import Composition, compose
from verify_service.rules.speculative_sampling import Chance, Correction


class Stretch(NamedTuple):
    """The drafts from index `first` on, up to the next stretch, and their resolved rule.

    `budget` is the rule's own. `spec` says which draft distributions it needs.
    """

    first: int
    rule_index: int
    rule: Rule
    budget: Budget
    parts: Composition
    spec: DistributionSpec | None

    @property
    def samples(self) -> bool:
        """True if drafts are judged by p / q instead of by a criterion."""
        return self.spec is not None and self.spec.draw_from_it

    @property
    def num_samples(self) -> int:
        """Number of the target's samples that a draft may match, at temperature > 0."""
        return 1 if self.samples else self.parts.preset.samples

    @property
    def measures(self) -> Sequence[Measure]:
        """Questions about its drafts, besides `THREE_LOGITS`."""
        if self.samples:
            return Chance(self.parts.loosening), Correction(self.parts.loosening)
        criterion = self.parts.criterion
        return () if criterion.never or criterion.always else (criterion,)


def stretches_of(
    rules: Sequence[Rule],
    segments: Sequence[RuleSegment],
    sampling: SamplingParams,
    start_position: int,
    num_drafts: int,
    autojudge: AutoJudge | None = None,
) -> list[Stretch]:
    """Divide a round's drafts among resolved rules; without drafts there is one stretch of none.

    Each segment's `start_position` is absolute, the first not after the round's.
    """
    found: list[Stretch] = []
    for segment in segments or (RuleSegment(start_position),):
        first = max(0, segment.start_position - start_position)
        if found and first >= num_drafts:
            break
        if found and found[-1].first == first:
            found.pop()
        rule = rules[segment.rule_index]
        spec = distribution_spec(rule, sampling)
        parts = compose(rule, autojudge)
        found.append(Stretch(first, segment.rule_index, rule, segment.budget, parts, spec))
    return found


def by_draft(stretches: Sequence[Stretch], num_drafts: int) -> list[Stretch]:
    """Return the stretch of each draft."""
    ends = [*(stretch.first for stretch in stretches[1:]), num_drafts]
    return [s for s, end in zip(stretches, ends, strict=True) for _ in range(s.first, end)]


def purses_of(stretches: Sequence[Stretch], whole: Purse) -> dict[int, Purse]:
    """Return each rule's purse by its index, all of them within the round's."""
    purses: dict[int, Purse] = {}
    for stretch in stretches:
        if stretch.rule_index not in purses:
            purses[stretch.rule_index] = Purse(stretch.budget, whole)
    return purses


def inquire(stretches: Sequence[Stretch], round_: Round) -> Inquiry:
    """Return what their rules need to know of a round."""
    num_samples = max(stretch.num_samples for stretch in stretches)
    if round_.sampling.greedy:
        num_samples = 1
    measures = dict.fromkeys(m for stretch in stretches for m in stretch.measures)
    streams = (TARGET_STREAM, SECOND_STREAM)[:num_samples]
    return Inquiry(round_, streams, (THREE_LOGITS, *measures))

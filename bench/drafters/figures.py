"""A drafter's figures on a set of prompts, and whether the composed one keeps up with its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flyspec.drafter_names import DRAFTER_KINDS
from flyspec.speculation_length import SpeculationLength
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.modes import FlyspecMode, Sample
from flyspec_lab.bench.report import Ratio, compared, report
from flyspec_lab.bench.summaries import grouped

COMPOSED = "composed"
PARTS = frozenset(DRAFTER_KINDS) - {"multi_level", COMPOSED}
"""What the composed drafter is made of, where it is there."""
WITHIN = 0.05
"""How far the composed drafter may be below the best of its parts, in tokens per second."""


@dataclass(frozen=True)
class DrafterFigures:
    """A drafter at one K on a set. Times are means in ms; None if there were no such steps.

    `tokens_per_round` counts the target's own token, `worst_tokens_per_round` is that of the prompt
    with fewest. `draft_ms` is the time in the draft model or head per proposal, 0 where there is
    none, `target_ms` that of a target step (round), both without the first round, which reads the
    prompt. `other_ms` is the median of what a round takes besides: messages, retrieval, waiting.
    `ratio` is of tokens per second to plain decoding; `worst_prompt` says where it is lowest.
    `same` texts of `prompts` equal plain decoding's.
    """

    set: str
    drafter: str
    num_speculative_tokens: SpeculationLength
    prompts: int
    tokens_per_round: float
    worst_tokens_per_round: float
    draft_ms: float | None
    target_ms: float | None
    other_ms: float | None
    ratio: Ratio
    worst_prompt: str
    same: int


@dataclass(frozen=True)
class ComposedCheck:
    """The composed drafter's tokens per second over those of its best part on a set, at one K."""

    set: str
    num_speculative_tokens: SpeculationLength
    best: str
    ratio: Ratio
    tokens_per_round: float
    best_tokens_per_round: float

    @property
    def holds(self) -> bool:
        return self.ratio.median >= 1.0 - WITHIN


def figures(
    modes: Sequence[FlyspecMode], samples: Sequence[Sample], where: Mapping[str, Sequence[str]]
) -> list[DrafterFigures]:
    """Return the figures of every mode with drafts, by set; `where` names each set's prompts."""
    by_name = {mode.name: mode.options for mode in modes}
    of_mode = grouped(samples, lambda s: (s.group, s.mode))
    found = []
    for name, reports in report(samples).items():
        for each in reports:
            if each.mode == PLAIN:
                continue
            options, of = by_name[each.mode], of_mode[name, each.mode]
            k = options.num_speculative_tokens
            assert k is not None
            assert each.mean_accepted_tokens is not None
            ratio = each.ratios[PLAIN]
            found.append(
                DrafterFigures(
                    name,
                    options.drafter,
                    k,
                    each.prompts,
                    each.mean_accepted_tokens,
                    min(map(_tokens_per_round, grouped(of, lambda s: s.prompt).values())),
                    _draft_ms(of),
                    _target_ms(of),
                    each.round_overhead_p50_ms,
                    ratio,
                    where[name][ratio.worst_prompt],
                    each.same_as_plain or 0,
                )
            )
    return found


def plain_step_ms(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Return the time of a target step of plain decoding by set, ms."""
    plain = [s for s in samples if s.mode == PLAIN]
    return {name: _target_ms(of) for name, of in grouped(plain, lambda s: s.group).items()}


def composed_checks(modes: Sequence[FlyspecMode], samples: Sequence[Sample]) -> list[ComposedCheck]:
    """Compare the composed drafter with the fastest of its parts, on each set and at each K.

    The fastest part is the one beside which it looks worst. Without it, or without parts, there is
    nothing to compare.
    """
    by_name = {mode.name: mode.options for mode in modes}
    cells = grouped(
        (s for s in samples if s.mode != PLAIN),
        lambda s: (s.group, by_name[s.mode].num_speculative_tokens, by_name[s.mode].drafter),
    )
    found = []
    for (name, k, drafter), own in cells.items():
        parts = {
            part: compared(own, cells[name, k, part]) for part in PARTS if (name, k, part) in cells
        }
        if drafter != COMPOSED or k is None or not parts:
            continue
        best = min(parts, key=lambda part: parts[part].median)
        theirs = cells[name, k, best]
        rounds = _tokens_per_round(own), _tokens_per_round(theirs)
        found.append(ComposedCheck(name, k, best, parts[best], *rounds))
    return found


def _tokens_per_round(samples: Sequence[Sample]) -> float:
    return sum(s.tokens for s in samples) / max(1, sum(s.rounds for s in samples))


def _draft_ms(samples: Sequence[Sample]) -> float | None:
    # A first round without drafts has none to leave out.
    proposals = sum(s.spec_steps - (s.opening_draft_ns > 0) for s in samples)
    spent = sum(s.draft_ns - s.opening_draft_ns for s in samples)
    return spent / proposals / 1e6 if proposals > 0 else None


def _target_ms(samples: Sequence[Sample]) -> float | None:
    steps = sum(s.rounds - 1 for s in samples if s.rounds > 1)
    spent = sum(s.target_ns - s.opening_target_ns for s in samples if s.rounds > 1)
    return spent / steps / 1e6 if steps else None

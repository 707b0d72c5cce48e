"""Fuzzy speculative decoding's study, by its paper's protocol (arXiv 2502.20704).

T of each divergence where the rule is as fast as exact speculation, in three trials, with greedy
and with sampled texts (what is rejected is replaced by the target's most likely token, or by a
sample of the target); against chance, and against sending problems to draft or target at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flyspec.cli.conditions import Condition
from flyspec.rules import Divergence, Rule
from flyspec.tables import FittedTable, make_table
from flyspec_lab.bench.conditions import EXACT, PLAIN
from flyspec_lab.compare import ConditionReport
from flyspec_lab.curves import AtEqualSpeed
from flyspec_lab.loss_bound import LossBound, loss_bound
from flyspec_lab.statistics import POINT, upper_bound
from flyspec_lab.studies.page import PageSection
from flyspec_lab.studies.study import ClaimFinding, Found, PaperClaim, Study, with_bounds
from flyspec_lab.studies.thresholds import exact_speculation, threshold_rows, threshold_table

SOURCE = "Fuzzy Speculative Decoding, arXiv 2502.20704"
GREEDY, SAMPLED = "greedy", "sampled"
TRIALS = 3

# Thresholds around where the bundled pair is as fast as exact speculation, and up to where hardly
# any draft is rejected. The released code's form judges matches too, so that strict thresholds are
# slower than exact speculation; `fuzzy` never is.
_GRIDS: Mapping[str, Mapping[Divergence, Sequence[float]]] = {
    "fuzzy": {
        Divergence.JS: (0.02, 0.05, 0.1, 0.2),
        Divergence.KL: (0.05, 0.15, 0.4, 0.8),
        Divergence.TV: (0.05, 0.1, 0.2, 0.4),
    },
    "fuzzy-reference": {
        Divergence.JS: (0.01, 0.03, 0.1, 0.4),
        Divergence.KL: (0.03, 0.1, 0.5, 1.5),
        Divergence.TV: (0.04, 0.1, 0.3, 0.5),
    },
}
_FUZZY = tuple(
    Condition(
        f"{name} {divergence.name}, T = {value:g}",
        Rule(name, divergence=divergence, divergence_threshold=value),
    )
    for name, grids in _GRIDS.items()
    for divergence, values in grids.items()
    for value in values
)
TOTAL_VARIATION = Condition(
    "fuzzy, TV, T = 0.3",
    Rule("fuzzy", divergence=Divergence.TV, divergence_threshold=0.3),
)
"""What other studies compare besides the preset."""
_CONTROLS = tuple(
    Condition(f"random, r = {share:g}", Rule("random", random_acceptance=share))
    for share in (0.3, 0.6, 0.9)
)
_RULES = (EXACT, *_FUZZY, *_CONTROLS)


def sampled_bounds(found: Found) -> list[tuple[ConditionReport, LossBound]]:
    """Return the conditions for which N·%M_D·T bounds the loss if they are sampled."""
    assert found.answered is not None
    bounds = []
    for arm, report in found.pairs:
        drafted = found.answered.column(arm.name, "num_accepted_draft_tokens").sum()
        bound = loss_bound(
            arm.rule, report.tokens / report.samples, float(drafted) / max(1, report.tokens)
        )
        if bound is not None:
            bounds.append((report, bound))
    return bounds


def bound_table(found: Found) -> FittedTable:
    """Return the bounds beside what was lost."""
    plain = next(report for _, report in found.pairs if report.condition == PLAIN)
    rows = []
    for report, bound in sampled_bounds(found):
        lost = "-"
        if plain.accuracy is not None and report.accuracy is not None:
            lost = f"{plain.accuracy.value - report.accuracy.value:.1%}"
        rows.append(
            [report.condition, f"{bound.tokens:.1f}", f"{bound.draft_share:.1%}", str(bound), lost]
        )
    return make_table(
        ["decoding", "N", "%M_D", "N·%M_D·T", "lost here"], rows, "the bound on the loss"
    )


_THRESHOLDS_TEXT = (
    "T* is the threshold at which a rule has as many tokens per round, or per second, as exact "
    "speculation (`{base}`); between two thresholds that were tried, everything is on the line "
    "between them. `≤`: all thresholds are faster, and the figures are those of the slowest; `-`: "
    "all are slower. `fuzzy` accepts what matches, so that it is never slower per "
    "round than `exact`; `fuzzy-reference`, the released code's form, judges matches as well. "
    "Recovery is relative to plain decoding, the score's difference to exact speculation; each "
    "resample of the problems finds its own T*. Trials: every third problem; of their recoveries "
    "mean and standard deviation."
)
_BOUND = (
    "Where tokens are sampled from the distributions that are compared, and by total variation, "
    "the paper bounds what the mean of any score from 0 to 1 can lose: N·%M_D·T, for texts of N "
    "tokens of which the share %M_D was drafted and accepted. It does not hold for JS and KL, "
    "whose T is no total variation, nor for greedy decoding. At 1 and above it says nothing."
)


def _thresholds_and_bound(found: Found) -> list[PageSection]:
    """Return the sections on thresholds at equal speed, and on the bound where it holds."""
    texts = found.answered
    if texts is None or not texts.has_answers or texts.missing:
        return []
    rows = threshold_rows(texts, TRIALS)
    text = _THRESHOLDS_TEXT.format(base=rows[0].base)
    heading = "Thresholds as fast as exact speculation"
    sections = [PageSection(heading, [text], [threshold_table(rows)])]
    if found.part == SAMPLED:
        sections.append(PageSection("The paper's bound", [_BOUND], [bound_table(found)]))
    return sections


def _beats_chance(found: Found) -> ClaimFinding:
    """Whether each threshold keeps more answers than `random` at the same tokens per round."""
    names = {report.condition for _, report in found.of("fuzzy", divergence=Divergence.JS)}
    leads = [
        cost.acceptance
        for cost in found.equal_costs
        if cost.condition in names and cost.of.startswith("random")
    ]
    return _above(leads, "tokens a round", 1.0, "no threshold accepts as much as random does")


def _beats_allocation(found: Found) -> ClaimFinding:
    """Whether each threshold is above the line from plain decoding to the draft model alone.

    One that is slower than plain decoding has no line to be above, and leaves it open.
    """
    names = {report.condition for _, report in found.of("fuzzy", divergence=Divergence.JS)}
    leads = [
        lead.at for lead in found.allocations if lead.large == PLAIN and lead.condition in names
    ]
    holds, figures = _above(leads, "tokens/s", 1e9, "no threshold is as fast as plain decoding")
    if slower := leads.count(None):
        figures += f"; {slower} of {len(leads)} thresholds are slower than plain decoding"
    return ClaimFinding(None if holds and slower else holds, figures)


def _above(
    leads: Sequence[AtEqualSpeed | None], unit: str, scale: float, otherwise: str
) -> ClaimFinding:
    known = [lead for lead in leads if lead is not None]
    if not known:
        return ClaimFinding(None, otherwise)
    shown = "; ".join(
        f"{d.difference:+.1%} ({d.low:+.1%} to {d.high:+.1%}) at {d.speed * scale:.4g} {unit}"
        for d in known
    )
    better, worse = all(d.low > 0 for d in known), any(d.high < 0 for d in known)
    return ClaimFinding(True if better else False if worse else None, shown)


def _as_good_and_faster(found: Found) -> ClaimFinding:
    """Whether a threshold loses less than a point against exact speculation, and is faster.

    Decided against it where each that is faster loses for certain.
    """
    base = next(
        r for arm, r in found.pairs if arm == exact_speculation([a for a, _ in found.pairs])
    )
    limit = 1.0 if base.speed_ratio is None else base.speed_ratio.high
    faster = [
        report
        for _, report in found.of("fuzzy", divergence=Divergence.JS)
        if report.speed_ratio is not None and report.speed_ratio.low > limit
        and report.versus is not None and report.versus.score_difference is not None
    ]  # fmt: skip
    if not faster:
        return ClaimFinding(None, f"no threshold is faster than {base.condition} for certain")
    losses = [r.versus.score_difference for r in faster if r.versus and r.versus.score_difference]
    shown = "; ".join(
        f"{report.condition}: {with_bounds(loss, '+.1%')} at "
        f"{report.speed / base.speed:.2f} times the speed"
        for report, loss in zip(faster, losses, strict=True)
    )
    # Where no text was scored otherwise, a resample sees no width: the exact bound decides.
    if any(
        loss.low > -POINT and (loss.low < loss.high or upper_bound(0, report.problems) < POINT)
        for report, loss in zip(faster, losses, strict=True)
    ):
        return ClaimFinding(True, shown)
    return ClaimFinding(False if all(loss.high < 0 for loss in losses) else None, shown)


FUZZY = Study(
    name="fuzzy",
    title="Fuzzy speculative decoding",
    question=(
        "At the speed of exact speculation, what does each divergence keep, and is it better than "
        "chance, and than sending problems to the draft model at random?"
    ),
    rules=_RULES,
    axis="divergence_threshold",
    settings={"rival": "draft"},
    parts={
        GREEDY: {"temperature": 0.0, "seeds": 1},
        SAMPLED: {
            "rules": (Condition("rejection", Rule("rejection")), *_RULES),
            "temperature": 1.0,
            "seeds": 1,  # more problems tell more than more texts of each
        },
    },
    claims=(
        PaperClaim("as good as exact speculation, and faster", SOURCE, _as_good_and_faster),
        PaperClaim("JS keeps more answers than chance at equal speed", SOURCE, _beats_chance),
        PaperClaim(
            "JS keeps more answers than a random allocation of problems to draft and target",
            SOURCE,
            _beats_allocation,
        ),
    ),
    sections=_thresholds_and_bound,
    divergences=True,
    against="random",
)

"""Fuzzy speculative decoding's study, by its paper's protocol (arXiv 2502.20704).

T of each divergence where the rule is as fast as exact speculation, in three trials, with greedy
and with sampled texts (what is rejected is replaced by the target's most likely token, or by a
sample of the target); against chance, and against sending problems to draft or target at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flyspec.cli.conditions import Condition
from flyspec.rules import Divergence, Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.tables import Column, FittedTable, make_table, record_table
from flyspec_lab.answered import ROUNDS, TIME, Answered
from flyspec_lab.arms import Arm
from flyspec_lab.bench.conditions import EXACT, PLAIN
from flyspec_lab.compare import ConditionReport
from flyspec_lab.curves import AtEqualSpeed, EqualSpeedThreshold, equal_speed_threshold
from flyspec_lab.drawing import COLORS
from flyspec_lab.loss_bound import LossBound, loss_bound
from flyspec_lab.report import Plot, Section
from flyspec_lab.statistics import POINT, upper_bound
from flyspec_lab.studies.study import (
    ClaimFinding,
    Found,
    PaperClaim,
    Study,
    decided,
    with_bounds,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flyspec_lab.tuning.replay import DraftedDivergences

SOURCE = "Fuzzy Speculative Decoding, arXiv 2502.20704"
GREEDY, SAMPLED = "greedy", "sampled"
TRIALS = 3
MAX_PROMPTS = 100
"""Prompts of a data set that are recorded for its divergences: thousands of positions."""

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
_RULES = (
    EXACT,
    *(
        Condition(
            f"{name} {divergence.name}, T = {value:g}",
            Rule(name, divergence=divergence, divergence_threshold=value),
        )
        for name, grids in _GRIDS.items()
        for divergence, values in grids.items()
        for value in values
    ),
    *(
        Condition(f"random, r = {share:g}", Rule("random", random_acceptance=share))
        for share in (0.3, 0.6, 0.9)
    ),
)
TOTAL_VARIATION = Condition(
    "fuzzy, TV, T = 0.3",
    Rule("fuzzy", divergence=Divergence.TV, divergence_threshold=0.3),
)
"""The condition that other studies compare besides the preset."""


# --- thresholds at equal speed, and the bound -------------------------------------------------


class ThresholdRow(NamedTuple):
    """A rule with a divergence, at the speed of exact speculation counted in tokens per `by`.

    `found` is over all texts, `trials` of each trial; None where the rule is slower.
    """

    name: str
    by: str
    found: EqualSpeedThreshold | None
    trials: Sequence[EqualSpeedThreshold | None]

    @property
    def spread(self) -> str:
        """The mean and the standard deviation of the trials' recoveries."""
        known = [t.recovery.value for t in self.trials if t is not None and t.recovery is not None]
        if len(known) < 2:
            return "-"
        return f"{np.mean(known):.1%} ± {np.std(known, ddof=1):.1%}"


def exact_speculation(arms: Sequence[Arm]) -> Arm:
    """Return the base of speeds: speculation that keeps the target's distribution.

    Sampled texts have speculative sampling, which is what the paper compares with.
    """
    return next(arm for arm in arms if arm.k != 0 and RULE_PRESETS[arm.rule.name].lossless)


def threshold_rows(answered: Answered) -> list[ThresholdRow]:
    """Return T* of each rule and divergence, by tokens per round and per second."""
    base = exact_speculation(answered.arms)
    plain = next(arm for arm in answered.arms if arm.name == PLAIN)

    def threshold(of: Answered, arms: Sequence[Arm], by: str) -> EqualSpeedThreshold | None:
        assert of.bootstrap is not None
        values = [arm.rule.divergence_threshold or 0.0 for arm in arms]
        quality = of.curve([plain], by)[:, 2]
        return equal_speed_threshold(
            of.bootstrap, of.curve([base], by), of.curve(arms, by), values, quality
        )

    parts = answered.trials(TRIALS)
    return [
        ThresholdRow(
            name, by, threshold(answered, arms, by), [threshold(of, arms, by) for of in parts]
        )
        for name, arms in _families(answered.arms)
        for by in (ROUNDS, TIME)
    ]


def _families(arms: Sequence[Arm]) -> Iterator[tuple[str, list[Arm]]]:
    """Yield the arms that differ in T alone, strictest first, by rule and divergence."""
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        if arm.rule.divergence_threshold is not None and arm.rule.divergence is not None:
            found.setdefault(f"{arm.rule.name} {arm.rule.divergence.name}", []).append(arm)
    for name, of in found.items():
        if len(of) > 1:
            yield name, sorted(of, key=lambda arm: arm.rule.divergence_threshold or 0.0)


def _t(found: EqualSpeedThreshold | None) -> str:
    if found is None:
        return "-"
    return f"{'≤ ' if found.all_faster else ''}{found.threshold:.2g}"


def _bounds(name: str, form: str) -> Any:
    def shown(row: ThresholdRow) -> str:
        value = getattr(row.found, name, None)
        return "-" if value is None else with_bounds(value, form)

    return shown


_UNITS = {ROUNDS: ("round", 1.0), TIME: ("second", 1e9)}
_THRESHOLDS: tuple[Column, ...] = (
    ("rule", "{.name}"),
    ("tokens per", lambda row: _UNITS[row.by][0]),
    ("exact", lambda row: f"{row.found.speed * _UNITS[row.by][1]:.4g}" if row.found else "-"),
    ("T*", lambda row: _t(row.found)),
    ("trials", lambda row: ", ".join(map(_t, row.trials))),
    ("recovery", _bounds("recovery", ".1%")),
    ("trials", "{.spread}"),
    ("score - exact", _bounds("difference", "+.1%")),
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
_BOUND_TEXT = (
    "Where tokens are sampled from the distributions that are compared, and by total variation, "
    "the paper bounds what the mean of any score from 0 to 1 can lose: N·%M_D·T, for texts of N "
    "tokens of which the share %M_D was drafted and accepted. It does not hold for JS and KL, "
    "whose T is no total variation, nor for greedy decoding. At 1 and above it says nothing."
)


def sampled_bounds(found: Found) -> list[tuple[ConditionReport, LossBound]]:
    """Return the conditions for which N·%M_D·T bounds the loss if they are sampled."""
    assert found.answered is not None
    bounds = []
    for arm, report in found.pairs:
        drafted = found.answered.column(arm.name, "num_accepted_draft_tokens").sum()
        share = float(drafted) / max(1, report.tokens)
        if bound := loss_bound(arm.rule, report.tokens / report.samples, share):
            bounds.append((report, bound))
    return bounds


def _bound_table(found: Found) -> FittedTable:
    """Return the bounds beside what was lost."""
    plain = next(report for _, report in found.pairs if report.condition == PLAIN)
    rows = [
        [
            report.condition, f"{bound.tokens:.1f}", f"{bound.draft_share:.1%}", str(bound),
            f"{plain.accuracy.value - report.accuracy.value:.1%}"
            if plain.accuracy is not None and report.accuracy is not None else "-",
        ]
        for report, bound in sampled_bounds(found)
    ]  # fmt: skip
    columns = ["decoding", "N", "%M_D", "N·%M_D·T", "lost here"]
    return make_table(columns, rows, "the bound on the loss")


def thresholds_and_bound(found: Found) -> list[Section]:
    """Return the section on thresholds at equal speed, and on the bound where it holds."""
    texts = found.answered
    if texts is None or not texts.has_answers or texts.missing:
        return []
    base = exact_speculation(texts.arms).name
    text = [_THRESHOLDS_TEXT.format(base=base)]
    title = "thresholds as fast as exact speculation"
    shown = [record_table(_THRESHOLDS, threshold_rows(texts), title, left=2)]
    if found.part == SAMPLED:
        text.append(_BOUND_TEXT)
        shown.append(_bound_table(found))
    return [Section(f"{found.title}: {title}", text, shown)]


# --- divergences ------------------------------------------------------------------------------


_DIVERGENCES_TEXT = (
    "The JS divergence at every position at which a token was drafted along the target's own "
    f"greedy text, on the first {MAX_PROMPTS} prompts of a data set at most, as the rule `fuzzy` "
    "computes it: the distributions are those of temperature 1. Positions after a round's first "
    "mismatch count, too. A threshold T keeps the drafts to the left of it. The scale of the "
    "shares is logarithmic: at most positions the models are nearly the same."
)


def divergence_section(found: Mapping[str, DraftedDivergences]) -> Section:
    """Return a table of each data set's divergences, and a histogram of them."""
    quantiles, below = (0.5, 0.9, 0.99), (0.01, 0.05, 0.1, 0.3)
    rows = [
        [
            task, f"{len(of.values):,}", _share(~of.matches),
            *(f"{v:.4f}" for v in np.quantile(of.values, quantiles) if len(of.values)),
            *(_share(values < t) for values in (of.values, of.values[~of.matches]) for t in below),
        ]
        for task, of in found.items()
    ]  # fmt: skip
    columns = ["data set", "drafted", "mismatches", *(f"{q:.0%}" for q in quantiles)]
    columns += [f"{of}< {t:g}" for of in ("", "mismatches ") for t in below]
    table = make_table(columns, rows, "JS divergence of drafted positions")

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        edges = np.linspace(0.0, RULE_PRESETS["fuzzy"].largest[Divergence.JS], 41).tolist()
        for (task, of), color in zip(found.items(), cycle(COLORS), strict=False):
            wrong = of.values[~of.matches]
            for values, style, label in ((of.values, "-", task), (wrong, ":", None)):
                weights = np.full(len(values), 1.0 / max(1, len(of.values)))
                ax.hist(values, edges, weights=weights, histtype="step", color=color,
                        linestyle=style, label=label, linewidth=1.4)  # fmt: skip
        ax.set(yscale="log", xlabel="JS(p, q), nats", ylabel="share of drafted positions")
        ax.legend()

    caption = "Share of drafted positions by JS divergence; dotted: mismatches."
    plot = Plot("divergences", caption, draw)
    return Section("JS divergence by data set", [_DIVERGENCES_TEXT], [table], [plot])


def _share(of: NDArray[np.bool_]) -> str:
    return f"{of.mean():.1%}" if len(of) else "-"


# --- claims -----------------------------------------------------------------------------------


def _js_names(found: Found) -> set[str]:
    return {report.condition for _, report in found.of("fuzzy", divergence=Divergence.JS)}


def _beats_chance(found: Found) -> ClaimFinding:
    """Decide by each threshold's answers against `random` at the same tokens per round."""
    leads = [
        cost.acceptance
        for cost in found.equal_costs
        if cost.condition in _js_names(found) and cost.of.startswith("random")
    ]
    return _above(leads, "tokens a round", 1.0, "no threshold accepts as much as random does")


def _beats_allocation(found: Found) -> ClaimFinding:
    """Decide by each threshold against the line from plain decoding to the draft model alone.

    One that is slower than plain decoding has no line to be above, and leaves it open.
    """
    leads = [
        lead.at
        for lead in found.allocations
        if lead.large == PLAIN and lead.condition in _js_names(found)
    ]
    holds, figures = _above(leads, "tokens/s", 1e9, "no threshold is as fast as plain decoding")
    if slower := leads.count(None):
        figures += f"; {slower} of {len(leads)} thresholds are slower than plain decoding"
    return ClaimFinding(None if holds and slower else holds, figures)


def _above(
    leads: Sequence[AtEqualSpeed | None], unit: str, scale: float, otherwise: str
) -> ClaimFinding:
    known = [lead for lead in leads if lead is not None]
    shown = "; ".join(
        f"{d.difference:+.1%} ({d.low:+.1%} to {d.high:+.1%}) at {d.speed * scale:.4g} {unit}"
        for d in known
    )
    better = known and all(d.low > 0 for d in known)
    return decided(better, any(d.high < 0 for d in known), shown or otherwise)


def _as_good_and_faster(found: Found) -> ClaimFinding:
    """Decide by the thresholds that are faster for certain: one loses less than a point, or all
    lose for certain."""
    exact = exact_speculation([arm for arm, _ in found.pairs])
    base = next(report for arm, report in found.pairs if arm == exact)
    limit = 1.0 if base.speed_ratio is None else base.speed_ratio.high
    faster = [
        (report, report.versus.score_difference)
        for _, report in found.of("fuzzy", divergence=Divergence.JS)
        if report.speed_ratio is not None and report.speed_ratio.low > limit
        and report.versus is not None and report.versus.score_difference is not None
    ]  # fmt: skip
    if not faster:
        return ClaimFinding(None, f"no threshold is faster than {base.condition} for certain")
    shown = "; ".join(
        f"{report.condition}: {with_bounds(loss, '+.1%')} at "
        f"{report.speed / base.speed:.2f} times the speed"
        for report, loss in faster
    )
    # Where no text was scored otherwise, a resample sees no width: the exact bound decides.
    good = any(
        loss.low > -POINT and (loss.low < loss.high or upper_bound(0, report.problems) < POINT)
        for report, loss in faster
    )
    return decided(good, all(loss.high < 0 for _, loss in faster), shown)


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
    sections=thresholds_and_bound,
    divergences=True,
    against="random",
)

"""Fuzzy speculative decoding's study, by its paper's protocol (arXiv 2502.20704).

Each divergence at several T, with greedy and with sampled texts (what is rejected is replaced by
the target's most likely token, or by a sample of the target); against exact speculation, against
chance, and against sending problems to draft or target at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flyspec.cli.conditions import Condition
from flyspec.cli.stack_options import StackOptions
from flyspec.config import DraftSettings, VerifySettings
from flyspec.rules import Divergence, Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.tables import make_table
from flyspec_lab.arms import Arm
from flyspec_lab.bench.conditions import EXACT, PLAIN
from flyspec_lab.compare import score_difference
from flyspec_lab.curves import AtEqualSpeed, allocation_from
from flyspec_lab.evaluation import Found
from flyspec_lab.options import StudyOptions
from flyspec_lab.problems import TaskProblems
from flyspec_lab.report import Plot, Section
from flyspec_lab.statistics import POINT, upper_bound
from flyspec_lab.studies.study import (
    ClaimFinding,
    PaperClaim,
    Study,
    decided,
    with_bounds,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flyspec_lab.tuning.replay import DraftedDivergences

SOURCE = "Fuzzy Speculative Decoding, arXiv 2502.20704"
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


# --- divergences ------------------------------------------------------------------------------


_DIVERGENCES_TEXT = (
    "The JS divergence at every position at which a token was drafted along the target's own "
    f"greedy text, on the first {MAX_PROMPTS} prompts of a data set at most, as the rule `fuzzy` "
    "computes it: the distributions are those of temperature 1. Positions after a round's first "
    "mismatch count, too. A threshold T keeps the drafts to the left of it. The scale of the "
    "shares is logarithmic: at most positions the models are nearly the same."
)


def divergences(
    tasks: Sequence[TaskProblems], stack: StackOptions, o: StudyOptions
) -> list[Section]:
    """Return how far draft and target are apart on each task; nothing without a draft model."""
    from flyspec_lab.local_model import LocalModel
    from flyspec_lab.tuning.recording import Recorder
    from flyspec_lab.tuning.replay import drafted_divergences

    if not stack.model or not stack.draft_model:
        return []
    device, threads = stack.draft_device or stack.device, stack.threads
    target = VerifySettings(
        model=stack.model, device=stack.device, dtype=stack.dtype, threads=threads
    )
    draft = DraftSettings(
        model=stack.draft_model, device=device, dtype=stack.draft_dtype, threads=threads
    )
    pair, found = (LocalModel(target), LocalModel(draft)), {}
    for task in tasks:
        most = o.max_tokens or task.task.max_tokens
        recorder = Recorder(*pair, task.task, o.num_speculative_tokens, most)
        recording = recorder.record(task.problems[:MAX_PROMPTS], forks=False)
        found[task.name] = drafted_divergences(recording)
    return [divergence_section(found)]


def divergence_section(found: Mapping[str, DraftedDivergences]) -> Section:
    """Return a table of each data set's divergences, and a histogram of them."""
    quantiles, below = (0.5, 0.9, 0.99), (0.01, 0.05, 0.1, 0.3)
    rows = [
        [
            task, f"{len(of.values):,}", f"{1.0 - of.matches.mean():.1%}",
            *(f"{value:.4f}" for value in np.quantile(of.values, quantiles)),
            *(f"{(of.values < t).mean():.1%}" for t in below),
        ]
        for task, of in found.items()
        if len(of.values)
    ]  # fmt: skip
    columns = ["data set", "drafted", "mismatches", *(f"{q:.0%}" for q in quantiles)]
    columns += [f"< {t:g}" for t in below]

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        edges = np.linspace(0.0, RULE_PRESETS["fuzzy"].largest[Divergence.JS], 41).tolist()
        for task, of in found.items():
            weights = np.full(len(of.values), 1.0 / max(1, len(of.values)))
            ax.hist(of.values, edges, weights=weights, histtype="step", label=task)
        ax.set(yscale="log", xlabel="JS(p, q), nats", ylabel="share of drafted positions")
        ax.legend()

    table = make_table(columns, rows, "JS divergence of drafted positions")
    plot = Plot("divergences", "Share of drafted positions by JS divergence.", draw)
    return Section("JS divergence by data set", [_DIVERGENCES_TEXT], [table], [plot])


# --- claims -----------------------------------------------------------------------------------


def exact_speculation(arms: Sequence[Arm]) -> Arm:
    """Return the base of speeds: speculation that keeps the target's distribution.

    Sampled texts have speculative sampling, which is what the paper compares with.
    """
    return next(arm for arm in arms if arm.k != 0 and RULE_PRESETS[arm.rule.name].lossless)


def _beats_chance(found: Found) -> ClaimFinding:
    """Decide by each threshold's answers against `random` at the same tokens per round."""
    names = _js_names(found)
    return _above(
        [
            cost.acceptance
            for cost in found.equal_costs
            if cost.condition in names and cost.of.startswith("random") and cost.acceptance
        ],
        "tokens a round", 1.0, "no threshold accepts as much as random does",
    )  # fmt: skip


def _beats_allocation(found: Found) -> ClaimFinding:
    """Decide by each threshold against the line from plain decoding to the draft model alone.

    One that is slower than plain decoding has no line to be above, and leaves it open.
    """
    names = _js_names(found)
    line = allocation_from(PLAIN)
    leads = [cost for cost in found.equal_costs if cost.of == line and cost.condition in names]
    above = [lead.speed for lead in leads if lead.speed is not None]
    finding = _above(above, "tokens/s", 1e9, "no threshold is as fast as plain decoding")
    if slower := len(leads) - len(above):
        shown = f"{slower} of {len(leads)} thresholds are slower than plain decoding"
        finding = ClaimFinding(
            None if finding.holds else finding.holds, f"{finding.figures}; {shown}"
        )
    return finding


def _js_names(found: Found) -> set[str]:
    return {report.condition for _, report in found.of("fuzzy", divergence=Divergence.JS)}


def _above(leads: Sequence[AtEqualSpeed], unit: str, scale: float, otherwise: str) -> ClaimFinding:
    shown = "; ".join(
        f"{d.difference:+.1%} ({d.low:+.1%} to {d.high:+.1%}) at {d.speed * scale:.4g} {unit}"
        for d in leads
    )
    better = leads and all(d.low > 0 for d in leads)
    return decided(better, any(d.high < 0 for d in leads), shown or otherwise)


def _as_good_and_faster(found: Found) -> ClaimFinding:
    """Decide by the thresholds that are faster for certain: one loses less than a point, or all
    lose for certain."""
    exact = exact_speculation([arm for arm, _ in found.pairs])
    base = next(report for arm, report in found.pairs if arm == exact)
    limit = 1.0 if base.speed_ratio is None else base.speed_ratio.high
    assert found.answered is not None
    faster = [
        (report, loss)
        for _, report in found.of("fuzzy", divergence=Divergence.JS)
        if report.speed_ratio is not None and report.speed_ratio.low > limit
        and (loss := score_difference(found.answered, report.condition, base.condition))
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


_CLAIMS = (
    PaperClaim("as good as exact speculation, and faster", SOURCE, _as_good_and_faster),
    PaperClaim("JS keeps more answers than chance at equal speed", SOURCE, _beats_chance),
    PaperClaim(
        "JS keeps more answers than a random allocation of problems to draft and target",
        SOURCE,
        _beats_allocation,
    ),
)
FUZZY = Study(
    name="fuzzy",
    question=(
        "What does each divergence keep, is it as good as exact speculation, and better than "
        "chance, and than sending problems to the draft model at random?"
    ),
    rules=_RULES,
    settings={"rival": "draft"},
    claims=_CLAIMS,
    of_models=divergences,
)
FUZZY_SAMPLED = Study(
    name="fuzzy-sampled",
    question="The same of sampled texts: what does each divergence keep?",
    rules=(Condition("rejection", Rule("rejection")), *_RULES),
    settings={"rival": "draft", "temperature": 1.0},
    claims=_CLAIMS,
)

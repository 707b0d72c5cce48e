"""The studies by name, with the claims of papers that they test."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from flyspec_lab.compare import ConditionReport, versus
from flyspec_lab.statistics import POINT, wins_more
from flyspec_lab.studies.batch import BATCHES, BatchStudy
from flyspec_lab.studies.drafting import (
    DRAFTER_KINDS,
    DRAFTER_SIZES,
    MULTI_LEVEL_DRAFTING,
    TOKENIZERS,
)
from flyspec_lab.studies.fuzzy import FUZZY
from flyspec_lab.studies.open_ended import OPEN_ENDED, STRICT_OPEN
from flyspec_lab.studies.study import ClaimFinding, Found, PaperClaim, Study, with_bounds

FLY = "FLy, arXiv 2511.22972"


def _loses_answers(report: ConditionReport) -> bool | None:
    """Whether it has fewer right answers than plain decoding; None if that may be chance."""
    flips = report.flips
    return None if flips is None else wins_more(flips.harmful, flips.helpful)


def _loses_without_window(found: Found) -> ClaimFinding:
    report = found.one("fly", fly_window_size=0)
    return ClaimFinding(
        _loses_answers(report), f"recovery at W = 0 {with_bounds(report.recovery, '.1%')}"
    )


def _window_restores(found: Found) -> ClaimFinding:
    """Whether W = 6 gives more right answers than W = 0, and not fewer than plain decoding."""
    without, restored = (found.one("fly", fly_window_size=w) for w in (0, 6))
    assert found.answered is not None
    gain = versus(found.answered, restored.condition, without.condition)
    holds = None
    if _loses_answers(restored):
        holds = False
    elif gain.won is not None and gain.lost is not None:
        holds = wins_more(gain.won, gain.lost)
    return ClaimFinding(
        holds,
        f"{with_bounds(gain.score_difference, '+.1%')} right answers by W = 6 instead of 0; "
        f"recovery {with_bounds(restored.recovery, '.1%')}",
    )


def _keeps_99(found: Found) -> ClaimFinding:
    report = found.one("fly", fly_window_size=6)
    holds = None
    if report.flips is not None and 1 - report.flips.harmful_rate_upper >= 0.99:
        holds = True  # by the exact bound: where nothing flipped, the interval has no width
    elif report.recovery is not None and report.recovery.high < 0.99:
        holds = False
    return ClaimFinding(holds, f"recovery at W = 6 {with_bounds(report.recovery, '.1%')}")


def _grows_with_k(text: str, rule: str) -> PaperClaim[Found]:
    """Tokens per round grow from each K to the next."""

    def check(found: Found) -> ClaimFinding:
        values = sorted((arm.k or 0, report.mean_accepted_tokens) for arm, report in found.of(rule))
        holds = all(one[1] <= other[1] for one, other in itertools.pairwise(values))
        shown = ", ".join(f"{k}: {tokens:.2f}" for k, tokens in values)
        return ClaimFinding(holds, f"{shown} tokens a round")

    return PaperClaim(text, FLY, check)


def _theta_orders(preset: str) -> PaperClaim[Found]:
    def check(found: Found) -> ClaimFinding:
        pairs = found.of(preset)
        pairs.sort(key=lambda pair: pair[0].rule.fly_entropy_threshold or 0.0)
        speeds = [report.mean_accepted_tokens for _, report in pairs]
        scores = [report.recovery.value if report.recovery else 0.0 for _, report in pairs]
        falling = speeds == sorted(speeds, reverse=True)
        rising = scores[0] <= scores[-1]
        shown = "; ".join(
            f"θ = {arm.rule.fly_entropy_threshold:g}: {speed:.2f}, {score:.1%}"
            for (arm, _), speed, score in zip(pairs, speeds, scores, strict=True)
        )
        return ClaimFinding(falling and rising, f"tokens a round and recovery at {shown}")

    return PaperClaim(f"θ orders speed and accuracy ({preset})", FLY, check)


def _judge_is_worth_it(found: Found) -> ClaimFinding:
    """Whether a threshold accepts more than `exact` and loses less than a point for certain."""
    base = found.one("exact").mean_accepted_tokens
    faster = [
        (report, report.versus.score_difference)
        for _, report in found.of("autojudge")
        if report.mean_accepted_tokens > base
        and report.versus is not None
        and report.versus.score_difference is not None
    ]
    holds = None
    if any(loss.low > -POINT for _, loss in faster):
        holds = True
    elif faster and all(loss.high < -POINT for _, loss in faster):
        holds = False
    shown = "; ".join(
        f"{report.condition}: {report.mean_accepted_tokens / base:.2f} times the tokens, "
        f"{with_bounds(loss, '+.1%')} right answers"
        for report, loss in faster
    )
    return ClaimFinding(holds, shown or "no threshold accepts more than exact speculation")


_WINDOWS = Study(
    name="window",
    title="FLy's window",
    question="Does a window of matches after a loose token save answers, and what does it cost?",
    rules="exact,fly",
    grid=("W=0,4,6,8",),
    axis="fly_window_size",
    claims=(
        PaperClaim("without a window (W = 0), accuracy is lost", FLY, _loses_without_window),
        PaperClaim("W = 6 restores it", FLY, _window_restores),
        PaperClaim("at least 99 % of the accuracy is kept", FLY, _keeps_99),
    ),
)
_THRESHOLDS = Study(
    name="entropy-threshold",
    title="FLy's entropy threshold",
    question="How do θ and the measure of entropy trade accuracy for speed?",
    rules="exact,fly,fly-paper",
    grid=("theta=0,0.3,0.6,1",),
    axis="fly_entropy_threshold",
    claims=(_theta_orders("fly"), _theta_orders("fly-paper")),
)
_LENGTHS = Study(
    name="length",
    title="Drafted tokens per round",
    question="Does acceptance grow with K, and does it cost answers?",
    rules="exact,fly,margin,fuzzy",
    grid=("K=4,5,8,10,15,20,25,30",),
    axis="k",
    claims=(
        _grows_with_k("tokens a round grow with K", "fly"),
        _grows_with_k("also without loose tokens", "exact"),
    ),
)
_MARGIN = Study(
    name="margin",
    title="The margin rule's threshold",
    question="Up to which τ do near-ties cost nothing?",
    rules="exact,margin",
    grid=("margin_threshold=0.05,0.1,0.2,0.3,0.5,1,2",),
    axis="margin_threshold",
)
_JUDGE = Study(
    name="autojudge",
    title="A trained judge",
    question="Is a judge that was trained on the task better than rules that need no training?",
    rules="exact,fly,margin,fuzzy,fuzzy:divergence=tv,kl,autojudge",
    grid=("judge_threshold=0.005,0.01,0.02,0.05",),
    axis="judge_threshold",
    claims=(
        PaperClaim(
            "more tokens per round than exact speculation, for less than a point of accuracy",
            "AutoJudge, arXiv 2504.20039",
            _judge_is_worth_it,
        ),
    ),
)
_TEMPERATURE = Study(
    name="temperature",
    title="At temperature 1",
    question="Do rules keep answers that are sampled?",
    rules="exact,fly,margin,kl,relaxed,fuzzy,typical,rejection",
    settings={"temperature": 1.0},
)
_RULES = Study(
    name="rules",
    title="All rules",
    question="What does each rule keep, and what does it gain?",
    rules="all",
    settings={"controls": True},
)

STUDIES: Mapping[str, Study | BatchStudy] = MappingProxyType(
    {
        study.name: study
        for study in (
            _RULES, _WINDOWS, _THRESHOLDS, _LENGTHS, FUZZY, _MARGIN, DRAFTER_KINDS,
            MULTI_LEVEL_DRAFTING, TOKENIZERS, DRAFTER_SIZES, BATCHES, _TEMPERATURE, _JUDGE,
            OPEN_ENDED, STRICT_OPEN,
        )
    }
)  # fmt: skip


def studies_named(names: Sequence[str]) -> list[Study | BatchStudy]:
    """Return the studies of these names, in the catalogue's order."""
    return [study for name, study in STUDIES.items() if name in names]

"""The studies by name, with the claims of papers that they test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flyspec import bundled
from flyspec.rules import Divergence
from flyspec.rules.presets import DEFAULT_RULE
from flyspec_lab.bench.conditions import parse_conditions
from flyspec_lab.compare import ConditionReport, flips, score_difference
from flyspec_lab.evaluation import Found
from flyspec_lab.statistics import exact_interval, is_larger, wins_more
from flyspec_lab.studies.fuzzy import FUZZY, FUZZY_SAMPLED, TOTAL_VARIATION
from flyspec_lab.studies.study import (
    MODEL,
    ClaimFinding,
    PaperClaim,
    Study,
    decided,
    with_bounds,
)

FLY = "FLy, arXiv 2511.22972"
LLAMA_CPP = "llama.cpp, discussion 24804 (of margin)"
MULTI_LEVEL = "multi_level"
"""The drafter with prompt lookup before its model, as a stack names it."""
_OPEN_RULES = (
    *parse_conditions("exact,margin,fly,fuzzy"),
    TOTAL_VARIATION,
    *parse_conditions("typical,random"),
)
_GATE_MS = 0.57
"""The longest time of the gate, per round, that FLy's paper reports."""
_TAU = 0.3
"""The threshold that the discussion of llama.cpp recommends."""
_MOST_TAU, _LOOP_RATE = 0.4, 0.0044
"""The threshold at which it saw loops, and their share of texts."""
_TENFOLD = 10.0


# --- claims -----------------------------------------------------------------------------------


def _loses_answers(report: ConditionReport) -> bool | None:
    """Compare the right answers with plain decoding's: fewer, or None if that may be chance."""
    change = report.flips
    return None if change is None else wins_more(change.harmful, change.helpful)


def _loses_without_window(found: Found) -> ClaimFinding:
    report = found.one("fly", fly_window_size=0)
    figures = f"recovery at W = 0 {with_bounds(report.recovery, '.1%')}"
    return ClaimFinding(_loses_answers(report), figures)


def _window_restores(found: Found) -> ClaimFinding:
    """Decide by more right answers than with W = 0, and not fewer than plain decoding."""
    without, restored = (found.one("fly", fly_window_size=w) for w in (0, 6))
    assert found.answered is not None
    pair = found.answered, restored.condition, without.condition
    gain, change = score_difference(*pair), flips(*pair) if found.answered.has_answers else None
    more = None if change is None else wins_more(change.helpful, change.harmful)
    return ClaimFinding(
        False if _loses_answers(restored) else more,
        f"{with_bounds(gain, '+.1%')} right answers by W = 6 instead of 0; "
        f"recovery {with_bounds(restored.recovery, '.1%')}",
    )


def _keeps_99(found: Found) -> ClaimFinding:
    """Decide by the exact bound: where nothing flipped, the interval has no width."""
    report = found.one("fly", fly_window_size=6)
    kept = report.flips is not None and 1 - report.flips.harmful_rate_upper >= 0.99
    lost = report.recovery is not None and report.recovery.high < 0.99
    return decided(kept, lost, f"recovery at W = 6 {with_bounds(report.recovery, '.1%')}")


def _grows_with_k(text: str, rule: str) -> PaperClaim:
    """Claim that tokens per round grow from each K to the next."""

    def check(found: Found) -> ClaimFinding:
        values = sorted((arm.k or 0, report.mean_accepted_tokens) for arm, report in found.of(rule))
        tokens = [value for _, value in values]
        shown = ", ".join(f"{k}: {value:.2f}" for k, value in values)
        return ClaimFinding(tokens == sorted(tokens), f"{shown} tokens a round")

    return PaperClaim(text, FLY, check)


def _theta_orders(preset: str) -> PaperClaim:
    def check(found: Found) -> ClaimFinding:
        points = sorted(
            (arm.rule.fly_entropy_threshold or 0.0, report.mean_accepted_tokens,
             report.recovery.value if report.recovery else 0.0)
            for arm, report in found.of(preset)
        )  # fmt: skip
        speeds = [speed for _, speed, _ in points]
        holds = speeds == sorted(speeds, reverse=True) and points[0][2] <= points[-1][2]
        shown = "; ".join(f"θ = {t:g}: {speed:.2f}, {score:.1%}" for t, speed, score in points)
        return ClaimFinding(holds, f"tokens a round and recovery at {shown}")

    return PaperClaim(f"θ orders speed and accuracy ({preset})", FLY, check)


def _drafted_faster(found: Found) -> ClaimFinding:
    alone, after_lookup = (
        found.one("fly", drafter=drafter).speedup for drafter in (MODEL, MULTI_LEVEL)
    )
    return ClaimFinding(
        is_larger(after_lookup, alone),
        f"{with_bounds(after_lookup, '.2f')} times plain decoding with prompt lookup before the "
        f"draft model, {with_bounds(alone, '.2f')} times without",
    )


def _gate_is_quick(found: Found) -> ClaimFinding:
    times = {report.condition: report.judge_ms for _, report in found.of("fly")}
    known = {name: ms for name, ms in times.items() if ms is not None}
    shown = "; ".join(f"{name}: {ms:.2f} ms" for name, ms in known.items())
    return ClaimFinding(max(known.values()) <= _GATE_MS if known else None, shown or "unknown")


def _is_faster(found: Found) -> ClaimFinding:
    report = found.one("margin", margin_threshold=_TAU)
    ratio = report.speed_ratio
    accepted = with_bounds(report.mean_accepted_tokens_ratio, "+.1%", 1.0)
    return decided(
        ratio and ratio.low > 1, ratio and ratio.high < 1,
        f"{with_bounds(ratio, '+.1%', 1.0)} tokens a second, {accepted} a round",
    )  # fmt: skip


def _gaps_are_apart(found: Found) -> ClaimFinding:
    report = found.one("margin", margin_threshold=_TAU)
    loose, rejected = report.mean_loose_gap_nats, report.mean_rejected_gap_nats
    if loose is None or rejected is None:
        return ClaimFinding(None, "no loose token" if loose is None else "no rejected token")
    return ClaimFinding(rejected >= _TENFOLD * loose, f"{loose:.2f} against {rejected:.2f} nats")


def _loops_are_rare(found: Found) -> ClaimFinding:
    """Decide by the bounds of the rate of loops that `exact` does not have."""
    report = found.one("margin", margin_threshold=_MOST_TAU)
    if report.new_loops is None:
        return ClaimFinding(None, "not compared with exact")
    low, high = exact_interval(report.new_loops, report.samples)
    loops = f"{report.new_loops} of {report.samples} texts loop by it ({low:.2%} to {high:.2%})"
    return decided(high <= _LOOP_RATE, low > _LOOP_RATE, loops)


def _gains_more(rule: str, **parameters: Any) -> PaperClaim:
    """Claim that each open task gains more tokens a round over `exact` than each strict one."""

    def check(tasks: Sequence[Found]) -> ClaimFinding:
        gains = [(of, of.one(rule, **parameters).mean_accepted_tokens_ratio) for of in tasks]
        shown = "; ".join(f"{of.task} {with_bounds(gain, '+.1%', 1.0)}" for of, gain in gains)
        for wanted, kind in ((True, "open"), (False, "strict")):
            if all(of.is_open is not wanted for of in tasks):
                return ClaimFinding(None, f"{shown}; no {kind} task: name one with --task")
        larger = [
            is_larger(one, other)
            for of, one in gains
            for other_of, other in gains
            if of.is_open and not other_of.is_open
        ]
        return decided(all(larger), False in larger, shown)

    shown = ", ".join([rule, *(value.name for value in parameters.values())])
    return PaperClaim(f"open tasks gain more than strict ones ({shown})", LLAMA_CPP, check)


# --- studies ----------------------------------------------------------------------------------


_STUDIES: tuple[Study, ...] = (
    Study(
        name="rules",
        question="What does each rule keep, and what does it gain?",
        rules=parse_conditions("all"),
        settings={"controls": True},
    ),
    Study(
        name="window",
        question="Does a window of matches after a loose token save answers, and what does it "
        "cost?",
        rules=parse_conditions("exact,fly"),
        grid=("W=0,4,6,8",),
        claims=(
            PaperClaim("without a window (W = 0), accuracy is lost", FLY, _loses_without_window),
            PaperClaim("W = 6 restores it", FLY, _window_restores),
            PaperClaim("at least 99 % of the accuracy is kept", FLY, _keeps_99),
        ),
    ),
    Study(
        name="entropy-threshold",
        question="How do θ and the measure of entropy trade accuracy for speed?",
        rules=parse_conditions("exact,fly,fly-paper"),
        grid=("theta=0,0.3,0.6,1",),
        claims=(_theta_orders("fly"), _theta_orders("fly-paper")),
    ),
    Study(
        name="length",
        question="Does acceptance grow with K, and does it cost answers?",
        rules=parse_conditions("exact,fly,margin,fuzzy"),
        grid=("K=4,5,8,10,15,20,25,30",),
        claims=(
            _grows_with_k("tokens a round grow with K", "fly"),
            _grows_with_k("also without loose tokens", "exact"),
        ),
    ),
    FUZZY,
    FUZZY_SAMPLED,
    Study(
        name="margin",
        question="Up to which τ do near-ties cost nothing?",
        rules=parse_conditions("exact,margin"),
        grid=("margin_threshold=0.05,0.1,0.2,0.3,0.5,1,2",),
    ),
    Study(
        name="multi-level",
        question="Does prompt lookup before the draft model pay, and where does a round's time go?",
        rules=parse_conditions("exact,fly"),
        grid=(f"drafter={MODEL},{MULTI_LEVEL}",),
        settings={"concurrency": 1},
        claims=(
            PaperClaim(
                "prompt lookup before the draft model makes FLy faster: 2.86 instead of 2.69 times "
                "plain decoding",
                f"{FLY}, Table 5",
                _drafted_faster,
            ),
            PaperClaim(
                "the gate takes no more than 0.57 ms per round", f"{FLY}, Table 1", _gate_is_quick
            ),
        ),
    ),
    Study(
        name="draft-models",
        question="How large may a draft model be, and may it have another tokenizer, before its "
        "time costs more than its drafts save?",
        rules=parse_conditions(f"exact,{DEFAULT_RULE},fly,margin"),
        settings={"concurrency": 1},
        # The largest draft model of all: it drafts what it will accept, and is as slow as the
        # target.
        draft_models={"bytes": bundled.DRAFT_BYTES, "target": bundled.TARGET},
    ),
    Study(
        name="temperature",
        question="Do rules keep answers that are sampled?",
        rules=parse_conditions("exact,fly,margin,kl,relaxed,fuzzy,typical,rejection"),
        settings={"temperature": 1.0},
    ),
    Study(
        name="open-ended",
        question="Do loose tokens make open-ended texts loop, end badly or become unlikely, and "
        "what do they gain?",
        rules=_OPEN_RULES,
        grid=("margin_threshold=0.1,0.3,0.4,1",),
        claims=(
            PaperClaim(
                "τ = 0.3 is faster than exact: 5.6 % more tokens a second (4.0 to 7.1 %, greedy)",
                LLAMA_CPP,
                _is_faster,
            ),
            PaperClaim(
                "rejected tokens cost at least ten times as much as loose ones (τ = 0.3; there 4.3 "
                "and 0.20 nats)",
                LLAMA_CPP,
                _gaps_are_apart,
            ),
            PaperClaim(
                "at τ = 0.4, at most 0.44 % of texts loop by it", LLAMA_CPP, _loops_are_rare
            ),
        ),
        settings={"temperature": 0.7, "seeds": 3, "log_likelihood": True},
        tasks=(("word_problems", None), ("python_code", None)),
        max_problems=225,  # the discussion has 450 prompts in all
    ),
    Study(
        name="strict-open",
        question="Do rules gain less where one answer is right than where many wordings are?",
        rules=_OPEN_RULES,
        tasks_claims=(
            _gains_more("margin"),
            _gains_more("fly"),
            _gains_more("fuzzy", divergence=Divergence.JS),
            _gains_more("fuzzy", divergence=Divergence.TV),
            _gains_more("typical"),
        ),
        tasks=(("word_problems", None), ("python_code", None)),
    ),
)
STUDIES: Mapping[str, Study] = MappingProxyType({study.name: study for study in _STUDIES})

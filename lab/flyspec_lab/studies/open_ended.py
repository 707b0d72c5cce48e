"""Studies of texts that have no one right wording: what rules do to them, and where they gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flyspec.rules import Divergence
from flyspec.tables import Column, FittedTable, make_table, record_table
from flyspec_lab.bench.conditions import parse_conditions
from flyspec_lab.compare import ConditionReport
from flyspec_lab.plots import draw_gains, draw_gaps, size_of_gaps
from flyspec_lab.statistics import Interval, difference_interval, exact_interval, upper_bound
from flyspec_lab.studies.fuzzy import TOTAL_VARIATION
from flyspec_lab.studies.page import PagePlot, PageSection
from flyspec_lab.studies.study import ClaimFinding, Found, PaperClaim, Study

LLAMA_CPP = "llama.cpp, discussion 24804 (of margin)"
_TAU = 0.3
"""The threshold that the discussion recommends."""
_MOST_TAU, _LOOP_RATE = 0.4, 0.0044
"""Where it saw loops, and in which share of texts."""
_TENFOLD = 10.0

_RULES = (
    *parse_conditions("exact,margin,fly,fuzzy"),
    TOTAL_VARIATION,
    *parse_conditions("typical,random"),
)


def _percent(ratio: Interval | None) -> str:
    """Show a ratio as what it is above 1."""
    if ratio is None:
        return "unknown"
    return f"{ratio.value - 1:+.1%} ({ratio.low - 1:+.1%} to {ratio.high - 1:+.1%})"


def _is_faster(found: Found) -> ClaimFinding:
    report = found.one("margin", margin_threshold=_TAU)
    ratio = report.speed_ratio
    holds = None if ratio is None else True if ratio.low > 1 else False if ratio.high < 1 else None
    accepted = _percent(report.mean_accepted_tokens_ratio)
    return ClaimFinding(holds, f"{_percent(ratio)} tokens a second, {accepted} a round")


def _gaps_are_apart(found: Found) -> ClaimFinding:
    report = found.one("margin", margin_threshold=_TAU)
    loose, rejected = report.mean_loose_gap_nats, report.mean_rejected_gap_nats
    if loose is None or rejected is None:
        return ClaimFinding(None, "no loose token" if loose is None else "no rejected token")
    return ClaimFinding(rejected >= _TENFOLD * loose, f"{loose:.2f} against {rejected:.2f} nats")


def _loops_are_rare(found: Found) -> ClaimFinding:
    """Whether the rate of loops that `exact` has not is bounded by the discussion's."""
    report = found.one("margin", margin_threshold=_MOST_TAU)
    if report.new_loops is None:
        return ClaimFinding(None, "not compared with exact")
    low, high = exact_interval(report.new_loops, report.samples)
    holds = True if high <= _LOOP_RATE else False if low > _LOOP_RATE else None
    return ClaimFinding(
        holds,
        f"{report.new_loops} of {report.samples} texts loop by it ({low:.2%} to {high:.2%})",
    )


def _gains_more(text: str, rule: str, **parameters: Any) -> PaperClaim[Sequence[Found]]:
    """Each open task gains more tokens a round over `exact` than each strict one."""

    def check(tasks: Sequence[Found]) -> ClaimFinding:
        gains = {
            found.task: (found.is_open, found.one(rule, **parameters).mean_accepted_tokens_ratio)
            for found in tasks
        }
        shown = "; ".join(f"{task} {_percent(gain)}" for task, (_, gain) in gains.items())
        for wanted, kind in ((True, "open"), (False, "strict")):
            if all(is_open is not wanted for is_open, _ in gains.values()):
                return ClaimFinding(None, f"{shown}; no {kind} task: name one with --task")
        apart = [
            difference_interval(one, other)
            for is_open, one in gains.values()
            for other_open, other in gains.values()
            if is_open and not other_open and one is not None and other is not None
        ]
        if not apart:
            return ClaimFinding(None, shown)
        if all(low > 0 for _, low, _ in apart):
            return ClaimFinding(True, shown)
        return ClaimFinding(False if any(high < 0 for _, _, high in apart) else None, shown)

    return PaperClaim(text, LLAMA_CPP, check)


_SPEEDS: tuple[Column, ...] = (
    ("rule", "{.condition}"),
    ("tok/round", "{.mean_accepted_tokens:.2f}"),
    ("tok/round over exact", lambda r: _percent_of(r, "mean_accepted_tokens_ratio")),
    ("tok/s", "{.speed:.0f}"),
    ("tok/s over exact", lambda r: _percent_of(r, "speed_ratio")),
    ("loose", "{.loose_share:.2%}"),
    ("its gap", "{.mean_loose_gap_nats:.2f}"),
    ("of rejected", "{.mean_rejected_gap_nats:.2f}"),
)
_TEXTS: tuple[Column, ...] = (
    ("rule", "{.condition}"),
    ("loops", "{0.loops} (< {0.loop_rate_upper:.1%})"),
    ("to the end", lambda r: f"{r.ending_loops} (< {upper_bound(r.ending_loops, r.samples):.1%})"),
    ("new", "{0.new_loops} (< {0.new_loop_rate_upper:.1%})"),
    ("broken", "{.broken_endings}"),
    ("cut off", "{.cut_off}"),
    ("distinct-1", "{.distinct_1:.3f}"),
    ("-2", "{.distinct_2:.3f}"),
    ("-3", "{.distinct_3:.3f}"),
    ("log p", "{.log_likelihood_per_token:.4f}"),
)
_NOTES = (
    "Over `exact`: tokens per round and per second relative to those of `exact`, with 95 % "
    "intervals by paired bootstrap over the prompts. Gap: mean of log p(most likely token) − "
    "log p(token) of loose and of rejected tokens, in nats.",
    "Loops: texts that start to repeat themselves; to the end: those that never stop; new: those "
    "that do not under `exact` with the same seed; with the exact 95 % bounds of the rates for "
    "these prompts (Clopper and Pearson). Broken: texts that end in the middle of a sentence, a "
    "word or a code block, as texts that are cut off by the limit of tokens mostly do. Distinct: "
    "n-grams of tokens that differ, as a share of all. log p: the target's mean raw "
    "log-probability per token, nats.",
)


def _percent_of(report: ConditionReport, name: str) -> str:
    ratio = getattr(report, name)
    return "-" if ratio is None else _percent(ratio)


def _texts_and_gaps(found: Found) -> list[PageSection]:
    drafted = [report for arm, report in found.pairs if arm.k != 0]
    histograms = PagePlot(
        f"open-ended-{found.slug}-gaps",
        "Loose and rejected tokens by gap, per 1,000 tokens of text; lines are means.",
        lambda figure: draw_gaps(figure, drafted),
        size_of_gaps(drafted),
    )
    shown = [
        record_table(_SPEEDS, drafted, "speed and what it costs"),
        record_table(_TEXTS, found.reports, "texts"),
    ]
    return [PageSection("Texts and gaps", _NOTES, shown, [histograms] if drafted else [])]


def gains_table(tasks: Sequence[Found]) -> FittedTable:
    """Return each rule's gain in tokens per round over `exact`, on one task after another."""
    rows = [
        [
            report.condition,
            found.task,
            "open" if found.is_open else "strict",
            f"{report.mean_accepted_tokens:.2f}",
            _percent_of(report, "mean_accepted_tokens_ratio"),
            f"{report.loose_share:.2%}",
        ]
        for name in _lossy(tasks)
        for found in tasks
        for report in found.reports
        if report.condition == name
    ]
    columns = ["rule", "task", "kind", "tok/round", "over exact", "loose"]
    return make_table(columns, rows, "gain in tokens per round over exact", left=3)


def _lossy(tasks: Sequence[Found]) -> list[str]:
    """Return the conditions that accepted a token loosely on any task."""
    names = [r.condition for found in tasks for r in found.reports if r.loose_tokens]
    order = [r.condition for found in tasks for r in found.reports]
    return sorted(set(names), key=order.index)


def _strict_open_overview(tasks: Sequence[Found]) -> PageSection:
    lossy = _lossy(tasks)
    gains = {found.task: (found.is_open, _gains(found, lossy)) for found in tasks}
    return PageSection(
        "Gain by task",
        [
            "Tokens per round relative to those of `exact` with the same drafts, with 95 % "
            "intervals by paired bootstrap over each task's prompts. Open tasks are those whose "
            "answers may be worded in many ways; two tasks' gains are compared by the interval of "
            "their difference (Zou and Donner 2008), since their prompts are not the same."
        ],
        [gains_table(tasks)],
        [
            PagePlot(
                "strict-open-gains",
                "Gain of each rule in tokens per round over `exact`; hollow marks: open tasks.",
                lambda figure: draw_gains(figure, gains),
                (8.4, 4.4),
            )
        ],
    )


def _gains(found: Found, conditions: Sequence[str]) -> dict[str, Interval]:
    return {
        r.condition: r.mean_accepted_tokens_ratio
        for r in found.reports
        if r.condition in conditions and r.mean_accepted_tokens_ratio is not None
    }


OPEN_ENDED = Study(
    name="open-ended",
    title="Open-ended texts",
    question="Do loose tokens make open-ended texts loop, end badly or become unlikely, and what "
    "do they gain?",
    rules=_RULES,
    grid=("margin_threshold=0.1,0.3,0.4,1",),
    axis="margin_threshold",
    claims=(
        PaperClaim(
            "τ = 0.3 is faster than exact: 5.6 % more tokens a second (4.0 to 7.1 %, greedy)",
            LLAMA_CPP, _is_faster,
        ),
        PaperClaim(
            "rejected tokens cost at least ten times as much as loose ones (τ = 0.3; there 4.3 "
            "and 0.20 nats)",
            LLAMA_CPP, _gaps_are_apart,
        ),
        PaperClaim("at τ = 0.4, at most 0.44 % of texts loop by it", LLAMA_CPP, _loops_are_rare),
    ),
    settings={"temperature": 0.7, "seeds": 3, "log_likelihood": True},
    tasks=(("word_problems", None), ("python_code", None)),
    max_problems=225,  # the discussion has 450 prompts in all
    sections=_texts_and_gaps,
)  # fmt: skip

_CLAIMED: Sequence[tuple[str, dict[str, Any]]] = (
    ("margin", {}),
    ("fly", {}),
    ("fuzzy", {"divergence": Divergence.JS}),
    ("fuzzy", {"divergence": Divergence.TV}),
    ("typical", {}),
)


def _shown(rule: str, parameters: dict[str, Any]) -> str:
    divergence = parameters.get("divergence")
    return rule if divergence is None else f"{rule}, {divergence.name}"


STRICT_OPEN = Study(
    name="strict-open",
    title="Strict and open tasks",
    question="Do rules gain less where one answer is right than where many wordings are?",
    rules=_RULES,
    tasks_claims=tuple(
        _gains_more(f"open tasks gain more than strict ones ({_shown(rule, of)})", rule, **of)
        for rule, of in _CLAIMED
    ),
    tasks=(("word_problems", None), ("python_code", None)),
    divided=True,
    overview=_strict_open_overview,
)

"""Methods on sets of prompts, and what each keeps out of its domain. Pure.

The layout is that of Tables 2 and 3 of the FLy paper (arXiv 2511.22972): for each set the speed
relative to plain decoding and τ, the mean number of tokens per round, then the means over the sets.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flyspec_lab.compare import ConditionReport
from flyspec_lab.statistics import Interval


@dataclass(frozen=True)
class ComparedMethod:
    """A rule with a drafter at a K. `trained`: part of it was, on the sets of `domain`.

    The domain of a method without training is that of the bundled pair's own texts, so that all are
    asked what they keep beyond it.
    """

    name: str
    rule: str
    drafter: str
    num_speculative_tokens: int
    trained: bool
    domain: Sequence[str]


@dataclass(frozen=True)
class SetFigures:
    """A method on a set at a temperature. None: not known.

    `tau` is tokens per round, with its interval over the prompts; `speedup` is relative to plain
    decoding on the same stack. `loose_nats` is what loose tokens cost per token: how much less
    likely the text is, to the target, than its own tokens. `recovery` is of right answers, where
    plain decoding has some; `log_likelihood` is the target's per token, nats, where no answers are
    known.
    """

    method: str
    set: str
    temperature: float
    prompts: int
    tau: float
    tau_interval: Interval | None
    speedup: Interval | None
    recovery: Interval | None
    log_likelihood: float | None
    loose_nats: float

    @classmethod
    def of(cls, report: ConditionReport, temperature: float) -> SetFigures:
        known = report.recovery is not None and report.recovery.value < float("inf")
        return cls(
            report.condition,
            report.task,
            temperature,
            report.problems,
            report.mean_accepted_tokens,
            report.mean_accepted_tokens_interval,
            report.speedup,
            report.recovery if known else None,
            report.log_likelihood_per_token,
            report.loose_cost_nats / max(1, report.tokens),
        )


@dataclass(frozen=True)
class Kept:
    """What a method keeps: mean τ on the sets of its domain, on those of nobody's, their ratio.

    `drafts_kept` is the ratio of accepted drafts per round, τ - 1.

    `gain_within` and `gain_beyond` are the same means relative to exact verification with the same
    drafter and K: what the rule adds. None for that method itself, and without it. `nats_within`
    and `nats_beyond` are means of what loose tokens cost per token.
    """

    method: str
    temperature: float
    trained: bool
    within: float
    beyond: float
    gain_within: float | None
    gain_beyond: float | None
    nats_within: float
    nats_beyond: float

    @property
    def kept(self) -> float:
        return self.beyond / self.within

    @property
    def drafts_kept(self) -> float | None:
        drafts = self.within - 1.0
        return (self.beyond - 1.0) / drafts if drafts > 0 else None


def beyond_all(methods: Sequence[ComparedMethod], sets: Iterable[str]) -> list[str]:
    """Return the sets that are in no method's domain."""
    known = {name for method in methods for name in method.domain}
    return [name for name in sets if name not in known]


def keeping(methods: Sequence[ComparedMethod], found: Sequence[SetFigures]) -> list[Kept]:
    """Return what each method keeps, by temperature; sets must have been drafted by all methods."""
    at = {(f.method, f.set, f.temperature): f for f in found}
    sets = list(dict.fromkeys(f.set for f in found))
    beyond = beyond_all(methods, sets)
    kept = []
    for temperature in dict.fromkeys(f.temperature for f in found):
        for method in methods:
            base = _exact_beside(method, methods)

            def means(name: str, where: Sequence[str], t: float = temperature) -> Means:
                of = [at[name, each, t] for each in where]
                return Means(
                    statistics.mean(f.tau for f in of), statistics.mean(f.loose_nats for f in of)
                )

            within = [name for name in sets if name in method.domain]
            if not within or not beyond:
                continue
            ins, outs = means(method.name, within), means(method.name, beyond)
            gains: tuple[float | None, float | None] = (None, None)
            if base is not None:
                gains = ins.tau / means(base, within).tau, outs.tau / means(base, beyond).tau
            kept.append(
                Kept(
                    method.name, temperature, method.trained, ins.tau, outs.tau, *gains,
                    ins.nats, outs.nats,
                )
            )  # fmt: skip
    return kept


class Means(NamedTuple):
    """Means over sets."""

    tau: float
    nats: float


def _exact_beside(method: ComparedMethod, methods: Sequence[ComparedMethod]) -> str | None:
    """Return the name of exact verification of the same drafts."""
    if method.rule == "exact":
        return None
    return next(
        (
            other.name
            for other in methods
            if other.rule == "exact"
            and (other.drafter, other.num_speculative_tokens)
            == (method.drafter, method.num_speculative_tokens)
        ),
        None,
    )


def findings(kept: Sequence[Kept], name: str) -> list[str]:
    """Say of each trained method whether it degrades more than another method."""
    lines = []
    by_rule = {k.temperature: k for k in kept if k.method == name}
    for each in kept:
        other = by_rule.get(each.temperature)
        if not each.trained or other is None:
            continue
        verdict = "shown" if each.kept < other.kept else "refuted"
        lines.append(
            f"temperature {each.temperature:g}: {each.method} keeps {each.kept:.0%} of its tokens "
            f"per round, {name} {other.kept:.0%}: that the trained part degrades more is {verdict}"
        )
    return lines

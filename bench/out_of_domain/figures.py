"""Methods on sets of prompts, and what each keeps out of its domain. Pure.

The layout is that of Tables 2 and 3 of the FLy paper (arXiv 2511.22972): for each set the speed
relative to plain decoding and τ, the mean number of tokens per round, then the means over the sets.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flyspec.lab.compare import ConditionReport
from flyspec.lab.statistics import Interval


@dataclass(frozen=True)
class Method:
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
    decoding on the same stack. `recovery` is of right answers, where plain decoding has some;
    `log_likelihood` is the target's per token, nats, where no answers are known.
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
        )


@dataclass(frozen=True)
class Kept:
    """What a method keeps: mean τ on the sets of its domain, on those of nobody's, their ratio.

    `gain_within` and `gain_beyond` are the same means relative to exact verification with the same
    drafter and K: what the rule adds. None for that method itself, and without it.
    """

    method: str
    temperature: float
    trained: bool
    within: float
    beyond: float
    gain_within: float | None
    gain_beyond: float | None

    @property
    def kept(self) -> float:
        return self.beyond / self.within

    @property
    def gain_kept(self) -> float | None:
        if self.gain_within is None or self.gain_beyond is None:
            return None
        return self.gain_beyond / self.gain_within


def beyond_all(methods: Sequence[Method], sets: Iterable[str]) -> list[str]:
    """Return the sets that are in no method's domain."""
    known = {name for method in methods for name in method.domain}
    return [name for name in sets if name not in known]


def keeping(methods: Sequence[Method], found: Sequence[SetFigures]) -> list[Kept]:
    """Return what each method keeps, by temperature; sets must have been drafted by all methods."""
    tau = {(f.method, f.set, f.temperature): f.tau for f in found}
    sets = list(dict.fromkeys(f.set for f in found))
    beyond = beyond_all(methods, sets)
    kept = []
    for temperature in dict.fromkeys(f.temperature for f in found):
        for method in methods:
            base = _exact_beside(method, methods)

            def mean(name: str, where: Sequence[str], at: float = temperature) -> float:
                return statistics.mean(tau[name, each, at] for each in where)

            within = [name for name in sets if name in method.domain]
            if not within or not beyond:
                continue
            ins, outs = mean(method.name, within), mean(method.name, beyond)
            gains = (ins / mean(base, within), outs / mean(base, beyond)) if base else (None, None)
            kept.append(Kept(method.name, temperature, method.trained, ins, outs, *gains))
    return kept


def _exact_beside(method: Method, methods: Sequence[Method]) -> str | None:
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


def findings(kept: Sequence[Kept], rule: str) -> list[str]:
    """Say of each trained method whether it degrades more than the one named `rule`."""
    lines = []
    by_rule = {k.temperature: k for k in kept if k.method == rule}
    for each in kept:
        other = by_rule.get(each.temperature)
        if not each.trained or other is None:
            continue
        verdict = "shown" if each.kept < other.kept else "refuted"
        lines.append(
            f"temperature {each.temperature:g}: {each.method} keeps {each.kept:.0%} of its tokens "
            f"per round, {rule} {other.kept:.0%}: that the trained part degrades more is {verdict}"
        )
    return lines

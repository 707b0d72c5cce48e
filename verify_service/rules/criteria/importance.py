"""AutoJudge: accept a mismatch that a trained judge thinks does not change the final answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flyspec.engine.autojudge import AutoJudge
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule
from verify_service.rules.criteria import Constant, Criterion, Evidence


@dataclass(frozen=True, slots=True)
class Importance(Criterion):
    """P(important) of the target's hidden row after the drafted token, at most a threshold.

    AutoJudge (arXiv 2504.20039). The row is computed as if all drafts before it stood, which is
    what holds where the criterion is asked.
    """

    judge: AutoJudge
    threshold: float

    needs_hidden = True

    def measure(self, at: Evidence) -> Tensor:
        """Return the probability, float64 [n, 1]; NaN, which is not accepted, of such a row."""
        assert at.hidden is not None
        return self.judge.importance(at.hidden)[:, None]

    def accepts(self, *numbers: float) -> bool:
        return numbers[0] <= self.threshold


def importance(rule: Rule, judge: AutoJudge | None) -> Criterion:
    """Return a rule's criterion; no probability of a regression is 0.

    Raises `InvalidArgumentError` without a judge.
    """
    if judge is None:
        raise InvalidArgumentError(
            f"rule.name: the rule {rule.name!r} needs a judge, and this target has none; start the "
            "verify service with --autojudge-file, or use another rule"
        )
    threshold = judge.facts.threshold if rule.judge_threshold is None else rule.judge_threshold
    return Importance(judge, threshold) if threshold > 0.0 else Constant(False)

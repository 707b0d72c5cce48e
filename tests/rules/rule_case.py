"""A round to be judged and its target's answers, as plain numbers in float64, without rule code.

Positions are j = 1..K as in the design's text, `rows[j - 1]` are the target's logits there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tests.rules.rule_definitions import first_argmax, gumbel, probabilities

DEFAULTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "fly": {"window": 6, "theta": 0.3, "measure": "top_k", "k": 3},
    "fly-paper": {"window": 6, "theta": 0.3, "measure": "normalized", "k": 3},
    "fly-reference": {"window": 6, "theta": 0.3, "measure": "top_k", "k": 3},
    "margin": {"window": 6, "scope": "across", "threshold": 0.3},
    "fuzzy": {"window": 0, "kind": "js", "threshold": 0.1, "top_k": 50},
    "fuzzy-reference": {"kind": "js", "threshold": 0.3, "top_k": 0, "matches": True},
    "rejection": {},
    "ensemble": {"weight": 0.7, "top_k": 0},
    "cactus": {"spend": 0.2, "top_k": 0},
    "kl": {"window": 0, "kind": "kl", "threshold": 0.1, "top_k": 50, "confidence": 0.9},
    "relaxed": {"window": 0, "best": 10, "below": 0.01, "share": 1.0},
    "mars": {"window": 0, "ratio": 0.9},
    "typical": {"window": 0, "epsilon": 0.09, "delta": 0.3},
    "random": {"window": 0, "threshold": 0.1, "matches": False},
    "autojudge": {"window": 0, "threshold": None},
}


class Regression(NamedTuple):
    """A judge: w, b, mean and scale of a logistic regression, and its own threshold."""

    weight: list[float]
    bias: float
    mean: list[float]
    scale: list[float]
    threshold: float


class Open(NamedTuple):
    """An open window: its position, the replacement token, and the matches still needed."""

    position: int
    target: int
    remaining: int
    gap: float


@dataclass
class Case:
    rule: str
    drafts: list[int]
    logits: Any  # the tensor that the implementation gets
    rows: np.ndarray  # the same numbers in float64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    presence: float = 0.0
    frequency: float = 0.0
    output: list[int] = field(default_factory=list)  # before the round, all of it generated
    seed: int = 0
    start: int = 0
    eos: frozenset[int] = frozenset()
    control: frozenset[int] = frozenset()
    guarded: frozenset[int] = frozenset()
    loose_tokens: int | None = None
    loose_cost: float | None = None
    exact_until: int = 0
    open: Open | None = None
    given: dict[str, Any] = field(default_factory=dict)  # parameters, named as in DEFAULTS
    draft: Any = None  # distributions as the implementation gets them
    q: list[dict[int, float]] = field(default_factory=list)  # the same, by token
    q_whole: bool = False
    hidden: Any = None  # hidden rows as the implementation gets them
    hidden_rows: list[list[float]] = field(default_factory=list)  # the same, hidden_rows[j] after j
    judge: Any = None  # as the implementation gets it
    regression: Regression | None = None  # the same
    tolerance: float = 1e-9  # of a number that is meant to equal its threshold
    equal_at: int | None = None  # j where it is meant to


@dataclass
class Expected:
    num_accepted: int = 0
    next_token: int = -1
    outcomes: list[str] = field(default_factory=list)
    keep_length: int = 0
    open: Open | None = None
    failed: Open | None = None
    targets: dict[int, int] = field(default_factory=dict)  # by j
    gaps: dict[int, float] = field(default_factory=dict)
    entropies: dict[int, float] = field(default_factory=dict)
    measures: dict[int, float] = field(default_factory=dict)
    tags: set[str] = field(default_factory=set)
    close: bool = False  # rounding could decide otherwise


def drafted(case: Case) -> list[int]:
    """The drafts up to the first EOS."""
    kept = []
    for token in case.drafts:
        kept.append(token)
        if token in case.eos:
            break
    return kept


def setting(case: Case, name: str) -> Any:
    """A parameter: the case's, else the preset's."""
    value = case.given.get(name, DEFAULTS[case.rule].get(name))
    return 0 if name == "window" and value is None else value


def adjusted(case: Case, j: int) -> np.ndarray:
    """The row at j with bias and penalties, which count the output and the drafts before j."""
    row = case.rows[j - 1].copy()
    for token, bias in case.bias.items():
        row[token] += bias
    before = [*case.output, *case.drafts[: j - 1]]
    for token in set(before):
        row[token] -= before.count(token) * case.frequency + case.presence
    return row


def processed(case: Case, j: int) -> np.ndarray:
    row = adjusted(case, j)
    if case.temperature == 0:
        return row
    row = row / case.temperature
    if case.top_k:
        kth = sorted(row, reverse=True)[min(case.top_k, len(row)) - 1]
        row = np.where(row < kth, -np.inf, row)
    if case.top_p < 1:
        p = probabilities(row)
        order = sorted(range(len(row)), key=lambda t: row[t])
        below = 0.0
        row = row.copy()
        for token in order[:-1]:
            below += p[token]
            if below <= 1 - case.top_p:
                row[token] = -np.inf
    return row


def perturbed(case: Case, j: int, stream: int) -> np.ndarray:
    """The scores whose argmax is the target's token at j."""
    row = processed(case, j)
    if case.temperature == 0:
        return row
    return row + gumbel(case.seed, case.start + j - 1, stream, len(row))


def own_tokens(case: Case, stream: int, count: int | None = None) -> list[int]:
    """y_1 .. y_n for all rows."""
    count = len(case.rows) if count is None else count
    return [first_argmax(perturbed(case, j, stream)) for j in range(1, count + 1)]


def sampling(case: Case) -> bool:
    """True if drafts are drawn from their distributions and accepted by p / q."""
    return case.temperature > 0 and case.rule in ("rejection", "ensemble", "cactus")

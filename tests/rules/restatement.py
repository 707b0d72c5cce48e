"""The rules once more: slow, obvious, from the definitions alone, and sharing no code with them.

Positions are j = 1..K as in the design's text, `rows[j]` are the target's logits there in float64.
It also notes which boundaries of the definitions a case touches, so that tests can count them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MASK = 2**64 - 1


@dataclass
class Case:
    rule: str
    drafts: list[int]
    logits: Any  # the tensor that the implementation gets
    rows: np.ndarray  # the same numbers in float64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    start: int = 0
    eos: frozenset[int] = frozenset()
    control: frozenset[int] = frozenset()
    loose_tokens: int | None = None
    loose_cost: float | None = None
    exact_until: int = 0
    window: int | None = None
    theta: float | None = None
    k: int | None = None
    measure: str | None = None
    tolerance: float = 1e-9  # of an entropy that is meant to equal theta


@dataclass
class Expected:
    num_accepted: int
    next_token: int
    outcomes: list[str]
    targets: dict[int, int] = field(default_factory=dict)  # by j
    gaps: dict[int, float] = field(default_factory=dict)
    entropies: dict[int, float] = field(default_factory=dict)
    tags: set[str] = field(default_factory=set)


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 % 2**64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    return z


def gumbel(seed: int, position: int, stream: int, vocab: int) -> np.ndarray:
    """The key in plain integers, the tokens' hash in numpy's unsigned ones."""
    g = 0x9E3779B97F4A7C15
    h = mix((seed + g) % 2**64)
    h = mix(((h ^ position) + g) % 2**64)
    key = mix(((h ^ stream) + g) % 2**64)
    z = np.uint64(key) + np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(g)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    u = ((z >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return (-np.log(-np.log(u))).astype(np.float32)


def processed(row: np.ndarray, case: Case) -> np.ndarray:
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


def probabilities(row: np.ndarray) -> np.ndarray:
    e = np.exp(row - row.max())
    return e / e.sum()


def first_argmax(row: np.ndarray) -> int:
    best = 0
    for token, value in enumerate(row.tolist()):
        if value > row[best]:
            best = token
    return best


def perturbed(row: np.ndarray, case: Case, j: int, stream: int) -> np.ndarray:
    """What the target's token at j is the argmax of."""
    if case.temperature == 0:
        return row
    return processed(row, case) + gumbel(case.seed, case.start + j - 1, stream, len(row))


def own_tokens(case: Case, stream: int) -> list[int]:
    """y_1 .. y_n for all rows."""
    return [
        first_argmax(perturbed(row, case, j, stream)) for j, row in enumerate(case.rows, start=1)
    ]


def entropy(p: np.ndarray, measure: str, k: int) -> float:
    values = sorted((float(x) for x in p), reverse=True)
    if measure == "top_k":
        values = values[:k]
    total = -sum(x * math.log(x) for x in values if x > 0)
    return total / math.log(len(p)) if measure == "normalized" else total


def drafted(case: Case) -> list[int]:
    """The drafts up to the first EOS."""
    kept = []
    for token in case.drafts:
        kept.append(token)
        if token in case.eos:
            break
    return kept


def settings(case: Case, length: int) -> tuple[int, float, int, str]:
    """W, theta, k and the measure: the case's, else the preset's."""
    window, measure = 6, "top_k"
    if case.rule == "fly":
        window = max(0, min(6, length - 1))
    if case.rule == "fly-paper":
        measure = "normalized"
    return (
        window if case.window is None else case.window,
        0.3 if case.theta is None else case.theta,
        case.k or 3,
        case.measure or measure,
    )


def restate(case: Case, y: list[int] | None = None, second: list[int] | None = None) -> Expected:
    """The verdict by definition. `y` and `second` are the target's samples, if known already."""
    y = y or own_tokens(case, 0)
    x = drafted(case)
    length = len(x)
    reference = case.rule == "fly-reference"
    second = second or (own_tokens(case, 1) if reference and case.temperature > 0 else y)
    window, theta, k, measure = settings(case, length)
    following = max(0, window - 1) if reference else window
    tags: set[str] = set()
    if length == 1:
        tags.add("K=1")
    if window == 0:
        tags.add("W=0")
    if window >= length:
        tags.add("W>=K")
    if any(np.isneginf(row).any() for row in case.rows[:length]):
        tags.add("-inf")

    tokens_left = math.inf if case.loose_tokens is None else case.loose_tokens
    cost_left = math.inf if case.loose_cost is None else case.loose_cost
    result = Expected(0, -1, [], tags=tags)

    def matches(j: int) -> bool:
        return x[j - 1] == y[j - 1] or x[j - 1] == second[j - 1]

    for j in range(1, length + 1):
        token, row = x[j - 1], case.rows[j - 1]
        p = processed(row, case)
        if (row == row.max()).sum() > 1:
            tags.add("tie")
        must_be_exact = case.start + j - 1 < case.exact_until or tokens_left <= 0 or cost_left <= 0
        if token == y[j - 1] or (matches(j) and not must_be_exact):
            result.outcomes.append("EXACT")
            result.targets[j] = token
            continue
        gap = float(row.max() - row[token])
        result.gaps[j] = gap
        result.targets[j] = y[j - 1]
        if j + 1 == length and x[j] in case.eos:
            tags.add("before EOS")
        accept = case.rule != "exact" and not must_be_exact
        special = case.eos | case.control
        if token in special or y[j - 1] in special:
            accept = False
            tags.add("control")
        if np.isneginf(p[token]):
            accept = False
            tags.add("impossible")
        if gap > cost_left:
            accept = False
            tags.add("too dear")
        if accept and j + window == length:
            tags.add("j+W=K")
        if accept and j + window == length + 1:
            tags.add("j+W=K+1")
        accept = accept and j + window <= length
        accept = accept and all(matches(i) for i in range(j + 1, min(j + following, length) + 1))
        if accept and not (reference and theta <= 0.01):
            h = entropy(probabilities(row if reference else p), measure, k)
            result.entropies[j] = h
            if abs(h - theta) <= case.tolerance:
                tags.add("theta=H")  # and equal is enough
            else:
                accept = h > theta
            if measure == "normalized" and theta >= 1:
                del result.entropies[j]
                accept = False
        if not accept:
            result.outcomes.append("REJECTED")
            break
        tags.add("loose")
        result.outcomes.append("LOOSE")
        tokens_left -= 1
        cost_left -= gap
    else:
        result.num_accepted, result.next_token = length, y[length]
    if result.outcomes and result.outcomes[-1] == "REJECTED":
        result.num_accepted = len(result.outcomes) - 1
        result.next_token = y[result.num_accepted]
    result.outcomes += ["NOT_REACHED"] * (len(case.drafts) - len(result.outcomes))
    return result

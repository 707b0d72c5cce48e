"""A round to be judged and its target's answers, as plain numbers in float64, without rule code.

Positions are j = 1..K as in the design's text, `rows[j - 1]` are the target's logits there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

DEFAULTS = {
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
    close: bool = False  # rounding could decide otherwise


def drafted(case):
    """The drafts up to the first EOS."""
    kept = []
    for token in case.drafts:
        kept.append(token)
        if token in case.eos:
            break
    return kept


def setting(case, name):
    """A parameter: the case's, else the preset's."""
    value = case.given.get(name, DEFAULTS[case.rule].get(name))
    return 0 if name == "window" and value is None else value


def adjusted(case, j):
    """The row at j with bias and penalties, which count the output and the drafts before j."""
    row = case.rows[j - 1].copy()
    for token, bias in case.bias.items():
        row[token] += bias
    before = [*case.output, *case.drafts[: j - 1]]
    for token in set(before):
        row[token] -= before.count(token) * case.frequency + case.presence
    return row


def processed(case, j):
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


def perturbed(case, j, stream):
    """The scores whose argmax is the target's token at j."""
    row = processed(case, j)
    if case.temperature == 0:
        return row
    return row + gumbel(case.seed, case.start + j - 1, stream, len(row))


def own_tokens(case, stream, count=None):
    """y_1 .. y_n for all rows."""
    count = len(case.rows) if count is None else count
    return [first_argmax(perturbed(case, j, stream)) for j in range(1, count + 1)]


def sampling(case):
    """True if drafts are drawn from their distributions and accepted by p / q."""
    return case.temperature > 0 and case.rule in ("rejection", "ensemble", "cactus")


G = 0x9E3779B97F4A7C15


def mix(z):
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 % 2**64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    return z


def uniforms(seed, position, stream, vocab):
    """One number in (0, 1) per token; the key in plain integers, the tokens' hash in numpy's."""
    h = mix((seed + G) % 2**64)
    h = mix(((h ^ position) + G) % 2**64)
    key = mix(((h ^ stream) + G) % 2**64)
    z = np.uint64(key) + np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(G)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def gumbel(seed, position, stream, vocab):
    return (-np.log(-np.log(uniforms(seed, position, stream, vocab)))).astype(np.float32)


def probabilities(row):
    e = np.exp(row - row.max())
    return e / e.sum()


def first_argmax(row):
    best = 0
    for token, value in enumerate(row.tolist()):
        if value > row[best]:
            best = token
    return best


def entropy(p, measure="nats", k=0):
    values = sorted((float(x) for x in p), reverse=True)
    if measure == "top_k":
        values = values[:k]
    total = -sum(x * math.log(x) for x in values if x > 0)
    return total / math.log(len(p)) if measure == "normalized" else total


def kl(a, b):
    total = 0.0
    for x, y in zip(a, b, strict=True):
        if x > 0 and y <= 0:
            return math.inf
        if x > 0:
            total += x * math.log(x / y)
    return total


def divergence(kind, p, q):
    m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    if kind == "js":
        return (kl(p, m) + kl(q, m)) / 2
    if kind == "kl":
        return kl(p, q)
    if kind in ("tv", "reversed tv"):
        return sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2
    if kind == "reversed js":
        return (kl(m, p) + kl(m, q)) / 2
    assert kind == "reversed kl"
    return kl(q, p)


def buckets(p, q, whole, top_k):
    """p and q over the vocabulary, the target's top k and the rest, or what q lists and the rest.

    What a list leaves is 1 - its sum, but at least what half floats may hide: 2^-11 of its entropy.
    """
    tokens = range(len(p))
    if whole and not 0 < top_k < len(p):
        return p.tolist(), [q[t] for t in tokens]
    if whole:
        kept = sorted(tokens, key=lambda t: -p[t])[:top_k]
        rest_q = sum(q[t] for t in tokens if t not in kept)
    else:
        kept = [t for t in q if q[t] > 0]
        hidden = -sum(x * math.log(x) for x in q.values() if x > 0) * 2.0**-11
        rest_q = max(1 - sum(q.values()), hidden)
    rest_p = float(sum(p[t] for t in tokens if t not in kept))
    return [*(float(p[t]) for t in kept), rest_p], [*(q[t] for t in kept), rest_q]

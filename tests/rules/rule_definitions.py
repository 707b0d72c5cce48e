"""The rules' measures reimplemented in numpy float64, from the definitions, without shared code.

Nothing here is fast or careful about range; cases are small.
"""

from __future__ import annotations

import math

import numpy as np

G = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 % 2**64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    return z


def uniforms(seed: int, position: int, stream: int, vocab: int) -> np.ndarray:
    """One number in (0, 1) per token; the key in plain integers, the tokens' hash in numpy's."""
    h = mix((seed + G) % 2**64)
    h = mix(((h ^ position) + G) % 2**64)
    key = mix(((h ^ stream) + G) % 2**64)
    z = np.uint64(key) + np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(G)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def gumbel(seed: int, position: int, stream: int, vocab: int) -> np.ndarray:
    return (-np.log(-np.log(uniforms(seed, position, stream, vocab)))).astype(np.float32)


def probabilities(row: np.ndarray) -> np.ndarray:
    e = np.exp(row - row.max())
    return e / e.sum()


def first_argmax(row: np.ndarray) -> int:
    best = 0
    for token, value in enumerate(row.tolist()):
        if value > row[best]:
            best = token
    return best


def entropy(p: np.ndarray, measure: str = "nats", k: int = 0) -> float:
    values = sorted((float(x) for x in p), reverse=True)
    if measure == "top_k":
        values = values[:k]
    total = -sum(x * math.log(x) for x in values if x > 0)
    return total / math.log(len(p)) if measure == "normalized" else total


def kl(a: list[float], b: list[float]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        if x > 0 and y <= 0:
            return math.inf
        if x > 0:
            total += x * math.log(x / y)
    return total


def divergence(kind: str, p: list[float], q: list[float]) -> float:
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


def buckets(
    p: np.ndarray, q: dict[int, float], whole: bool, top_k: int
) -> tuple[list[float], list[float]]:
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

"""Random draft distributions, close to the target's or not, in every possible form."""

from __future__ import annotations

import random

import numpy as np
import torch

from flyspec.engine.distributions import Distributions
from tests.rules.rule_case import Case, own_tokens, processed, sampling, setting
from tests.rules.rule_definitions import probabilities


def draw_q(case: Case, rng: random.Random, gen: np.random.Generator, j: int) -> np.ndarray:
    """A distribution over the vocabulary, mostly close to the target's."""
    row = case.rows[j - 1] if case.rule == "fuzzy-reference" else processed(case, j)
    if rng.random() < 0.5:
        row = np.where(np.isneginf(row), row.max() - 6.0, row)  # more support than the target
    scale = rng.choice([0.02, 0.1, 0.3, 0.5, 1.5])
    return probabilities(row + gen.normal(size=len(row)) * scale)


def draw_from_distributions(
    case: Case, rng: random.Random, gen: np.random.Generator, j: int
) -> int:
    """A draft for the position j and its distribution, from which it is drawn."""
    q = draw_q(case, rng, gen, j)
    form = rng.random()
    if form < 0.15:  # as prompt lookup: a point mass
        wrong = rng.random() < 0.3
        token = rng.randrange(len(q)) if wrong else own_tokens(case, 0, j)[j - 1]
        case.q.append({token: 1.0})
        return token
    kept = np.argsort(-q)[: 5 if form < 0.5 else len(q)]
    listed = {int(t): float(q[t]) for t in kept if q[t] > 1e-6}
    total = sum(listed.values())
    case.q.append({t: x / total for t, x in listed.items()})
    return rng.choices([*listed], weights=[*listed.values()])[0]


def draw_distributions(case: Case, rng: random.Random, gen: np.random.Generator) -> None:
    """Set `draft`, and `q` to exactly the same numbers."""
    vocab, count = case.rows.shape[1], len(case.drafts)
    if not sampling(case):
        top_k = setting(case, "top_k")
        points = rng.random() < 0.05
        may_list = case.rule != "fuzzy-reference"  # compares whole distributions
        lists = points or (may_list and top_k > 0 and rng.random() < 0.5)
        kept = min(vocab, top_k if top_k else 1)
        case.q = []
        for j in range(1, count + 1):
            q = draw_q(case, rng, gen, j)
            tokens = np.argsort(-q)[:kept] if lists else np.arange(vocab)
            one = points or rng.random() < 0.05
            case.q.append({case.drafts[j - 1]: 1.0} if one else {int(t): q[t] for t in tokens})
    else:
        lists = rng.random() < 0.5
    if not count:
        return
    width = max(len(q) for q in case.q) if lists else vocab
    log_probs = np.full((count, width), -np.inf)
    ids = np.zeros((count, width), dtype=np.int64)
    for row, q in enumerate(case.q):
        tokens = [*q]
        ids[row] = tokens[0]  # padding repeats a token
        ids[row, : len(tokens)] = tokens
        columns = range(len(tokens)) if lists else tokens
        with np.errstate(divide="ignore"):
            log_probs[row, columns] = np.log([q[t] for t in tokens])
    rounded = torch.from_numpy(log_probs)
    rounded = rounded.half().float() if rng.random() < 0.5 else rounded.float()
    if sampling(case):
        rounded = rounded.log_softmax(dim=-1)
    case.draft = Distributions(rounded, torch.from_numpy(ids) if lists else None)
    case.q_whole = not lists
    exact = np.exp(rounded.double().numpy())
    for row, q in enumerate(case.q):
        if lists:
            case.q[row] = {t: float(exact[row, i]) for i, t in enumerate(q)}
        else:
            case.q[row] = {t: float(exact[row, t]) for t in range(vocab)}

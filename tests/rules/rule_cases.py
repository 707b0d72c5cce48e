"""Random cases for the rules, near enough to their boundaries to be worth comparing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from restatement import (
    Case,
    Expected,
    drafted,
    entropy,
    own_tokens,
    perturbed,
    probabilities,
    processed,
    restate,
    settings,
)

from flyspec.types import Budget, EntropyMeasure, Rule, SamplingParams
from verify_service.rules.criteria.entropy import normalized_entropy, top_k_entropy

MEASURES = {"normalized": EntropyMeasure.NORMALIZED, "top_k": EntropyMeasure.TOP_K}


def draw_logits(rng: random.Random, gen: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Continuous, or small integers (ties); sometimes with -inf; from flat to peaked."""
    kind = rng.random()
    if kind < 0.3:
        logits = gen.integers(0, 4, size=(rows, vocab)).astype(np.float64)
    else:
        logits = gen.normal(size=(rows, vocab)) * rng.choice([0.5, 1.0, 2.0, 3.0])
    if rng.random() < 0.2:
        hidden = gen.random((rows, vocab)) < rng.choice([0.05, 0.3])
        hidden[np.arange(rows), gen.integers(0, vocab, size=rows)] = False
        logits[hidden] = -np.inf
    return logits


def draw_case(rule: str, rng: random.Random, gen: np.random.Generator) -> tuple[Case, Expected]:
    """One case and what the definitions say of it."""
    vocab = rng.randint(12, 40)
    length = rng.choice([0, 1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 12, 13, 14, 15, 16])
    values = draw_logits(rng, gen, length + 1, vocab)
    hot = rng.random() < 0.35
    case = Case(rule, [], None, values, seed=rng.getrandbits(64), start=rng.randint(0, 5000))
    dtype = rng.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    if hot:
        case.temperature = rng.choice([0.5, 0.7, 1.0, 1.5])
        case.top_k = rng.choice([0, 0, 0, 3, 8, 64])
        if rng.random() < 0.3:
            case.top_p = rng.choice([0.5, 0.9])
            values += gen.normal(size=values.shape) * 0.01  # no ties at the nucleus' edge
            dtype = torch.float64
    set_logits(case, values, dtype)
    if hot and dtype != torch.float64 and any_close(case):
        set_logits(case, values, torch.float64)  # float32 could see another winner
    draw_parameters(case, rng, length)
    y = own_tokens(case, 0)
    second = own_tokens(case, 1) if hot and rule == "fly-reference" else y
    draw_drafts(case, rng, y, second, vocab)
    if rule != "exact" and case.drafts:
        draw_threshold(case, rng, y, second)
    return case, restate(case, y, second)


def set_logits(case: Case, values: np.ndarray, dtype: torch.dtype) -> None:
    case.logits = torch.tensor(values, dtype=torch.float64).to(dtype)
    case.rows = case.logits.double().numpy()
    case.tolerance = 1e-9 if dtype == torch.float64 else 1e-5


def any_close(case: Case) -> bool:
    """Whether two tokens compete for a sample so closely that rounding decides."""
    streams = (0, 1) if case.rule == "fly-reference" else (0,)
    for stream in streams:
        for j, row in enumerate(case.rows, start=1):
            top = np.sort(perturbed(row, case, j, stream))[-2:]
            if top[1] - top[0] < 1e-4:
                return True
    return False


def draw_parameters(case: Case, rng: random.Random, length: int) -> None:
    if rng.random() < 0.1:
        case.loose_tokens = rng.choice([0, 1, 1, 2])
    if rng.random() < 0.1:
        case.loose_cost = rng.choice([0.0, 0.25, 0.5, 1.0, 2.0])
    if rng.random() < 0.1:
        case.exact_until = case.start + rng.randint(0, 6)
    if case.rule == "exact":
        return
    kind = rng.random()
    if kind < 0.78:
        case.window = rng.choice([0, 0, 1, 1, 1, 2, 2, 3, 4])
    elif kind < 0.86:
        case.window = length + rng.choice([-1, 0, 1]) if length else 3
    if rng.random() < 0.2:
        case.measure = rng.choice(["normalized", "top_k"])
    if settings(case, length)[3] == "top_k" and rng.random() < 0.3:
        case.k = rng.choice([2, 3, 5, 64])


def draw_drafts(
    case: Case, rng: random.Random, y: list[int], second: list[int], vocab: int
) -> None:
    for j in range(len(y) - 1):
        if rng.random() < 0.9:
            case.drafts.append(rng.choice([y[j], second[j]]))
            continue
        likely = np.argsort(-case.rows[j])[:4].tolist()
        others = likely if rng.random() < 0.92 else list(range(vocab))
        case.drafts.append(rng.choice([t for t in others if t != y[j]]))
    ids = range(vocab)
    if rng.random() < 0.12:
        case.eos = frozenset(rng.sample(ids, rng.randint(1, 2)))
    if rng.random() < 0.12:
        case.control = frozenset(rng.sample(ids, rng.randint(1, 3)))
    wrong = [j for j, token in enumerate(case.drafts) if token != y[j]]
    if wrong and rng.random() < 0.08:
        case.control = frozenset([rng.choice([case.drafts[wrong[0]], y[wrong[0]]])])
    if wrong and wrong[0] + 1 < len(case.drafts) and rng.random() < 0.1:
        case.eos = frozenset([case.drafts[wrong[0] + 1]])


def draw_threshold(case: Case, rng: random.Random, y: list[int], second: list[int]) -> None:
    """Mostly low; sometimes the very entropy of a mismatch; never close to one by accident."""
    length = len(drafted(case))
    _, _, k, measure = settings(case, length)
    wrong = [j for j in range(length) if case.drafts[j] not in (y[j], second[j])]
    greedy = case.temperature == 0 or case.rule == "fly-reference"
    kind = rng.random()
    if kind < 0.15:
        case.theta = None
    elif kind < 0.2 and measure == "normalized":
        case.theta = 1.0
    elif kind < 0.3:
        case.theta = rng.choice([0.0, 0.005, 0.01])
    elif kind < 0.45 and wrong and greedy:
        row = case.logits[wrong[0]][None]
        h = normalized_entropy(row) if measure == "normalized" else top_k_entropy(row, k)
        case.theta = float(h.item())
    else:
        case.theta = rng.uniform(0.02, 0.3)
    near = 1e-6 if case.tolerance < 1e-6 else 1e-3
    theta = settings(case, length)[1]
    for j in wrong[1:] if kind >= 0.3 and kind < 0.45 else wrong:
        row = case.rows[j] if case.rule == "fly-reference" else processed(case.rows[j], case)
        if 0 < abs(entropy(probabilities(row), measure, k) - theta) < near:
            case.theta = 0.02
            return


def arguments(case: Case) -> dict[str, object]:
    """The case as `judge` takes it."""
    return {
        "rule": Rule(
            case.rule,
            fly_window_size=case.window,
            fly_entropy_threshold=case.theta,
            fly_entropy_top_k=case.k,
            entropy_measure=MEASURES[case.measure] if case.measure else None,
        ),
        "draft_token_ids": case.drafts,
        "target_logits": case.logits,
        "sampling": SamplingParams(case.temperature, case.top_p, case.top_k),
        "seed": case.seed,
        "start_position": case.start,
        "eos_token_ids": case.eos,
        "control_token_ids": case.control,
        "budget": Budget(case.loose_tokens, case.loose_cost),
        "exact_until_position": case.exact_until,
    }


def cases(rule: str, count: int, seed: int = 1) -> Iterator[tuple[Case, Expected]]:
    """The same cases for the same arguments."""
    rng, gen = random.Random(f"{rule}/{seed}"), np.random.default_rng(seed)
    for _ in range(count):
        yield draw_case(rule, rng, gen)

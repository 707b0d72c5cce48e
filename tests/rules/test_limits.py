"""Parameters for which a lossy rule equals `exact`, verdict by verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flyspec.engine.distributions import Distributions
from flyspec.engine.sampling import choose
from flyspec.rules import Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.values.tokens import SamplingParams
from verify_service.rules import judge


def closed_rules() -> list[Rule]:
    """The parameters that give `exact`, whatever the window."""
    normalized = EntropyMeasure.NORMALIZED
    rules = [
        Rule(name, 0, 1.0, None, normalized, scope)
        for name in ("fly", "fly-paper")
        for scope in WindowScope
    ]
    rules.append(Rule("fly-reference", 0, 1.0, None, normalized))
    for scope in WindowScope:
        shared = {"fly_window_size": 0, "window_scope": scope}
        rules.append(Rule("margin", margin_threshold=0.0, **shared))
        rules.append(Rule("random", random_acceptance=0.0, **shared))
        rules.append(Rule("kl", divergence_threshold=0.0, **shared))
        rules.append(Rule("mars", mars_ratio=1.0, **shared))
        rules += [
            Rule("fuzzy", divergence=kind, divergence_threshold=0.0, divergence_top_k=k, **shared)
            for kind in Divergence
            for k in (0, 4)
        ]
    return rules


WIDE = [  # within a round, W >= K
    Rule("fly", 8, 0.0),
    Rule("fly-paper", 9, 0.0),
    Rule("fly-reference", 8, 0.0),
    Rule("margin", 8, margin_threshold=50.0, window_scope=WindowScope.WITHIN_ROUND),
    Rule("fuzzy", 8, divergence_threshold=50.0),
    Rule("typical", 8, typical_epsilon=0.0),
    Rule("kl", 8, divergence_threshold=50.0, confidence_threshold=1.0),
    Rule("relaxed", 8, relaxed_ratio=0.0),
    Rule("mars", 8, mars_ratio=0.0),
    Rule("random", 8, random_acceptance=1.0),
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", [*closed_rules(), *WIDE], ids=str)
def test_limits_give_exact(rule: Rule, temperature: float) -> None:
    """Uniform rows make the entropy 1 and the margin 0 exactly; q = p makes divergences 0."""
    if rule.name == "fly-reference" and temperature > 0:
        pytest.skip("its second sample is a match of its own, whatever the gate")
    generator = torch.Generator().manual_seed(3)
    for seed in range(9):
        logits = torch.randn(9, 16, generator=generator)
        logits[seed % 9] = 0.0
        drafts = torch.randint(0, 16, (8,), generator=generator).tolist()
        for i in range(0, 8, 2):
            drafts[i] = int(choose(logits[i : i + 1], SamplingParams(temperature), i, seed)[0])
        given: dict[str, Any] = {"sampling": SamplingParams(temperature), "seed": seed}
        q = Distributions((logits[:8] / (temperature or 1.0)).log_softmax(-1), None)
        got = judge(rule, drafts, logits, draft_distributions=q, **given)
        assert got == judge("exact", drafts, logits, **given)

"""Random judges of the rule `autojudge`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flyspec.engine.autojudge import AutoJudge, JudgeFacts


def facts_of(hidden_size: int, **changes: Any) -> JudgeFacts:
    """Facts of a judge that nobody trained."""
    facts: dict[str, Any] = {
        "model": "target", "weights_fingerprint": "w" * 32, "draft_model": "draft",
        "draft_weights_fingerprint": "", "hidden_size": hidden_size, "dtype": "float64",
        "task": "none", "seed": 1, "max_tokens": 8, "prompts": 10, "held_out_prompts": 2,
        "labels": 100, "held_out_labels": 20, "important": 30, "auc": 0.5, "train_auc": 0.5,
        "regularization": 1.0, "target_recall": 0.9, "threshold": 0.5, "thresholds": (),
        "flyspec_version": "0",
    }  # fmt: skip
    return JudgeFacts(**facts | changes)


def tensors_of(hidden_size: int, gen: np.random.Generator) -> dict[str, torch.Tensor]:
    """Random numbers, rounded as a file's are."""
    numbers = {
        "weight": gen.normal(size=hidden_size),
        "bias": gen.normal(size=1),
        "mean": gen.normal(size=hidden_size),
        "scale": gen.uniform(0.5, 2.0, size=hidden_size),
    }
    return {name: torch.tensor(each, dtype=torch.float32) for name, each in numbers.items()}


def random_judge(hidden_size: int, seed: int = 1, device: str = "cpu", **changes: Any) -> AutoJudge:
    tensors = tensors_of(hidden_size, np.random.default_rng(seed))
    facts = facts_of(hidden_size, **changes)
    return AutoJudge(**tensors, facts=facts, fingerprint=f"{seed:032x}").on(device)

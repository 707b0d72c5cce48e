"""Sizes and training of the bundled models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from demo.batches import Mix


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes of one model, as in its configuration, and its training."""

    sizes: Mapping[str, int]
    phases: tuple[tuple[float, Mix], ...]  # rows, up to that fraction of the training
    steps: int
    minutes: float
    muon_lr: float
    adam_lr: float
    long: Mix | None = None  # replaces every 16th batch
    distilled: bool = False


_DRAFT = Recipe(
    sizes={
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    phases=(
        (0.3, Mix(256, problems=15, drills=4, code=5, copying=True)),
        (1.0, Mix(256, problems=18, drills=1, code=5, copying=True)),
    ),
    steps=1225,
    minutes=12,
    muon_lr=2e-2,
    adam_lr=4e-3,
    distilled=True,
)
RECIPES: Mapping[str, Recipe] = {
    "target": Recipe(
        sizes={
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        phases=(
            (0.3, Mix(256, problems=11, drills=6, code=7)),  # the arithmetic is learnt first
            (0.6, Mix(256, problems=15, drills=1, code=8, copying=True)),
            (0.745, Mix(256, problems=19, drills=1, code=4, copying=True)),
            (1.0, Mix(256, problems=21, drills=1, code=2, copying=True, hard=True)),
        ),
        long=Mix(1024, problems=0, drills=0, code=6),
        steps=3600,
        minutes=90,
        muon_lr=1e-2,
        adam_lr=2e-3,
    ),
    "draft": _DRAFT,
    "draft-bytes": replace(
        _DRAFT,
        sizes={**_DRAFT.sizes, "num_hidden_layers": 4},
        phases=(
            (0.3, Mix(640, problems=9, drills=4, code=3, copying=True)),
            (1.0, Mix(640, problems=12, drills=1, code=3, copying=True)),
        ),
        steps=1500,
        minutes=7,
        distilled=False,
    ),
}

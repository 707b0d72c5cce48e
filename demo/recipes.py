"""The models to train: the bundled ones, and a second pair, so that no finding hangs on one.

The second pair differs in size, tokenizer and corpus: wording by Zipf's law, as people write,
instead of uniform, and English prose instead of code. It is trained where it is needed, not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from demo import corpus
from demo.batches import Mix


@dataclass(frozen=True, slots=True)
class Recipe:
    """Size and training of one model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    phases: tuple[tuple[float, Mix], ...]  # rows, up to that fraction of the training
    steps: int
    minutes: float
    muon_lr: float
    adam_lr: float
    long: Mix | None = None  # replaces every 16th batch
    distilled: bool = False


_DRAFT = Recipe(
    hidden=128,
    intermediate=384,
    layers=2,
    heads=4,
    kv_heads=4,
    head_size=32,
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
_BUNDLED = {
    "target": Recipe(
        hidden=384,
        intermediate=1024,
        layers=6,
        heads=8,
        kv_heads=4,
        head_size=64,
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
        layers=4,
        phases=(
            (0.3, Mix(640, problems=9, drills=4, code=3, copying=True)),
            (1.0, Mix(640, problems=12, drills=1, code=3, copying=True)),
        ),
        steps=1500,
        minutes=7,
        distilled=False,
    ),
}
_STUDY_DRAFT = replace(_DRAFT, layers=1, heads=4, steps=1000, minutes=15)
_STUDY = {
    "target": replace(
        _BUNDLED["target"],
        hidden=256,
        intermediate=768,
        layers=5,
        kv_heads=2,
        head_size=32,
        long=None,
        steps=3000,
        minutes=120,
    ),
    "draft": _STUDY_DRAFT,
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Models of one corpus: their recipes by name, the size of their tokenizer, and their texts.

    `split` returns training and held-out texts besides the problems; `zipf`: the problems' wording.
    """

    recipes: Mapping[str, Recipe]
    vocab_size: int
    split: Callable[[], tuple[list[str], list[str]]]
    zipf: bool = False


PAIRS: Mapping[str, Pair] = MappingProxyType(
    {
        "bundled": Pair(_BUNDLED, 4096, corpus.code_split),
        "study": Pair(_STUDY, 2048, corpus.prose_split, zipf=True),
    }
)

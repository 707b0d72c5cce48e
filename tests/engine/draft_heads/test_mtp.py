"""MTP layers in the published layouts draft as transformers' layer does without a cache."""

from __future__ import annotations

import pytest
import torch

from flyspec.engine.draft_heads.base import HeadStep
from flyspec.engine.draft_heads.loading import load_head
from flyspec.values.tokens import SamplingParams
from tests.engine.draft_heads import restated
from tests.engine.draft_heads.layouts import HIDDEN, MTP_KINDS, write_mtp
from tests.engine.draft_heads.test_eagle3 import TOKENS, drawn


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64),)


@pytest.mark.parametrize("kind", MTP_KINDS)
def test_a_targets_own_layer_drafts(kind, tmp_path):
    folder, target, alone = write_mtp(tmp_path, kind)
    head = load_head(folder, target, 2)
    assert (head.kind, head.hidden_layers) == ("mtp", (2,))
    logits = restated.mtp(alone, kind.startswith("qwen"), target)
    first, second = rows(9), rows(4, seed=1)
    sampling = SamplingParams(temperature=1.0)
    # One slot's cache is filled in two pieces, with something drafted and dropped in between.
    head.draft([HeadStep(0, 0, (first[0][:6],), TOKENS[:6], 3)])
    found = head.draft(
        [
            HeadStep(0, 5, (first[0][5:],), TOKENS[5:9], 5),
            HeadStep(1, 0, second, TOKENS[:4], 4, sampling, 7),
        ]
    )
    expected = [
        drawn(logits, first, TOKENS[:9], 5),
        drawn(logits, second, TOKENS[:4], 4, sampling, 7),
    ]
    for drafted, (tokens, chances) in zip(found, expected, strict=True):
        assert drafted.token_ids == tokens
        assert drafted.confidences == pytest.approx(chances, rel=1e-5)


def test_its_parameters_are_those_of_the_layer(tmp_path):
    folder, target, alone = write_mtp(tmp_path, "qwen3")
    head = load_head(folder, target, 1)
    shared = alone.embed_tokens.weight.numel()
    assert head.num_parameters == sum(p.numel() for p in alone.parameters()) - shared

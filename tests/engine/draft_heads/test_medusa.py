"""Medusa heads and MTP layers in the published layouts draft what their definitions say."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from flyspec.engine.draft_heads.base import HeadStep
from flyspec.engine.draft_heads.loading import load_head
from flyspec.values.tokens import SamplingParams
from tests.engine.draft_heads import restated
from tests.engine.draft_heads.layouts import (
    DRAFTED,
    HIDDEN,
    LAYERS,
    MTP_KINDS,
    make_target,
    medusa_tensors,
    write_medusa,
    write_mtp,
    write_vllm_medusa,
)
from tests.engine.draft_heads.test_eagle3 import TOKENS, drawn
from tests.engine.random_models import VOCABULARY


@pytest.fixture(scope="module")
def target():
    return make_target()


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64),)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0)])
def test_each_head_guesses_one_token(target, tmp_path, blocks, sampling):
    head = load_head(write_medusa(tmp_path, blocks), target, 2)
    assert (head.kind, head.max_tokens, head.hidden_layers) == ("medusa", 3, (LAYERS,))
    logits = restated.medusa(medusa_tensors(3, blocks), blocks)
    steps, expected = [], []
    for slot, (count, most) in enumerate(((4, 3), (1, 2))):
        hidden = rows(count, slot)
        steps.append(HeadStep(slot, 0, hidden, TOKENS[:count], most, sampling, 3))
        expected.append(drawn(logits, hidden, TOKENS[:count], most, sampling, 3))
    for drafted, (tokens, chances) in zip(head.draft(steps), expected, strict=True):
        assert drafted.token_ids == tokens
        assert drafted.confidences == pytest.approx(chances, rel=1e-6)
    assert [head.held(0), head.held(1)] == [4, 1]
    assert head.draft([steps[0]._replace(max_tokens=0)])[0].token_ids == []
    head.forget(0)
    assert head.held(0) == 0


def test_vllms_layout_may_reduce_the_vocabulary(target, tmp_path):
    head = load_head(write_vllm_medusa(tmp_path), target, 1)
    tensors = load_file(tmp_path / "model.safetensors")
    hidden = rows(2)
    (drafted,) = head.draft([HeadStep(0, 0, hidden, TOKENS[:2], 3)])
    for k, token in enumerate(drafted.token_ids):
        y = tensors[f"blocks.{k}.layers.0.weight"] @ hidden[0][-1]
        best = (tensors[f"lm_heads.{k}.weight"] @ (hidden[0][-1] + y * y.sigmoid())).argmax()
        assert token == tensors["token_map"][best]
    assert head.num_parameters == 3 * HIDDEN * (HIDDEN + DRAFTED)


def test_vllms_layout_may_share_the_targets_output_layer(target, tmp_path):
    folder = write_vllm_medusa(tmp_path, original_lm_head=True, truncated_vocab_size=VOCABULARY)
    head = load_head(folder, target, 1)
    tensors = load_file(folder / "model.safetensors")
    hidden = rows(2)
    (drafted,) = head.draft([HeadStep(0, 0, hidden, TOKENS[:2], 1)])
    y = tensors["blocks.0.layers.0.weight"] @ hidden[0][-1]
    assert drafted.token_ids == [int((target.lm_head @ (hidden[0][-1] + y * y.sigmoid())).argmax())]
    assert head.num_parameters == 3 * HIDDEN * HIDDEN


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

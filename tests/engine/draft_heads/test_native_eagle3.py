"""The native step runs an EAGLE-3 head as torch does, but for bf16's rounding."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from flyspec.engine.draft_heads.base import HeadStep
from flyspec.engine.draft_heads.eagle3 import Eagle3Head
from flyspec.engine.draft_heads.eagle3_network import Eagle3Network, Eagle3Shape
from flyspec.engine.draft_heads.native_eagle3 import NativeEagle3Head, difference, unsupported
from flyspec.engine.draft_heads.stepping import SteppingHead
from flyspec.engine.model import History
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from tests.engine.native_steps import SETS, compiled, needs_step, pairs

pytestmark = needs_step
VOCABULARY, HIDDEN, DRAFTED = 150, 72, 100  # neither are whole panels
SHAPE = Eagle3Shape(
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=112, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5,
        attention_bias=False,
    ),
    HIDDEN, (1, 2, 3), DRAFTED,
)  # fmt: skip
VARIANTS = {
    "plain": SHAPE,
    "norms": replace(SHAPE, norm_before_residual=True, norm_output=True, fc_norm=True),
    "qwen3": replace(SHAPE, qk_norm=True, norm_before_fc=True),
    "two layers": replace(SHAPE, config=LlamaConfig(**{
        **SHAPE.config.to_dict(), "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True,
    })),
}  # fmt: skip
TOKENS = [(7 * i * i + 3) % VOCABULARY for i in range(160)]


def make(shape, name, whole=False):
    """The native head, and the same one with torch in float32 with bf16's weights."""
    torch.manual_seed(1)
    if whole:
        shape = replace(shape, draft_vocab_size=VOCABULARY)
    network = Eagle3Network(shape).requires_grad_(False)
    for parameter in network.parameters():
        drawn = torch.randn_like(parameter)
        scale = 1.5 * parameter.shape[-1] ** -0.5
        parameter.data = (
            (1 + 0.2 * drawn if parameter.ndim < 2 else scale * drawn).bfloat16().float()
        )
    embedding = torch.randn(VOCABULARY, HIDDEN).bfloat16()
    ids = None if whole else torch.randperm(VOCABULARY)[:DRAFTED].sort().values
    own = NativeEagle3Head(network, embedding, ids, 3, 200, 1, "", compiled(name))
    return own, Eagle3Head(network, embedding.float(), ids, 3, 200, 1, "")


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, HIDDEN, generator=generator) for _ in range(3))


@pytest.mark.parametrize(("variant", "name"), pairs(VARIANTS))
def test_its_logits_are_torchs(name, variant):
    for whole in {False, variant == "plain"}:
        own, reference = make(VARIANTS[variant], name, whole)
        hidden = rows(150)
        found, expected = (each.tried(TOKENS[:151], hidden) for each in (own, reference))
        known = expected > -torch.inf
        assert torch.equal(known, found > -torch.inf)
        off = (found - expected)[known].abs().max() / expected[known].abs().max()
        assert 0 < float(off) < 0.04
        assert not difference(own, reference)


@pytest.mark.parametrize("name", SETS)
def test_a_draft_in_one_call_has_the_tokens_of_single_steps(name):
    """Also in batches, with a missing beginning, and after what was dropped: with the same bits."""
    own, _ = make(SHAPE, name)
    given = rows(30)
    part = tuple(each[12:20] for each in given)
    samplings = (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.01),
    )
    steps = [
        HeadStep(0, 0, tuple(each[:20] for each in given), TOKENS[:20], 6, samplings[0], 3),
        HeadStep(1, 12, part, TOKENS[12:20], 5, samplings[1], 4),
        HeadStep(2, 0, rows(1, 1), TOKENS[:1], 4, samplings[2], 5),
    ]
    own.draft([HeadStep(1, 60, rows(25, 2), TOKENS[:25], 8), HeadStep(0, 0, rows(28), TOKENS[:28])])
    together = own.draft(steps)
    for step, found in zip(steps, together, strict=True):
        own.forget(step.slot)
        (alone,) = own.draft([step])
        assert alone == found
        own.forget(step.slot)
        (single,) = SteppingHead.draft(own, [step])
        assert single.token_ids == found.token_ids
        assert single.confidences == pytest.approx(found.confidences, rel=1e-4)
    assert [own.held(slot) for slot in range(3)] == [20, 20, 1]


@pytest.mark.parametrize("name", SETS[:1])
def test_draws_that_need_their_logits_go_step_by_step(name):
    own, _ = make(SHAPE, name)
    step = HeadStep(0, 0, rows(9), TOKENS[:9], 6, history=History([*TOKENS[:10]], 4))
    (plain,) = own.draft([step])
    penalty = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    (penalized,) = own.draft([step._replace(sampling=penalty)])
    assert len(set(penalized.token_ids)) >= len(set(plain.token_ids))
    sampled = step._replace(sampling=SamplingParams(temperature=1.0))
    spec = DistributionSpec(draw_from_it=True)
    (drafted,) = own.draft([sampled._replace(distribution=spec)])
    assert all(each.log_probs for each in drafted.distributions)
    (greedy,) = own.draft([step._replace(distribution=spec)])
    assert greedy.token_ids == plain.token_ids
    assert [each.log_probs for each in greedy.distributions] == [b""] * 6
    (listed,) = own.draft([step._replace(distribution=DistributionSpec(top_k=3))])
    assert listed.token_ids == plain.token_ids
    assert [len(each.token_ids) for each in listed.distributions] == [3] * 6


@pytest.mark.parametrize("name", SETS[:1])
def test_it_stops_as_torch_does(name):
    own, reference = make(SHAPE, name)
    step = HeadStep(0, 0, rows(9), TOKENS[:9], 6)
    tokens = own.draft([step])[0].token_ids
    stop = step._replace(stop_token_ids=[tokens[1]])
    assert own.draft([stop])[0].token_ids == tokens[: tokens.index(tokens[1]) + 1]
    for least in (0.5, 0.01, 1e-4):
        unsure = step._replace(min_confidence=least)
        counts = [len(each.draft([unsure])[0].token_ids) for each in (own, reference)]
        assert counts[0] == counts[1]
    assert own.draft([step._replace(max_tokens=0)])[0].token_ids == []


@pytest.mark.parametrize("name", SETS[:1])
def test_another_head_is_found_out(name):
    own, _ = make(SHAPE, name)
    _, whole = make(SHAPE, name, whole=True)
    assert difference(own, whole) == "it drafts other tokens"
    _, changed = make(replace(SHAPE, norm_before_residual=True), name)
    assert "its logits differ by" in difference(own, changed)


def test_head_sizes_that_it_lacks_are_named():
    config = LlamaConfig(**{**SHAPE.config.to_dict(), "head_dim": 24})
    assert "head size 24" in unsupported(Eagle3Network(replace(SHAPE, config=config)))
    assert unsupported(Eagle3Network(SHAPE)) == ""

"""Heads in the published layouts draft what slow restatements without cache draft."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from flyspec.engine.distributions import decode
from flyspec.engine.draft_heads.base import HeadStep
from flyspec.engine.draft_heads.loading import load_head
from flyspec.engine.logits import process_logits
from flyspec.engine.model import History
from flyspec.engine.sampling import choose_processed
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from flyspec_lab.training.eagle3_files import write_eagle3
from tests.engine.draft_heads import restated
from tests.engine.draft_heads.layouts import (
    CONFIG,
    DRAFTED,
    HIDDEN,
    LAYERS,
    MTP_KINDS,
    SPECULATORS,
    eagle3_tensors,
    make_target,
    medusa_tensors,
    write,
    write_medusa,
    write_mtp,
    write_specforge,
    write_speculators,
    write_vllm_medusa,
)
from tests.engine.random_models import VOCABULARY

LAYOUTS = {
    "specforge": lambda folder: write_specforge(folder),
    "specforge 3.1": lambda folder: write(
        folder,
        {**json.loads((write_specforge(folder) / "config.json").read_text()),
         "fc_norm": True, "norm_output": True},
        eagle3_tensors(**{f"fc_norm.{i}.weight": [HIDDEN] for i in range(3)}),
    ),
    "with model. before all": lambda folder: write(
        folder,
        json.loads((write_specforge(folder) / "config.json").read_text()),
        {(n if "2" in n else f"model.{n}"): t for n, t in eagle3_tensors().items()},
    ),
    "speculators": lambda folder: write_speculators(folder),
    "speculators, norms": lambda folder: write_speculators(
        folder, norm_before_residual=False, norm_before_fc=True, norm_output=True
    ),
    "speculators, qwen3": lambda folder: write_speculators(
        folder, transformer_layer_config={**CONFIG, "model_type": "qwen3"}
    ),
}  # fmt: skip
GREEDY = SamplingParams()
TOKENS = [(7 * i * i + 3) % VOCABULARY for i in range(30)]


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def head(target, tmp_path):
    return load_head(write_specforge(tmp_path), target, 3)


@pytest.fixture
def logits(target, head, tmp_path):
    """The restatement of `head`."""
    return _restated(tmp_path, target)


def _restated(folder, target):
    config = json.loads((folder / "config.json").read_text())
    return restated.eagle3(config, load_file(folder / "model.safetensors"), target.embedding)


def rows(count, seed=0, layers=3):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(layers)
    )


def drawn(logits, hidden, tokens, count, sampling=GREEDY, seed=0):
    """Draw tokens from restated logits; returns them and the largest probability at each place."""
    tokens, chances = list(tokens), []
    given = len(tokens)
    # Token i of `tokens` is at position i + 1: a row precedes each.
    for _ in range(count):
        processed = process_logits(logits(hidden, tokens)[None], sampling)
        token = int(choose_processed(processed, sampling, [len(tokens) + 1], seed))
        chances.append(float(processed.softmax(-1).amax()))
        tokens.append(token)
    return tokens[given:], chances


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_drafts_as_restated(layout, target, tmp_path):
    folder = LAYOUTS[layout](tmp_path)
    head = load_head(folder, target, 1)
    assert (head.kind, head.hidden_layers) == ("eagle3", (1, 3, 5))
    hidden, tokens = rows(9), TOKENS[:9]
    (drafted,) = head.draft([HeadStep(0, 0, hidden, tokens, 6)])
    expected, chances = drawn(_restated(folder, target), hidden, tokens, 6)
    assert drafted.token_ids == expected
    assert drafted.confidences == pytest.approx(chances, rel=1e-6)
    assert head.held(0) == 9


def test_its_cache_may_be_filled_in_pieces_and_rolled_back(head, logits):
    hidden = rows(20)
    expected, _ = drawn(logits, hidden, TOKENS[:20], 5)
    whole = HeadStep(0, 0, hidden, TOKENS[:20], 5)
    assert head.draft([whole])[0].token_ids == expected
    # What is drafted and what is beyond the start of the next step leaves no trace.
    other = rows(20, seed=1)
    for start, end, given in ((0, 3, hidden), (3, 12, other), (3, 4, hidden), (4, 13, hidden)):
        part = tuple(each[start:end] for each in given)
        head.draft([HeadStep(1, start, part, TOKENS[start:end], 4)])
        assert head.held(1) == end
    last = HeadStep(1, 13, tuple(each[13:] for each in hidden), TOKENS[13:20], 5)
    assert head.draft([last])[0].token_ids == expected
    head.forget(1)
    assert head.held(1) == 0


def test_slots_do_not_see_each_other(head):
    alone, steps = [], []
    for slot, (count, most) in enumerate(((5, 6), (9, 0), (1, 3))):
        steps.append(HeadStep(slot, 0, rows(count, seed=slot), TOKENS[slot : slot + count], most))
        alone += head.draft(steps[-1:])
        head.forget(slot)
    together = head.draft(steps)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert [len(each.token_ids) for each in together] == [6, 0, 3]


def test_a_cached_prefix_may_be_missing(head, logits):
    hidden = rows(12)
    tail = tuple(each[8:] for each in hidden)
    (late,) = head.draft([HeadStep(0, 8, tail, TOKENS[8:12], 4)])
    # Rotary embeddings are relative: the same as if the sequence began there.
    assert late.token_ids == drawn(logits, tail, TOKENS[8:12], 4)[0]
    assert head.held(0) == 12
    # What is read again from before what it holds replaces that.
    head.draft([HeadStep(0, 5, tuple(each[5:8] for each in hidden), TOKENS[5:8])])
    assert head.held(0) == 8


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_p=0.7)]
)
def test_samples_follow_the_keyed_noise(head, logits, sampling):
    hidden = rows(7)
    for seed in range(3):
        (drafted,) = head.draft([HeadStep(0, 0, hidden, TOKENS[:7], 5, sampling, seed)])
        expected, chances = drawn(logits, hidden, TOKENS[:7], 5, sampling, seed)
        assert drafted.token_ids == expected
        assert drafted.confidences == pytest.approx(chances, rel=1e-6)


def test_penalties_and_bias_see_what_was_drafted(head):
    hidden, history = rows(7), History([*TOKENS[:8]], 4)
    penalty = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    step = HeadStep(0, 0, hidden, TOKENS[:7], 8, history=history)
    plain, penalized = (
        head.draft([step._replace(sampling=s)])[0] for s in (SamplingParams(), penalty)
    )
    assert len(set(penalized.token_ids)) > len(set(plain.token_ids))
    # No bias makes a token likely that the head does not know.
    unknown = next(i for i in range(VOCABULARY) if not math.isfinite(float(_row(head, step)[i])))
    (biased,) = head.draft([step._replace(sampling=SamplingParams(logit_bias=((unknown, 100.0),)))])
    assert biased.token_ids == plain.token_ids


def _row(head, step):
    """Return log-probabilities of the first drafted token over the vocabulary."""
    spec = DistributionSpec()
    (drafted,) = head.draft([step._replace(max_tokens=1, distribution=spec)])
    return decode(
        drafted.distributions, drafted.token_ids, VOCABULARY, renormalise=False
    ).log_probs[0]


def test_distributions_are_those_that_are_drawn_from(head, logits):
    hidden, sampling = rows(7), SamplingParams(temperature=1.0)
    spec = DistributionSpec(draw_from_it=True)
    step = HeadStep(0, 0, hidden, TOKENS[:7], 3, sampling, 5, distribution=spec)
    (drafted,) = head.draft([step])
    found = decode(drafted.distributions, drafted.token_ids, VOCABULARY, renormalise=True)
    tokens = TOKENS[:7]
    for i, token in enumerate(drafted.token_ids):
        expected = logits(hidden, tokens).softmax(-1)
        for other in range(VOCABULARY):
            log_prob = found.log_probs_of(torch.full((3,), other))[i]
            assert float(log_prob.exp()) == pytest.approx(float(expected[other]), abs=2e-3)
        tokens = [*tokens, token]


def test_it_stops_as_models_do(head, logits):
    hidden = rows(7)
    step = HeadStep(0, 0, hidden, TOKENS[:7], 6)
    tokens, chances = drawn(logits, hidden, TOKENS[:7], 6)
    stop = tokens[2]
    (stopped,) = head.draft([step._replace(stop_token_ids=[stop])])
    assert stopped.token_ids == tokens[: tokens.index(stop) + 1]
    least = math.prod(chances[:2]) * 1.001
    kept = next(i for i in range(1, 7) if math.prod(chances[:i]) < least)
    (unsure,) = head.draft([step._replace(min_confidence=least)])
    assert unsure.token_ids == tokens[:kept]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": rows(7)[:2]}, "2 layers of 7 rows; the head reads .* 3 layers"),
        ({"hidden": rows(6)}, r"hidden rows are \[6, 24\], not \[7, 24\]"),
        ({"token_ids": [VOCABULARY] * 7}, "token ids must be between 0 and 40"),
        ({"max_tokens": 99}, "99 tokens; the head drafts up to 32"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(head, change, message):
    step = HeadStep(0, 0, rows(7), TOKENS[:7], 3)
    with pytest.raises(ValueError, match=message):
        head.draft([step._replace(**change)])


def test_without_a_draft_vocabulary_the_output_layer_is_the_targets(target, tmp_path):
    tensors = eagle3_tensors()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    config = json.loads((write_specforge(tmp_path) / "config.json").read_text())
    del config["draft_vocab_size"]
    head = load_head(write(tmp_path, config, tensors), target, 1)
    tensors |= {"lm_head.weight": target.lm_head, "d2t": torch.zeros(VOCABULARY, dtype=torch.int64)}
    logits = restated.eagle3(config, tensors, target.embedding)
    hidden = rows(5)
    (drafted,) = head.draft([HeadStep(0, 0, hidden, TOKENS[:5], 4)])
    assert drafted.token_ids == drawn(logits, hidden, TOKENS[:5], 4)[0]
    assert head.num_parameters == sum(
        t.numel() for n, t in tensors.items() if n not in ("lm_head.weight", "d2t")
    )


def test_layers_have_both_conventions(target, tmp_path):
    deep = make_target(num_hidden_layers=12)

    def layers(config, of=deep):
        return load_head(write(tmp_path, config, eagle3_tensors()), of, 1).hidden_layers

    config = json.loads((write_specforge(tmp_path) / "config.json").read_text())
    assert layers(config) == (1, 3, 5)  # outputs of layers 0, 2 and 4
    assert layers({**config, "eagle_config": None}) == (2, 6, 9)
    assert layers({**SPECULATORS, "eagle_aux_hidden_state_layer_ids": [2, 5, 11]}) == (2, 5, 11)
    assert layers({**SPECULATORS, "eagle_aux_hidden_state_layer_ids": None}) == (2, 6, 9)


def test_a_head_that_is_written_is_read_again(target, tmp_path):
    folder = write_specforge(tmp_path / "first")
    head = load_head(folder, target, 1)
    network, ids = head._network, head._ids
    write_eagle3(tmp_path / "again", network, ids, VOCABULARY, {"seed": 1})
    again = load_head(tmp_path / "again", target, 1)
    assert again.hidden_layers == head.hidden_layers
    assert again.num_parameters == head.num_parameters
    assert json.loads((tmp_path / "again/config.json").read_text())["flyspec_training"]["seed"] == 1
    stored = load_file(tmp_path / "again/model.safetensors")
    before = load_file(folder / "model.safetensors")
    assert {n: list(t.shape) for n, t in stored.items()} == {
        n: list(t.shape) for n, t in before.items()
    }
    for name, tensor in before.items():
        assert torch.equal(stored[name], tensor if "2" in name else tensor.to(torch.bfloat16))


def test_the_fingerprint_is_that_of_weights_and_configuration(target, tmp_path):
    def fingerprint(**changes):
        return load_head(write_specforge(tmp_path, **changes), target, 1).fingerprint

    first = fingerprint()
    assert len(first) == 32
    assert fingerprint() == first == fingerprint(flyspec_training={"seed": 2})
    assert len({first, fingerprint(seed=1), fingerprint(norm_output=True)}) == 3


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0)])
def test_each_head_guesses_one_token(target, tmp_path, blocks, sampling):
    head = load_head(write_medusa(tmp_path, blocks), target, 2)
    assert (head.kind, head.max_tokens, head.hidden_layers) == ("medusa", 3, (LAYERS,))
    logits = restated.medusa(medusa_tensors(3, blocks), blocks)
    steps, expected = [], []
    for slot, (count, most) in enumerate(((4, 3), (1, 2))):
        hidden = rows(count, slot, layers=1)
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
    hidden = rows(2, layers=1)
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
    hidden = rows(2, layers=1)
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
    first, second = rows(9, layers=1), rows(4, seed=1, layers=1)
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

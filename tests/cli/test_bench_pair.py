"""`flyspec bench` of pairs made for it: their checkpoints and the report; nothing about times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from flyspec.cli.main import app
from flyspec.engine.loading import load_model
from flyspec.errors import ConfigError
from flyspec_lab.bench.shapes import config_of, pad_layers, random_model, write_pair
from tests.tiny import VOCAB_SIZE, make_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("target"), seed=3)


# --- checkpoints ----------------------------------------------------------------------------------


def logits_of(model: Path, dtype: str) -> torch.Tensor:
    loaded = load_model(str(model), "cpu", dtype)
    token_ids = (torch.arange(90) * 7 % loaded.info.vocab_size)[None]
    with torch.inference_mode():
        return loaded.model(token_ids).logits


def test_padding_layers_change_nothing(target: Path, tmp_path: Path) -> None:
    padded = pad_layers(target, tmp_path / "padded", 3)
    assert load_model(str(padded), "cpu", "auto").model.config.num_hidden_layers == 5
    twice = pad_layers(padded, tmp_path / "twice", 1)  # of a checkpoint in pieces
    for dtype in ("float32", "bfloat16"):
        assert torch.equal(logits_of(target, dtype), logits_of(padded, dtype))
        assert torch.equal(logits_of(target, dtype), logits_of(twice, dtype))


def test_what_is_no_directory_of_a_model_cannot_be_padded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a directory with a model, not to a name"):
        pad_layers(Path("org/model"), tmp_path / "padded", 1)


def test_a_draft_model_is_the_first_layers_of_a_random_target(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = config_of("tiny")
    pairs = []
    for noise in (0.0, 0.05):
        monkeypatch.setattr("flyspec_lab.bench.shapes._DRAFT_NOISE", noise)
        pairs.append(write_pair("tiny", tmp_path / str(noise), target))
    loaded = load_model(str(pairs[0][0]), "cpu", "auto")
    assert loaded.info.vocab_size == shape.vocab_size > VOCAB_SIZE
    assert loaded.model.config.num_hidden_layers == shape.num_hidden_layers
    assert (
        loaded.tokenizer.fingerprint == load_model(str(target), "cpu", "auto").tokenizer.fingerprint
    )
    assert loaded.tokenizer.eos_token_ids == (1,)
    logits, same, noisy = (logits_of(model, "float32") for model in (*pairs[0], pairs[1][1]))
    assert torch.equal(logits, same)
    assert torch.equal(logits, logits_of(pairs[1][0], "float32"))
    agreement = (logits.argmax(-1) == noisy.argmax(-1)).float().mean()
    assert 0.5 < agreement < 1
    # As unsure as a language model is: some positions are below fly's threshold, some above.
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) / math.log(shape.vocab_size)
    assert entropy.min() < 0.3 < entropy.max()


def test_shapes_have_the_parameters_that_their_models_tell() -> None:
    """https://huggingface.co/meta-llama: Llama-3.2-1B 1.24 billion, Llama-3.1-8B 8.03 billion."""
    for shape, parameters in (("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(shape))
        assert model.num_parameters() == parameters


def test_random_models_have_sane_logits() -> None:
    model = random_model(config_of("tiny"))
    assert (model.dtype, model.config.max_position_embeddings) == (torch.bfloat16, 512)
    with torch.inference_mode():
        assert 2 < model(torch.arange(30)[None]).logits.float().std() < 8


# --- the command ----------------------------------------------------------------------------------


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


SMALL = ("--problems", "2", "--repeats", "1", "--max-tokens", "20", "--json",
         "--num-speculative-tokens", "7", "--threads", "1", "--ignore-eos")  # fmt: skip


def test_a_random_target_with_more_layers(target: Path, tmp_path: Path) -> None:
    output = tmp_path / "pair.json"
    document = run(*SMALL, "--model", str(target), "--shape", "tiny", "--rules", "exact,fly",
                   "--pad-target-layers", "2", "--output", str(output))  # fmt: skip
    assert len(json.loads(output.read_text())["samples"]) == 6
    modes = {mode["mode"]: mode for mode in document["groups"]["word problems"]}
    assert list(modes) == ["plain", "exact", "fly"]
    assert modes["exact"]["same_as_plain"] == 2
    assert 1 < modes["exact"]["mean_accepted_tokens"] < 8
    assert modes["exact"]["loose_share"] == 0
    assert modes["fly"]["judge_ms"] > 0
    for mode in modes.values():
        ratio = mode["ratios"]["plain"]
        assert ratio["worst"] <= ratio["median"] * (1 + 1e-9)
        assert ratio["worst_prompt"] in (0, 1)
    assert document["shape"]["vocab_size"] == 6000
    assert document["pair"] == (
        "random tiny, 1 of its layers as the draft model, 2 extra layers in the target"
    )
    assert document["num_speculative_tokens"] == [7]
    assert document["prompts_cached"]


def test_sampled_texts_are_those_of_plain_decoding() -> None:
    document = run(*SMALL, "--problems", "1", "--temperature", "1", "--rules", "exact")
    modes = {mode["mode"]: mode for mode in document["groups"]["word problems"]}
    assert {mode["same_as_plain"] for mode in modes.values()} == {1}


def test_others_are_timed_greedily() -> None:
    with pytest.raises(ConfigError, match="timed greedily; remove --temperature"):
        CliRunner().invoke(
            app, ["bench", "--peers", "greedy", "--temperature", "1"], catch_exceptions=False
        )


def test_an_unknown_shape_is_refused_before_anything_starts(target: Path) -> None:
    with pytest.raises(ConfigError, match=r"--shape huge: must be one of llama-1b, .*tiny"):
        run("--model", str(target), "--shape", "huge")

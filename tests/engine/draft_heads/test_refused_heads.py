"""A directory that is no head for the target is refused with what is missing and what to change."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from flyspec.engine.draft_heads.loading import load_head
from flyspec.errors import ConfigError
from tests.engine.draft_heads.layouts import (
    eagle3_tensors,
    make_target,
    medusa_tensors,
    write_medusa,
    write_mtp,
    write_specforge,
    write_speculators,
    write_vllm_medusa,
)

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def target():
    return make_target()


def refused(folder, target, message):
    with pytest.raises(ConfigError, match=rf"head {re.escape(str(folder))}: .*{message}"):
        load_head(folder, target, 1)


def change(folder, name=WEIGHTS, drop=(), **tensors):
    stored = load_file(folder / name)
    stored.update(tensors)
    save_file({n: t for n, t in stored.items() if n not in drop}, folder / name)


def reconfigure(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_missing_tensors_are_named(target, tmp_path):
    folder = write_specforge(tmp_path / "a")
    change(folder, drop=("fc.weight", "midlayer.hidden_norm.weight", "d2t"))
    refused(folder, target, r"3 of 14 tensors are missing: fc.weight \[24, 72\]; "
            r"midlayer.hidden_norm.weight \[24\]; d2t \[17\]")  # fmt: skip
    change(folder, drop=[n for n in eagle3_tensors() if "mlp" in n or "self_attn" in n])
    refused(folder, target, "10 of 14 tensors .* and 6 more")
    folder = write_medusa(tmp_path / "b")
    change(folder, "medusa_lm_head.safetensors", drop=("2.0.linear.bias", "1.1.weight"))
    refused(folder, target, r"2 of 9 .*: 1.1.weight \[41, 24\]; 2.0.linear.bias \[24\]")
    folder = write_vllm_medusa(tmp_path / "c")
    change(folder, drop=("lm_heads.1.weight", "token_map"))
    refused(folder, target, r"token_map \[17\]")
    folder, own, _ = write_mtp(tmp_path / "d", "glm4_moe")
    change(
        folder,
        drop=("model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight"),
    )
    refused(folder, own, r"2 of \d+ tensors are missing: "
            r"model.layers.2.mlp.experts.3.up_proj.weight \[16, 24\]; "
            r"model.layers.2.eh_proj.weight \[24, 48\]")  # fmt: skip


def test_misshapen_tensors_are_named_with_what_they_should_be(target, tmp_path):
    folder = write_specforge(tmp_path / "a")
    change(folder, **{"fc.weight": torch.zeros(24, 48)})
    refused(folder, target, r"wrong tensors: fc.weight is \[24, 48\], not \[24, 72\]")
    change(folder, **{"fc.weight": torch.full((24, 72), torch.nan)})
    refused(folder, target, "fc.weight is not finite")
    folder = write_medusa(tmp_path / "b")
    other = medusa_tensors()["0.0.linear.weight"][:, :12].contiguous()
    change(folder, "medusa_lm_head.safetensors", **{"0.0.linear.weight": other})
    refused(folder, target, r"0.0.linear.weight is \[24, 12\], not \[24, 24\]")
    folder, own, _ = write_mtp(tmp_path / "c", "qwen3")
    change(folder, **{"mtp.fc.weight": torch.zeros(24, 24)})
    refused(folder, own, r"mtp.fc.weight is \[24, 24\], not \[24, 48\]")


def test_a_head_of_another_target_is_refused(target, tmp_path):
    folder = write_specforge(tmp_path / "a")
    refused(folder, make_target(vocab_size=43),
            "for a target with vocabulary 41; llama has vocabulary 43")  # fmt: skip
    refused(folder, make_target(hidden_size=32),
            "for a target with hidden size 24; llama has hidden size 32")  # fmt: skip
    refused(folder, make_target(num_hidden_layers=4),
            "layers 1, 3, 5, counted from 1; llama has 4 layers, so 0 to 3")  # fmt: skip
    reconfigure(folder, target_hidden_size=32)
    change(folder, **{"fc.weight": torch.zeros(24, 96)})
    refused(folder, make_target(hidden_size=32),
            r"an embedding of its own: embed_tokens.weight \[41, 24\] is missing")  # fmt: skip
    folder = write_vllm_medusa(tmp_path / "b")
    refused(folder, make_target(hidden_size=32), "hidden_size 24; llama has 32")
    folder, _, _ = write_mtp(tmp_path / "c", "qwen3")
    refused(folder, make_target(vocab_size=43), "vocab_size 41; llama has 43")


def test_an_embedding_of_its_own_makes_a_narrower_head_possible(tmp_path):
    folder = write_specforge(tmp_path)
    reconfigure(folder, target_hidden_size=32)
    change(folder, **{"fc.weight": torch.ones(24, 96), "embed_tokens.weight": torch.ones(41, 24)})
    head = load_head(folder, make_target(hidden_size=32), 1)
    assert head.hidden_size == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "24"}, "config.json has hidden_size '24'; it must be an integer"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"hidden_act": "gelu"}, "its activation is gelu; only silu is known"),
        ({"model_type": "gpt2"}, "its layer is of type gpt2; known are llama, qwen3"),
        ({"draft_vocab_size": 99}, "draft_vocab_size is 99; the target has 41 tokens"),
        ({"quantization_config": {"bits": 4}}, "its weights are quantized"),
        ({"architectures": ["LlamaForCausalLM"]}, "config.json declares no head"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(target, tmp_path, changes, message):
    folder = write_specforge(tmp_path)
    reconfigure(folder, **changes)
    refused(folder, target, message)


def test_a_map_of_tokens_must_be_one_to_one(target, tmp_path):
    folder = write_specforge(tmp_path)
    for wrong in (torch.full((17,), 40), -torch.arange(17), torch.arange(17) - 1):
        change(folder, d2t=wrong)
        refused(folder, target, "d2t does not map its tokens to different ones of the target's 41")


def test_only_safetensors_are_read(target, tmp_path):
    refused(tmp_path / "none", target, "config.json cannot be read: No such file")
    folder = write_specforge(tmp_path / "a")
    (folder / WEIGHTS).write_bytes(b"\x80\x02pickled")
    refused(folder, target, "model.safetensors is not a safetensors file")
    (folder / WEIGHTS).rename(folder / "medusa_lm_head.pt")
    refused(folder, target, "only medusa_lm_head.pt, which could run code; save its tensors as")
    (folder / "config.json").write_text("{")
    refused(folder, target, "config.json is not JSON")
    folder = write_speculators(tmp_path / "b", transformer_layer_config={"model_type": "llama"})
    refused(folder, target, "config.json has hidden_size None")

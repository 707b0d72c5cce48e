"""Writes an EAGLE-3 head as SpecForge and SGLang have it, for flyspec to read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from flyspec.engine.draft_heads.eagle3_layouts import ARCHITECTURE
from flyspec.engine.draft_heads.eagle3_network import Eagle3Network
from flyspec.model_files import CONFIG, WEIGHTS


def write_eagle3(
    folder: Path,
    network: Eagle3Network,
    draft_token_ids: Tensor,
    vocab_size: int,
    training: Mapping[str, Any],
) -> None:
    """Write config.json and bf16 weights; an older file is replaced by a whole one only.

    `draft_token_ids` are the target's ids of the tokens that can be drafted, in order. `training`
    says, under `flyspec_training`, what the head was trained on.
    """
    shape = network.shape
    layer = shape.config.to_dict()
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
        "attention_bias", "mlp_bias",
    )  # fmt: skip
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{name: layer[name] for name in names},
        "rope_theta": layer["rope_parameters"]["rope_theta"],
        "vocab_size": vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        # Published ids count from the first layer's output (`eagle3_layouts`).
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in shape.aux_layers],
            "use_aux_hidden_state": True,
        },
        "flyspec_training": dict(training),
    }
    tensors = {
        name.replace("layers.0.", "midlayer.", 1): tensor.to(torch.bfloat16).contiguous()
        for name, tensor in network.published().items()
    }
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    drafted[draft_token_ids] = True
    tensors["t2d"] = drafted
    tensors["d2t"] = draft_token_ids - torch.arange(len(draft_token_ids))
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    for name, data in ((WEIGHTS, save(tensors)), (CONFIG, text.encode())):
        part = folder / f".{name}.part"
        part.write_bytes(data)
        part.replace(folder / name)

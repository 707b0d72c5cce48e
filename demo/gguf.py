"""`python -m demo.gguf`: writes the bundled pair as GGUF files, the format of llama.cpp.

Follows llama.cpp's `convert_hf_to_gguf.py` (class `LlamaModel`): names of tensors and keys are
those of the package gguf; rows of the query and key projections are reordered, because llama.cpp
rotates neighbouring elements where transformers rotates halves; vectors stay in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType, LlamaFileType, TokenType
from safetensors.torch import load_file
from torch import Tensor

from flyspec import bundled
from flyspec.cli.program import run, single

ARCHITECTURE = gguf.MODEL_ARCH.LLAMA
PRE_TOKENIZER = "smollm"
"""llama.cpp's name for single digits followed by GPT-2's pattern (`demo.tokenizer`)."""
TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
"""Types of matrices, by name: that of their elements, and of the file."""
FOLDER = Path("build/gguf")


def file_name(model: Path, kind: str) -> str:
    """Return the name of a model's file, such as target-q8_0.gguf."""
    return f"{model.name}-{kind}.gguf"


def convert(model: Path, kind: str, path: Path) -> None:
    """Write the Llama in a directory as one GGUF file, with matrices of a type in `TYPES`."""
    config = json.loads((model / "config.json").read_text())
    element, file_type = TYPES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURE])
    writer.add_name(model.name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    _add_tokenizer(writer, model)
    names = gguf.get_tensor_name_map(ARCHITECTURE, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        matrix = tensor.dim() > 1
        values = _reordered(name, tensor, config).float().numpy()
        stored = element if matrix else GGMLQuantizationType.F32
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise ValueError(f"{model}: llama.cpp has no tensor for {name}")
        writer.add_tensor(own, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    """Write vocabulary, merges, special tokens and chat template of a byte-level BPE."""
    saved = json.loads((model / "tokenizer.json").read_text())
    generation = json.loads((model / "generation_config.json").read_text())
    vocabulary = saved["model"]["vocab"]
    added = {token["content"]: token["id"] for token in saved["added_tokens"]}
    by_id = {token_id: token for token, token_id in {**vocabulary, **added}.items()}
    tokens = [by_id[token_id] for token_id in range(len(by_id))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if t in added else TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
    end_of_text, end_of_turn = generation["eos_token_id"]
    writer.add_bos_token_id(generation["bos_token_id"])
    writer.add_eos_token_id(end_of_text)
    writer.add_eot_token_id(end_of_turn)
    writer.add_pad_token_id(generation["pad_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template((model / "chat_template.jinja").read_text())


def _reordered(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Put the halves of each head's rows side by side, pair by pair, in what is rotated."""
    if name.endswith("q_proj.weight"):
        heads = config["num_attention_heads"]
    elif name.endswith("k_proj.weight"):
        heads = config["num_key_value_heads"]
    else:
        return tensor
    rows, columns = tensor.shape
    halves = tensor.view(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write() -> None:
    """Write the bundled target and draft model as GGUF files, one of each type, to build/gguf."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model in (bundled.TARGET, bundled.DRAFT):
        for kind in TYPES:
            path = FOLDER / file_name(model, kind)
            convert(model, kind, path)
            print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    run(single(write))

"""Heads in the published layouts, made small with random weights: configurations and names."""

import copy
import json

import torch
from safetensors.torch import load_file, save_file

from flyspec.engine.draft_heads.target import HeadTarget
from tests.engine.random_models import VOCABULARY, loaded_model, make_model

HIDDEN, DRAFTED = 24, 17
LAYERS = 6
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 160,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}


def make_target(kind="llama", **changes):
    """A float64 target of six layers, as its heads see it."""
    return HeadTarget.of(loaded_model(make_model(kind, **{"num_hidden_layers": LAYERS, **changes})))


def random_tensors(shapes, seed=0):
    """Weights that make logits of order 1 and more, and norms around 1."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return 1 + 0.2 * drawn if len(shape) == 1 else 2 * drawn * shape[-1] ** -0.5

    return {name: one(shape) for name, shape in shapes.items()}


def write(folder, config, tensors, name=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, folder / (name or "model.safetensors")
    )
    return folder


def eagle3_tensors(layer="midlayer", seed=0, **extra):
    """An EAGLE-3 head's tensors; `extra` are the shapes of more."""
    shapes = {
        "fc.weight": [HIDDEN, 3 * HIDDEN],
        f"{layer}.self_attn.q_proj.weight": [32, 2 * HIDDEN],
        f"{layer}.self_attn.k_proj.weight": [16, 2 * HIDDEN],
        f"{layer}.self_attn.v_proj.weight": [16, 2 * HIDDEN],
        f"{layer}.self_attn.o_proj.weight": [HIDDEN, 32],
        f"{layer}.mlp.gate_proj.weight": [40, HIDDEN],
        f"{layer}.mlp.up_proj.weight": [40, HIDDEN],
        f"{layer}.mlp.down_proj.weight": [HIDDEN, 40],
        f"{layer}.hidden_norm.weight": [HIDDEN],
        f"{layer}.input_layernorm.weight": [HIDDEN],
        f"{layer}.post_attention_layernorm.weight": [HIDDEN],
        "norm.weight": [HIDDEN],
        "lm_head.weight": [DRAFTED, HIDDEN],
        **extra,
    }
    tensors = random_tensors(shapes, seed)
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:DRAFTED].sort()
    tensors["d2t"] = ids.values - torch.arange(DRAFTED)
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[ids.values] = True
    tensors["t2d"] = known
    return tensors


SPECFORGE = {
    **CONFIG,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFTED,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "speculators_config": {"algorithm": "eagle3"},
    "draft_vocab_size": DRAFTED,
    "transformer_layer_config": CONFIG,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    "norm_before_residual": True,
}


def write_specforge(folder, seed=0, **changes):
    return write(folder, {**SPECFORGE, **changes}, eagle3_tensors(seed=seed))


def write_speculators(folder, **changes):
    """Its variants: `norm_before_fc`, `fc_norm`, `norm_output`, a layer like Qwen3's."""
    config = {**SPECULATORS, **changes}
    extra = {"embed_tokens.weight": [VOCABULARY, HIDDEN]}
    if config.get("norm_before_fc"):
        extra["input_norm.weight"] = [3 * HIDDEN]
    if config.get("fc_norm"):
        extra |= {f"fc_norm.{i}.weight": [HIDDEN] for i in range(3)}
    if config["transformer_layer_config"]["model_type"] == "qwen3":
        extra |= {f"layers.0.self_attn.{n}_norm.weight": [8] for n in "qk"}
    return write(folder, config, eagle3_tensors("layers.0", **extra))


def medusa_tensors(heads=3, blocks=1):
    shapes = {}
    for k in range(heads):
        for i in range(blocks):
            shapes |= {f"{k}.{i}.linear.weight": [HIDDEN, HIDDEN], f"{k}.{i}.linear.bias": [HIDDEN]}
        shapes[f"{k}.{blocks}.weight"] = [VOCABULARY, HIDDEN]
    return random_tensors(shapes)


def write_medusa(folder, blocks=1):
    config = {
        "medusa_num_heads": 3,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    return write(folder, config, medusa_tensors(3, blocks), "medusa_lm_head.safetensors")


def write_vllm_medusa(folder, **changes):
    """With a reduced vocabulary unless `changes` say otherwise."""
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 3,
        "num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
        "truncated_vocab_size": DRAFTED, **changes,
    }  # fmt: skip
    shapes = {f"blocks.{k}.layers.0.weight": [HIDDEN, HIDDEN] for k in range(3)}
    outputs = [] if config.get("original_lm_head") else range(3)
    shapes |= {f"lm_heads.{k}.weight": [DRAFTED, HIDDEN] for k in outputs}
    tensors = random_tensors(shapes)
    if config["truncated_vocab_size"] < VOCABULARY:
        tensors["token_map"] = torch.arange(DRAFTED) * 2
    return write(folder, config, tensors)


MTP_KINDS = {
    "glm4_moe": {
        "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "moe_intermediate_size": 16, "topk_group": 1, "num_nextn_predict_layers": 1,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "moe_intermediate_size": 16, "topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
    },
    "qwen3_next": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "qwen3_5_text": {"head_dim": 8, "mtp_num_hidden_layers": 1},
    "qwen3": {"head_dim": 8},
}  # fmt: skip
"""Small configurations of families with MTP layers, and Qwen3 with one in Qwen's layout."""


def write_mtp(folder, kind):
    """Write a random target's checkpoint with an MTP layer, as its family is published.

    Returns its directory, the target, and a transformers model whose only layer is the MTP layer
    and whose `norm`, `enorm`, `hnorm` and `eh_proj` are its others.
    """
    extra = MTP_KINDS[kind]
    full = {"layer_types": ["full_attention"] * 2} if kind.startswith("qwen3") else {}
    model = make_model(kind, **extra, **full)
    target = HeadTarget.of(loaded_model(model))
    one = {"layer_types": ["full_attention"]} if full else {}
    dense = {} if full else {"first_k_dense_replace": 0}
    alone = make_model(kind, seed=1, num_hidden_layers=1, **extra, **one, **dense).model
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    alone.enorm, alone.hnorm = (_copied_norm(alone.norm, seed) for seed in (1, 2))
    alone.eh_proj = torch.nn.Linear(HIDDEN, 2 * HIDDEN, False).to(torch.float64)
    alone.eh_proj.weight = torch.nn.Parameter(torch.randn(HIDDEN, 2 * HIDDEN).double() * 0.2)
    alone.save_pretrained(folder / "alone")
    own = load_file(folder / "alone/model.safetensors")
    layer = {n.removeprefix("layers.0."): t for n, t in own.items() if n.startswith("layers.0.")}
    norms = {n: getattr(alone, n).weight.detach() for n in ("enorm", "hnorm", "eh_proj", "norm")}
    if full:
        names = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
                 "eh_proj": "mtp.fc", "norm": "mtp.norm"}  # fmt: skip
        prefix = "mtp.layers.0."
    else:
        prefix = "model.layers.2."
        names = {n: f"{prefix}{n}" for n in ("enorm", "hnorm", "eh_proj")}
        names["norm"] = f"{prefix}shared_head.norm"
    tensors |= {f"{prefix}{name}": tensor for name, tensor in layer.items()}
    tensors |= {f"{names[n]}.weight": tensor for n, tensor in norms.items()}
    save_file({n: t.contiguous() for n, t in tensors.items()}, path)
    return folder, target, alone


def _copied_norm(norm, seed):
    found = copy.deepcopy(norm)
    generator = torch.Generator().manual_seed(seed)
    found.weight.data += 0.3 * torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
    return found

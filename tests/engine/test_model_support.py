"""Models that are served and models that are refused: small random models of many architectures."""

import copy
import random

import pytest
import torch

from flyspec.engine.cache_size import slot_bytes
from flyspec.engine.model import Step
from flyspec.errors import ConfigError
from tests.engine.random_models import (
    VOCABULARY,
    float64_throughout,
    make_model,
    make_runner,
    reference_logits,
)

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = {"sliding_window": 7}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
# Without grouped-query attention.
ALL_HEADS = {"num_key_value_heads": None}

SERVED = {
    "cohere": {},
    "cohere2": WINDOW,
    "exaone4": {**WINDOW, "num_hidden_layers": 4},
    "gemma": {"head_dim": 6},
    "gemma4_text": {
        **WINDOW,
        "head_dim": 8,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "glm4": {"head_dim": 8},
    "gpt2": ALL_HEADS,
    "gpt_neox": ALL_HEADS,
    "granite": {},
    "mixtral": {**MOE, **WINDOW},
    "olmo2": {},
    "olmo3": {**WINDOW, "num_hidden_layers": 4},
    "opt": {**ALL_HEADS, "ffn_dim": 32, "word_embed_proj_dim": 24},
    "phi": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "phi3": WINDOW,
    "qwen2": {},
    "qwen2_moe": MOE,
    "qwen3_moe": MOE,
    "smollm3": {},
    "starcoder2": WINDOW,
}

REFUSED = {
    "linear attention": ("qwen3_next", MOE, "layers of kind linear_attention"),
    "recurrent": ("recurrent_gemma", {}, "layers of kind linear_attention"),
    "state space": ("mamba", {}, "layers of kind linear_attention"),
    "chunked": ("llama4_text", MOE, "layers of kind chunked_attention"),
    "sinks": ("gpt_oss", {**MOE, "head_dim": 8}, "sinks"),
    "latent": ("deepseek_v3", MLA | MOE | {"n_group": 1, "topk_group": 1}, "multi-head latent"),
    "shared": (
        "gemma3n_text",
        {
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "num_hidden_layers": 10,
            "num_kv_shared_layers": 5,
            "activation_sparsity_pattern": [0.0] * 10,
            "intermediate_size": 32,
            "head_dim": 8,
        },
        "share their keys and values",
    ),
    "masks of its own": ("doge", {}, "builds its own attention masks"),
    "alibi": ("bloom", {}, "does not use transformers' attention interface"),
    "old style": ("gptj", {**ALL_HEADS, "rotary_dim": 4}, ""),
    "differential": ("diffllama", {}, "logits would differ"),
    "no arguments": ("nemotron", {}, "does not pass arguments on"),
    "encoder": ("bert", {"is_decoder": False}, "bidirectional"),
    "bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
}


@pytest.mark.parametrize("kind", SERVED)
def test_other_decoders_are_served_as_well(kind):
    model = make_model(kind, **SERVED[kind])
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default has no float64
    reference = copy.deepcopy(model)
    runner = make_runner(model, num_slots=3)
    choose, held, difference = random.Random(0), [[], [], []], 0.0
    with float64_throughout():
        runner.warm_up()
        for count in (1, 17, 70, 5):
            steps = []
            for slot in range(3):
                start = choose.randint(len(held[slot]) // 2, len(held[slot]))
                tokens = [choose.randrange(VOCABULARY) for _ in range(count + slot)]
                held[slot] = [*held[slot][:start], *tokens]
                steps.append(Step(slot, start, tokens, len(tokens)))
            for step, rows in zip(steps, runner.forward(steps), strict=True):
                expected = reference_logits(reference, held[step.slot])[step.start :]
                difference = max(difference, float((expected - rows.logits).abs().max()))
    assert difference < 1e-9
    assert slot_bytes(model.config, 1, torch.float64) == runner.bytes_per_token


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_give_wrong_text_is_refused(case):
    kind, changes, reason = REFUSED[case]
    model = make_model(kind, dtype=torch.float32, **changes)
    with pytest.raises(ConfigError) as caught:
        make_runner(model).warm_up()
    message = str(caught.value)
    assert reason in message
    assert message.startswith("--model ")
    assert "use a decoder with plain, grouped or sliding-window attention" in message
    assert "\n" not in message


def test_a_window_that_the_model_does_not_know_is_no_reason_to_refuse_it():
    make_runner(make_model("llama", sliding_window=7)).warm_up()


def test_a_model_that_does_not_run_in_its_type_says_so():
    runner = make_runner(make_model("mixtral", **MOE))
    with pytest.raises(ConfigError, match=r"does not run in torch.float64 .* --dtype"):
        runner.warm_up()


def test_rotary_embeddings_that_change_with_the_length_limit_the_context():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 3,
        "long_factor": [4.0] * 3,
    }
    model = make_model("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    with pytest.raises(ConfigError, match="use --max-model-len 32 or less"):
        make_runner(model, context_length=33)
    make_runner(model, context_length=32).warm_up()

"""Small random models of many architectures, and their own logits as the reference."""

from contextlib import contextmanager
from unittest import mock

import torch
import torch._inductor.codegen.common  # its tables of types, before `float64_throughout`
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from flyspec.engine.loading import LoadedModel
from flyspec.engine.runner import ModelRunner
from flyspec.values.admin import ModelInfo, TokenizerBundle

VOCABULARY = 41
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    # Logits of order 1, and attention far from uniform: a wrong key or value shows.
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(kind, seed=0, dtype=torch.float64, **changes):
    """A model of transformers' `model_type` `kind` with random weights, norms and biases too."""
    config = CONFIG_MAPPING[kind](**{**SHAPE, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def loaded_model(model, context_length=160):
    """Return the model as the services load it, without a tokenizer."""
    config = model.config.get_text_config()
    dtype = str(model.dtype).removeprefix("torch.")
    info = ModelInfo(config.model_type, "", config.vocab_size, context_length, dtype, "cpu", 1)
    return LoadedModel(model, info, TokenizerBundle(b"", "", (), (), None, "", "{}"))


def make_runner(model, num_slots=4, context_length=160):
    """Return a runner over slots, with our attention instead of the model's."""
    return ModelRunner(loaded_model(model, context_length), num_slots)


def eagerly(run):
    """Capture nothing: the same work as a graph's, where there are none."""
    return run


def reference_logits(model, token_ids):
    """[tokens, vocab] of transformers' own attention over the whole sequence, without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


@contextmanager
def float64_throughout():
    """Norms and softmaxes that transformers takes in float32 whatever the model's type in float64.

    Rounding them to float32 would turn differences of 1e-16 into some of 1e-8 now and then.
    """
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield

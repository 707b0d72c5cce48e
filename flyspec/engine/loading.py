"""Loads a Hugging Face causal LM and its tokenizer from a directory or hub id.

Reads only safetensors, since unpickling can run code (transformers prefers them, but follows an
index to whatever it names), and never runs code that comes with a model. Models that cannot be
served correctly are rejected with a message.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.hub import cached_file

from flyspec import process
from flyspec.chat_template import DEFAULT
from flyspec.engine.checkpoint import Checkpoint, fingerprint_beside
from flyspec.engine.devices import choose_dtype, no_cuda, read_device
from flyspec.engine.kv_heads import replicate
from flyspec.engine.native.eligible import serves_natively
from flyspec.engine.out_of_memory import is_out_of_memory
from flyspec.engine.supported import check_config, check_kind, check_length, check_tensor_parallel
from flyspec.errors import ConfigError
from flyspec.model_files import find_weights, model_source, served_name
from flyspec.tokenizer import fingerprint
from flyspec.values.admin import ModelInfo, TokenizerBundle

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its description and its tokenizer."""

    model: Any
    info: ModelInfo
    tokenizer: TokenizerBundle


def resolve_device(device: str) -> torch.device:
    """Return the torch device for `--device`; `auto` is CUDA if available, else the CPU."""
    named = read_device(device)
    if named is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if named.type == "cuda":
        if not torch.cuda.is_available():
            raise no_cuda(device, "torch found no CUDA device")
        if (named.index or 0) >= torch.cuda.device_count():
            raise no_cuda(device, f"torch found {torch.cuda.device_count()} CUDA devices")
    return torch.device(device)


def resolve_dtype(
    dtype: str, device: torch.device, config: Any, native: bool = False
) -> torch.dtype:
    """Return the torch dtype for `--dtype` (`choose_dtype`)."""
    resolved: torch.dtype = getattr(torch, choose_dtype(dtype, device.type, config, native))
    return resolved


def read_config(name: str) -> tuple[str, Any]:
    """Return where a model is loaded from, and its configuration. Raises `ConfigError`."""
    source = model_source(name)
    try:
        return source, AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # safetensors, huggingface_hub and tokenizers have their own bases
        raise _unloadable(name, error) from error


def own_context_length(config: Any) -> int:
    """Return the longest sequence, in tokens, that a model's configuration allows."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 2048)


def load_model(
    name: str,
    device: str,
    dtype: str,
    max_model_len: int = 0,
    tensor_parallel_size: int = 1,
    check: Callable[[Checkpoint], None] = lambda _: None,
    identify: bool = True,
    served_model_name: str = "",
) -> LoadedModel:
    """Load model and tokenizer. Raises `ConfigError` with what to change.

    With `tensor_parallel_size` above 1, every rank of the group, already joined, calls this at
    once; each reads only its own share of the checkpoint. `check` may raise `ConfigError` before
    any weights are read. Clients see `served_model_name`, by default the directory's name or the
    hub id. Without `identify` the model has no `weights_fingerprint`.
    """
    where = resolve_device(device)
    source, config = read_config(name)
    limit = own_context_length(config)
    check_length(max_model_len, limit)
    check_kind(name, config)
    check_config(name, config.get_text_config(), max_model_len or limit)
    sharded = {}
    if tensor_parallel_size > 1:
        check_tensor_parallel(name, config, tensor_parallel_size)
        config = replicate(config, tensor_parallel_size)
        plan = DistributedConfig(tp_plan="auto", tp_size=tensor_parallel_size)
        sharded = {"distributed_config": plan}
    try:
        find = partial(cached_file, source, _raise_exceptions_for_missing_entries=False)
        weights = find_weights(
            name,
            lambda file: Path(found) if (found := find(file)) else None,
            getattr(config, "transformers_weights", None),
        )
        run_in = resolve_dtype(dtype, where, config, not sharded and serves_natively(config))
        length = max_model_len or limit
        checkpoint = Checkpoint(name, config, run_in, where, length, tensor_parallel_size, weights)
        check(checkpoint)
        with fingerprint_beside(checkpoint, identify) as weights_fingerprint:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=run_in,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **sharded,
            )
        model, report = loaded
        model = model.eval() if sharded else model.to(where).eval()
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        fingerprint_of_weights = weights_fingerprint()
    except ConfigError:
        raise
    except Exception as error:
        raise _unloadable(name, error) from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"--model {name}: the checkpoint lacks {len(missing)} of the model's tensors, "
            f"including {missing[0]}; use a complete checkpoint of a causal language model"
        )
    process.count_model_load()
    bundle = tokenizer_bundle(tokenizer, model.generation_config)
    info = ModelInfo(
        name=served_model_name or served_name(name),
        tokenizer_fingerprint=bundle.fingerprint,
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        context_length=length,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(where),
        num_parameters=model.num_parameters(),
        weights_fingerprint=fingerprint_of_weights,
    )
    log.info("loaded %s: %.1f M parameters, %s on %s",
             name, info.num_parameters / 1e6, info.dtype, info.device)  # fmt: skip
    return LoadedModel(model, info, bundle)


def _unloadable(name: str, error: Exception) -> ConfigError:
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"--model {name}: requires custom code (auto_map), which is never run; use a model "
            "whose architecture is built into transformers"
        )
    reason = " ".join(str(error).split()) or repr(error)
    if is_out_of_memory(error):
        return ConfigError(
            f"--model {name}: out of memory while loading weights: {reason:.300}; use a device "
            "with more memory, more devices (--tensor-parallel-size) or a smaller --dtype"
        )
    return ConfigError(f"--model {name}: cannot be loaded: {reason:.300}")


def tokenizer_bundle(tokenizer: Any, generation_config: GenerationConfig) -> TokenizerBundle:
    """Collect what encodes, decodes and ends a sequence from transformers' objects."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError("the model has no fast tokenizer (tokenizer.json); convert it first")
    eos = generation_config.eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    control = {*eos_ids, *tokenizer.all_special_ids}
    control |= {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    pad = tokenizer.pad_token_id
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {DEFAULT: templates}
    return TokenizerBundle(
        tokenizer_json=backend.to_str().encode(),
        fingerprint=fingerprint(backend, None if pad in eos_ids else pad),
        eos_token_ids=tuple(sorted(eos_ids)),
        control_token_ids=tuple(sorted(control)),
        bos_token_id=tokenizer.bos_token_id,
        chat_template=templates.get(DEFAULT, ""),
        generation_config_json=json.dumps(generation_config.to_diff_dict()),
        named_chat_templates=tuple(sorted((n, t) for n, t in templates.items() if n != DEFAULT)),
        special_tokens=tuple(sorted(tokenizer.special_tokens_map.items())),
    )

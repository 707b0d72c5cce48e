"""Loads a Hugging Face causal LM and its tokenizer from a directory or hub id.

Reads only safetensors, since unpickling can run code (transformers prefers them, but follows an
index to whatever it names), and never runs code that comes with a model. Models that cannot be
served correctly are rejected with a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.hub import cached_file

from flyspec import process
from flyspec.engine.bundle import tokenizer_bundle
from flyspec.engine.checkpoint import Checkpoint, fingerprint_beside
from flyspec.engine.configuration import plan_checkpoint, read_config, unreadable
from flyspec.engine.devices import no_cuda, read_device
from flyspec.engine.kv_heads import replicate
from flyspec.engine.out_of_memory import is_out_of_memory
from flyspec.errors import ConfigError
from flyspec.model_files import served_name
from flyspec.startup import stage
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
    sharded = {}
    try:
        find = partial(cached_file, source, _raise_exceptions_for_missing_entries=False)
        planned = plan_checkpoint(
            name,
            config,
            where,
            dtype,
            lambda file: Path(found) if (found := find(file)) else None,
            max_model_len,
            tensor_parallel_size,
        )
        if tensor_parallel_size > 1:
            config = replicate(config, tensor_parallel_size)
            plan = DistributedConfig(tp_plan="auto", tp_size=tensor_parallel_size)
            sharded = {"distributed_config": plan}
        run_in = getattr(torch, str(planned.dtype))
        length = planned.context_length
        checkpoint = planned._replace(config=config, dtype=run_in)
        check(checkpoint)
        stage("reading weights")
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
    if is_out_of_memory(error):
        reason = " ".join(str(error).split()) or repr(error)
        return ConfigError(
            f"--model {name}: out of memory while loading weights: {reason:.300}; use a device "
            "with more memory, more devices (--tensor-parallel-size) or a smaller --dtype"
        )
    return unreadable(name, error)

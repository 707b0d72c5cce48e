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
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from flyspec import process
from flyspec.chat_template import DEFAULT
from flyspec.config import model_source, served_name
from flyspec.engine.checkpoint import Checkpoint, fingerprint_beside
from flyspec.engine.kv_heads import replicate
from flyspec.engine.native.family import unsupported
from flyspec.engine.native.library import Library, find
from flyspec.engine.out_of_memory import is_out_of_memory
from flyspec.engine.supported import check_tensor_parallel
from flyspec.errors import ConfigError
from flyspec.startup import stage
from flyspec.tokenizer import fingerprint
from flyspec.values.admin import ModelInfo, TokenizerBundle

NARROW_HIDDEN_SIZE = 256
_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its description and its tokenizer."""

    model: Any
    info: ModelInfo
    tokenizer: TokenizerBundle


def resolve_device(device: str) -> torch.device:
    """Return the torch device for `--device`; `auto` is CUDA if available, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"--device {device}: unknown device; use cpu, cuda, cuda:N or auto"
        ) from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: torch found no CUDA device; use --device cpu")
    return resolved


def resolve_dtype(
    dtype: str, device: torch.device, config: Any, native: bool = False
) -> torch.dtype:
    """Return the torch dtype for `--dtype`; `auto` is the checkpoint's where that is fast.

    `native`: the native step serves a model of this configuration in bfloat16 (`serves_natively`).
    Without it, on a CPU, 16-bit weights pay off only if the processor multiplies them and the
    layers are wide enough for memory traffic to dominate; narrow models, typically drafts, run
    faster in float32 (measured: a 1 M parameter draft takes 0.45 ms per step in float32, 0.72 ms in
    bfloat16).
    """
    if dtype != "auto":
        resolved: torch.dtype = getattr(torch, dtype)
        return resolved
    stored = getattr(config, "dtype", None)
    stored = stored if isinstance(stored, torch.dtype) else torch.float32
    if device.type == "cpu" and not (native and stored is torch.bfloat16):
        cpu_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        narrow = getattr(config.get_text_config(), "hidden_size", 0) < NARROW_HIDDEN_SIZE
        if stored is not torch.bfloat16 or not cpu_bf16 or narrow:
            return torch.float32
    return stored


def serves_natively(config: Any) -> bool:
    """Whether the native step is available and supports models of this configuration."""
    return unsupported(config) is None and isinstance(find(), Library)


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
    if max_model_len > limit:
        raise ConfigError(f"--max-model-len {max_model_len}: the model's own limit is {limit}")
    sharded = {}
    if tensor_parallel_size > 1:
        check_tensor_parallel(name, config, tensor_parallel_size)
        config = replicate(config, tensor_parallel_size)
        plan = DistributedConfig(tp_plan="auto", tp_size=tensor_parallel_size)
        sharded = {"distributed_config": plan}
    try:
        weights = _check_files(name, source, config)
        run_in = resolve_dtype(dtype, where, config, not sharded and serves_natively(config))
        length = max_model_len or limit
        checkpoint = Checkpoint(name, config, run_in, where, length, tensor_parallel_size, weights)
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


def _check_files(name: str, source: str, config: Any) -> Path:
    """The weights file or index; rejects anything that is not entirely safetensors.

    `source` is a directory or hub id, `name` what the user calls it. Raises `ConfigError` and
    `OSError`.
    """
    named = getattr(config, "transformers_weights", None)
    candidates = [named] if named else [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]
    for candidate in candidates:
        if not str(candidate).endswith((_SUFFIX, _INDEX_SUFFIX)):
            raise _unsafe(name, f"its configuration names {candidate!r}")
        found = cached_file(source, candidate, _raise_exceptions_for_missing_entries=False)
        if found is None:
            continue
        if str(candidate).endswith(_INDEX_SUFFIX):
            _check_index(name, Path(found))
        return Path(found)
    raise _unsafe(name, f"there is no {' and no '.join(map(str, candidates))}")


def _check_index(name: str, path: Path) -> None:
    """Reject an index that names anything but safetensors files beside it."""
    try:
        files = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model {name}: {path.name} cannot be read: {error!r}") from None
    for file in sorted(map(str, files)):
        if not file.endswith(_SUFFIX) or Path(file).name != file:
            raise _unsafe(name, f"{path.name} names {file!r}")


def _unsafe(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--model {name}: {reason}; only safetensors weights are read, since other formats can run "
        "code. If you trust the weights, convert them with transformers' save_pretrained"
    )

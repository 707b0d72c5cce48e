"""Loads a GGUF file into llama.cpp: file, tokenizer, weights, KV cache. Raises `ConfigError`."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from flyspec import process
from flyspec.config import DraftSettings, ModelServerSettings, VerifySettings
from flyspec.engine.cache_size import CACHE_SHARE, KVCachePlan, plan_slots, readable
from flyspec.engine.device_memory import host_memory
from flyspec.engine.devices import no_cuda
from flyspec.engine.llama_cpp import binding, tokenizer
from flyspec.engine.llama_cpp.binding import Context, ContextPlan, GgufModel, cache_length
from flyspec.engine.llama_cpp.gguf_file import GgufFile
from flyspec.engine.llama_cpp.model import LlamaCppModel
from flyspec.engine.loading import LoadedModel
from flyspec.engine.supported import check_length, within_limit
from flyspec.errors import ConfigError
from flyspec.model_files import gguf_path, served_name
from flyspec.startup import stage
from flyspec.values.admin import ModelInfo

log = logging.getLogger(__name__)

BYTES_PER_THREAD = 4_000_000
"""Weights for which another thread pays: smaller models wait longer for each other's threads."""


def load(
    settings: DraftSettings | VerifySettings, drafts: bool = False
) -> tuple[LoadedModel, LlamaCppModel]:
    """Load `--model` of a service, or of one that only drafts; warm it up next.

    Raises `ConfigError` with what to change.
    """
    model = settings.model
    path = gguf_path(model)
    binding.library()  # before a large file is read
    stage("reading weights")
    file = GgufFile(path)
    gpu_layers = settings.n_gpu_layers
    if gpu_layers is None:
        gpu_layers = 0 if settings.device == "cpu" else binding.ALL_LAYERS
    with ThreadPoolExecutor(1, "weights_fingerprint") as pool:
        fingerprint = pool.submit(file.weights_fingerprint)
        weights = GgufModel(path, gpu_layers)
        stage("reading the tokenizer")
        bundle = tokenizer.read_bundle(file, weights.vocabulary)
        tokenizer.check(file, weights.vocabulary, bundle)
        weights_fingerprint = fingerprint.result()
    process.count_model_load()
    length, limit = settings.max_model_len, weights.context_length
    if drafts:
        length = within_limit(length, limit)
    check_length(length, limit)
    length = length or limit
    float32 = file.tensor_types == "F32"
    per_token = file.cache_elements_per_token() * (4 if float32 else 2)
    slots = _num_slots(settings, model, length, per_token, weights)
    threads = min(process.available_cores(), round(weights.num_bytes / BYTES_PER_THREAD))
    threads = settings.threads or max(1, threads)
    offloads = bool(weights.lib.llama_supports_gpu_offload())
    if settings.device.startswith("cuda") and not offloads:
        raise no_cuda(settings.device, "the installed llama-cpp-python was built without GPUs")
    layers = gpu_layers if offloads else 0
    plan = ContextPlan(
        slots, length, settings.max_num_batched_tokens, threads, float32, on_gpu=bool(layers)
    )
    plainly = settings.flash_attn == "off" or (settings.flash_attn == "auto" and not layers)
    if plainly and (at_once := binding.plain_attention_tokens(weights, length)):
        plan = plan._replace(micro_batch=at_once, plain_attention=True)
    context = _context(model, weights, plan)
    info = ModelInfo(
        name=settings.served_model_name or served_name(model),
        tokenizer_fingerprint=bundle.fingerprint,
        vocab_size=weights.vocabulary.size,
        context_length=length,
        dtype=weights.file_type,
        device="cpu",  # where its logits are; `numerics` has its layers' place
        num_parameters=weights.num_parameters,
        weights_fingerprint=weights_fingerprint,
        numerics=_numerics(weights, layers, plan),
    )
    served = LlamaCppModel(info, context, per_token)
    log.info("loaded %s: %.1f M parameters, %s (%s) in %s",
             info.name, info.num_parameters / 1e6, info.dtype, readable(weights.num_bytes),
             served)  # fmt: skip
    return LoadedModel(None, info, bundle), served


def _num_slots(
    settings: ModelServerSettings, name: str, length: int, per_token: int, weights: GgufModel
) -> int:
    """Return how many sequences fit; logs the plan."""
    rounded = cache_length(length)
    slot = max(1, rounded * per_token)
    most = min(settings.max_sessions, int(weights.lib.llama_max_parallel_sequences()))
    budget, memory = settings.kv_cache_memory_bytes, host_memory()
    if not budget and memory is not None:
        budget = max(int(CACHE_SHARE * memory.free), slot)
        if slot > memory.free:
            raise ConfigError(
                f"--model {name}: not even one session fits: its KV cache of {rounded} tokens "
                f"takes {readable(slot)}, and {readable(memory.free)} are free; lower "
                f"--max-model-len to {memory.free // per_token // 2} or less"
            )
    slots = plan_slots(slot, budget, most) if budget else most
    log.info("%s", KVCachePlan(slots, rounded, slot))
    return slots


def _context(name: str, weights: GgufModel, plan: ContextPlan) -> Context:
    try:
        return Context(weights, plan)
    except MemoryError as error:
        raise ConfigError(
            f"--model {name}: {error} of {plan.num_sequences} sessions x {plan.length} tokens; "
            "lower --max-sessions, --max-model-len or --kv-cache-memory-bytes"
        ) from None


def _numerics(weights: GgufModel, gpu_layers: int, plan: ContextPlan) -> str:
    """Describe what determines the model's bits besides its weights (`ModelInfo.numerics`)."""
    return ", ".join(
        (
            weights.file_type,
            binding.version(),
            binding.features(),
            *([f"{'all' if gpu_layers < 0 else gpu_layers} layers on GPUs"] if gpu_layers else []),
            f"{plan.threads} thread{'s' * (plan.threads > 1)}",
            f"{'float32' if plan.float32 else 'float16'} cache",
            *([] if plan.plain_attention or plan.float32 else ["flash attention"]),
        )
    )

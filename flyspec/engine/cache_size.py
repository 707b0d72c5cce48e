"""Memory of a service on its device: its KV cache, its heads, and the number of sessions that fit.

Before weights are read, from the checkpoint's headers: a configuration that cannot work fails at
once, not after reading 140 GB (`check_fits`). After, from what is actually free (`plan_cache`),
unless `--kv-cache-memory-bytes` sets the size. No torch.

On a GPU the KV cache is allocated up front, so it gets what `--gpu-memory-utilization` leaves, and
sessions share it in blocks. On a CPU each session has a slot of the whole context, as many as fit
into a share of the free memory, which is taken as slots are written (`lazy_memory`). `--block-size`
chooses the other way.

Heads are loaded once the KV cache is there, so that it must leave them room: for their weights, for
the hidden rows that they read, and for their own caches, which grow with the sequences as the KV
cache does (`draft_heads.stepping`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from flyspec.config import ModelServerSettings
from flyspec.drafter_names import head_directories
from flyspec.engine.cache_table import SPARE_ROWS
from flyspec.engine.checkpoint import Checkpoint, loaded_sizes
from flyspec.engine.device_memory import DeviceMemory, device_memory, give_back
from flyspec.engine.devices import AnyDevice, ElementType
from flyspec.engine.heads import heads_per_rank, layer_heads, replicated_numbers, splits_heads
from flyspec.errors import ConfigError
from flyspec.model_files import CONFIG, SAFETENSORS

if TYPE_CHECKING:
    from flyspec.engine.loading import LoadedModel

log = logging.getLogger(__name__)

GPU_BLOCK_SIZE = 32
"""Default of `--block-size` on GPUs."""

CACHE_SHARE = 0.25
"""Share of a CPU's free memory for the KV cache by default: a drafter or a target may start beside
it."""
_ACTIVATIONS = 4
"""Copies of a token's hidden state and MLP state alive at once in a step, besides its row of
logits: an estimate, until steps can be measured."""
_MTP_LAYER = re.compile(r"(?:model\.layers\.(\d+)|mtp)\.")
"""Tensors of a target's checkpoint that may be an MTP layer's; a decoder layer with its number."""


class KVCachePlan(NamedTuple):
    """A KV cache of slots, or of blocks that the slots share, and its bytes on one device.

    `bytes_per_slot` are those of the whole context, `max_length` tokens; `spare_bytes` those that
    no session uses: after the last slot (`cache_table.SPARE_ROWS`), or of block 0. Without blocks,
    `block_size`, their tokens, and `num_blocks`, which sessions may use, are 0.
    """

    num_slots: int
    max_length: int
    bytes_per_slot: int
    spare_bytes: int = 0
    block_size: int = 0
    num_blocks: int = 0

    @property
    def total_bytes(self) -> int:
        used = self.num_blocks * self.bytes_per_block
        return (used or self.num_slots * self.bytes_per_slot) + self.spare_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block; 0 without blocks."""
        if not self.block_size:
            return 0
        return self.bytes_per_slot // blocks_of(self.max_length, self.block_size)

    @property
    def shape(self) -> str:
        """Description of its parts."""
        if self.block_size:
            return f"{self.num_blocks:,} blocks x {self.block_size} tokens"
        return f"{self.num_slots} slot{'s' * (self.num_slots > 1)} x {self.max_length} tokens"

    def length_in(self, num_bytes: int) -> int:
        """Return the longest context of which one fits into so many bytes."""
        room = max(0, num_bytes - self.spare_bytes)
        if self.block_size:
            return room // self.bytes_per_block * self.block_size
        return room * self.max_length // self.bytes_per_slot

    def __str__(self) -> str:
        each = readable(self.bytes_per_block or self.bytes_per_slot)
        sessions = f", up to {self.num_slots} sessions" if self.block_size else ""
        return f"KV cache: {self.shape}, {each} each, {readable(self.total_bytes)} in all{sessions}"


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-num_tokens // block_size)


def slot_bytes(
    config: Any, max_length: int, dtype: ElementType, tensor_parallel_size: int = 1
) -> int:
    """Return the bytes of a slot of `max_length` tokens on each device of a tensor-parallel group.

    `config` is a model's configuration; `dtype` the one it runs in. Under tensor parallelism a
    device holds its share of the KV heads, at least one, if transformers' plan for the model splits
    them.
    """
    config = config.get_text_config()
    ranks = tensor_parallel_size if splits_heads(config) else 1
    per_token = sum(
        2 * heads_per_rank(kv_heads, ranks) * dim for _, kv_heads, dim in layer_heads(config)
    )
    return max_length * per_token * dtype.itemsize


def plan_slots(
    bytes_per_slot: int, budget_bytes: int, max_sessions: int, spare_bytes: int = 0
) -> int:
    """Return how many slots, one per session, fit into the budget; at most `max_sessions`.

    Raises `ConfigError` if not even one fits.
    """
    fitting, least = (budget_bytes - spare_bytes) // bytes_per_slot, bytes_per_slot + spare_bytes
    if fitting < 1:
        raise ConfigError(
            f"--kv-cache-memory-bytes {budget_bytes}: one session needs {least} bytes "
            f"({readable(least)}); raise it, or lower --max-model-len"
        )
    return min(max_sessions, fitting)


def plan_kv_cache(
    config: Any,
    max_length: int,
    dtype: ElementType,
    max_sessions: int,
    budget_bytes: int = 0,
    tensor_parallel_size: int = 1,
    block_size: int = 0,
) -> KVCachePlan:
    """Plan the cache of a service: a slot for each session, or as many as fit into a budget.

    With blocks of `block_size` tokens, every session has a slot, and the budget limits the blocks.
    `budget_bytes` is per device (0: no limit). Raises `ConfigError`.
    """
    blocks = blocks_of(max_length, block_size) if block_size else 0
    size, spare = (
        slot_bytes(config, length, dtype, tensor_parallel_size)
        for length in (blocks * block_size or max_length, block_size or SPARE_ROWS)
    )
    slots = max_sessions
    if budget_bytes:
        slots = plan_slots(size, budget_bytes, max_sessions, spare)
    if not block_size:
        return KVCachePlan(slots, max_length, size, spare)
    fitting = (budget_bytes - spare) // spare if budget_bytes else max_sessions * blocks
    num_blocks = min(fitting, max_sessions * blocks)
    return KVCachePlan(max_sessions, max_length, size, spare, block_size, num_blocks)


def readable(num_bytes: int) -> str:
    """Format bytes as in "12.6 MB", with three digits; units are powers of 1000."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


class HeadMemory(NamedTuple):
    """Bytes of all heads of a target: weights, hidden rows of the largest step, and what their
    caches take per token of a session."""

    weights: int = 0
    hidden: int = 0
    bytes_per_token: int = 0

    @property
    def taken(self) -> dict[str, int]:
        """Memory that they take whatever the KV cache's size, by name."""
        parts = {"heads": self.weights, "hidden rows": self.hidden}
        return {name: size for name, size in parts.items() if size}


def head_memory(
    settings: ModelServerSettings,
    config: Any,
    dtype: ElementType,
    device: AnyDevice,
    context_length: int,
) -> HeadMemory:
    """Return what the heads of `--heads` will take beside a target of this configuration.

    An estimate, in the target's data type. A head whose files cannot be read counts as nothing:
    loading it says what is wrong.
    """
    directories = head_directories(getattr(settings, "heads", ""))
    if not directories:
        return HeadMemory()
    text = config.get_text_config()
    weights = numbers = 0
    for directory in directories.values():
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            own, cached = _of_head(Path(directory).expanduser(), text, dtype)
            weights, numbers = weights + own, numbers + cached
    hidden = 0
    if device.type == "cuda":  # all layers' rows are kept until the heads have read them
        tokens = min(settings.max_num_batched_tokens, context_length)
        hidden = tokens * (text.num_hidden_layers + 1) * text.hidden_size * dtype.itemsize
    return HeadMemory(weights, hidden, numbers * dtype.itemsize)


def _of_head(folder: Path, target: Any, dtype: ElementType) -> tuple[int, int]:
    """Return the bytes of a head's weights, and how many numbers it caches per token."""
    config = json.loads((folder / CONFIG).read_text())
    files = sorted(folder.glob(f"*{SAFETENSORS}"))
    sizes = [(_MTP_LAYER.match(name), n) for path in files for name, n in loaded_sizes(path, dtype)]
    mtp = [n for m, n in sizes if m and (m[1] is None or int(m[1]) >= target.num_hidden_layers)]
    if mtp:  # a layer of the target's kind
        *_, (_, kv_heads, dim) = layer_heads(target)
        return sum(mtp), 2 * kv_heads * dim
    weights = sum(n for _, n in sizes)
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return weights, 0
    layer = SimpleNamespace(**config.get("transformer_layer_config", config))
    return weights, sum(2 * kv_heads * dim for _, kv_heads, dim in layer_heads(layer))


class Fit(NamedTuple):
    """Device memory of a service besides its KV cache, in bytes: used and permitted.

    `taken` maps the name of each part to its size; `slot` is the cache of one session, beside which
    draft heads cache `head_slot_bytes`.
    """

    name: str
    device: AnyDevice
    settings: ModelServerSettings
    memory: DeviceMemory
    taken: dict[str, int]
    slot: KVCachePlan
    head_slot_bytes: int = 0

    @property
    def limit(self) -> int:
        """Bytes that this process may hold, including what it already holds."""
        utilization = 1.0
        if self.device.type == "cuda" and not self.settings.kv_cache_memory_bytes:
            utilization = self.settings.gpu_memory_utilization
        return self.memory.room(utilization) + self.memory.own

    @property
    def left(self) -> int:
        """Bytes left for the KV cache, less what heads cache beside it; may be negative."""
        left, own = self.limit - sum(self.taken.values()), self.slot.bytes_per_slot
        return left * own // (own + self.head_slot_bytes)

    def of_heads(self, plan: KVCachePlan) -> int:
        """Bytes of the heads' caches when the KV cache is full."""
        return plan.total_bytes * self.head_slot_bytes // self.slot.bytes_per_slot

    def bytes_with(self, plan: KVCachePlan) -> int:
        """Bytes of all memory used with this cache."""
        return sum(self.taken.values()) + plan.total_bytes + self.of_heads(plan)

    @property
    def most(self) -> int:
        """Maximum bytes of the KV cache; on a CPU a share of what is left, but one session."""
        if self.device.type == "cuda":
            return self.left
        return max(self.slot.total_bytes, int(CACHE_SHARE * self.left))

    def require_one(self) -> None:
        """Raise `ConfigError` if not even one session fits."""
        if self.left < self.slot.total_bytes:
            raise ConfigError(
                f"--model {self.name}: not even one session fits on {self.device}: "
                f"{self.sum_of(self.slot)}, but only {self._allowed()}; {self._advice()}"
            )

    def sum_of(self, plan: KVCachePlan) -> str:
        """Return the sum of all memory used with this cache, as text."""
        parts = [f"{what} {readable(size)}" for what, size in self.taken.items()]
        parts.append(f"KV cache {plan.shape} {readable(plan.total_bytes)}")
        if of_heads := self.of_heads(plan):
            parts.append(f"caches of heads {readable(of_heads)}")
        return f"{' + '.join(parts)} = {readable(self.bytes_with(plan))}"

    def line(self, plan: KVCachePlan) -> str:
        """Return the comparison as text."""
        return f"memory of {self.device}: {self.sum_of(plan)} of {self._allowed()}"

    def warning(self, plan: KVCachePlan) -> str:
        """Return what to fear of the cache if it may be too much, and what to change; else ""."""
        if plan.total_bytes <= self.left:
            return ""
        return (
            "the service will fail or be killed if all of it is used; lower --max-sessions, "
            "--max-model-len or --kv-cache-memory-bytes"
        )

    def tell(self, plan: KVCachePlan) -> None:
        """Log the comparison on one line, as a warning if it may be too much."""
        if warning := self.warning(plan):
            log.warning("%s: %s", self.line(plan), warning)
        else:
            log.info("%s", self.line(plan))

    @property
    def _is_shared(self) -> bool:
        """True if `--gpu-memory-utilization` keeps it from using all free memory."""
        return self.limit < self.memory.free + self.memory.own

    def _allowed(self) -> str:
        free = f"{readable(self.memory.free)} free"
        if not self._is_shared:
            return free if not self.memory.own else f"{readable(self.limit)} ({free})"
        share, total = self.settings.gpu_memory_utilization, readable(self.memory.total)
        return f"{readable(self.limit)} (--gpu-memory-utilization {share:g} of {total}; {free})"

    def _advice(self) -> str:
        """Changes to make, most effective first."""
        length = self.slot.length_in(self.left)
        ways = [f"lower --max-model-len to {length} or less"] if length else []
        if self.device.type == "cuda" and hasattr(self.settings, "tensor_parallel_size"):
            ways.append("raise --tensor-parallel-size")
        if self._is_shared:
            ways.append("raise --gpu-memory-utilization")
        if not length:
            ways.append("use a smaller model or another --dtype")
        return ", ".join([*ways, "or free memory on the device"])


def block_size(settings: ModelServerSettings, device: AnyDevice) -> int:
    """Return the tokens per block of the KV cache on a device; 0: slots of the whole context."""
    if settings.block_size is not None:
        return settings.block_size
    return GPU_BLOCK_SIZE if device.type == "cuda" else 0


def check_fits(settings: ModelServerSettings, model: Checkpoint) -> None:
    """Compare planned with free memory before weights are read, and log the result.

    Does nothing if either is unknown. Raises `ConfigError` if not even one session fits.
    """
    memory, weights = device_memory(model.device), model.loaded_bytes()
    if memory is None or weights is None:
        return
    fit, plan = plan_fit(settings, model, memory, weights)
    fit.require_one()
    fit.tell(plan())


def plan_fit(
    settings: ModelServerSettings, model: Checkpoint, memory: DeviceMemory, weights: int
) -> tuple[Fit, Callable[[], KVCachePlan]]:
    """Return what a model would use of each device, and a call that plans its whole KV cache.

    `weights` are those of the whole model, in bytes. The call is only for a fit with room for one
    session.
    """
    plan = partial(
        plan_kv_cache,
        model.config,
        model.context_length,
        model.dtype,
        tensor_parallel_size=model.tensor_parallel_size,
        block_size=block_size(settings, model.device),
    )
    # A lower bound: each device holds whole whatever else transformers' plan does not split.
    size = model.tensor_parallel_size
    repeated = replicated_numbers(model.config.get_text_config(), size) * model.dtype.itemsize
    taken = {"weights": weights // size + repeated}
    if model.device.type == "cuda":
        taken |= {"CUDA": memory.own, "activations": activation_bytes(settings, model)}
    heads = head_memory(settings, model.config, model.dtype, model.device, model.context_length)
    taken |= heads.taken
    in_slot = heads.bytes_per_token * model.context_length
    fit = Fit(model.name, model.device, settings, memory, taken, plan(max_sessions=1), in_slot)
    budget = settings.kv_cache_memory_bytes or fit.most
    return fit, partial(plan, max_sessions=settings.max_sessions, budget_bytes=budget)


def plan_cache(
    loaded: LoadedModel,
    settings: ModelServerSettings,
    tensor_parallel_size: int = 1,
    measure_step: Callable[[], int] = lambda: 0,
    agree: Callable[[int], int] = lambda own: own,
) -> KVCachePlan:
    """Plan the KV cache of a loaded model, and log it. Raises `ConfigError`.

    `measure_step` runs a service's largest steps and returns the GPU bytes that they take; `agree`
    returns the minimum of a number over all ranks, since all must have the same slots or blocks.
    """
    device, name = loaded.model.device, loaded.info.name
    plan = partial(
        plan_kv_cache,
        loaded.model.config,
        loaded.info.context_length,
        loaded.model.dtype,
        tensor_parallel_size=tensor_parallel_size,
        block_size=block_size(settings, device),
    )
    budget = settings.kv_cache_memory_bytes
    if not budget:
        taken = {}
        if device.type == "cuda":
            taken["activations"] = measure_step()
            give_back(device)
        memory = device_memory(device)
        if memory is not None:
            if memory.own:
                taken["weights and CUDA"] = memory.own
            config, length = loaded.model.config, loaded.info.context_length
            heads = head_memory(settings, config, loaded.model.dtype, device, length)
            taken |= heads.taken
            in_slot = heads.bytes_per_token * length
            fit = Fit(name, device, settings, memory, taken, plan(max_sessions=1), in_slot)
            budget = agree(fit.most)
            fit.require_one()
            if budget < fit.slot.total_bytes:
                raise ConfigError(f"--model {name}: another rank has no room for one session")
    chosen = plan(max_sessions=settings.max_sessions, budget_bytes=budget)
    fewer = chosen.num_slots < settings.max_sessions
    advice = " (as many as fit; a lower --max-model-len makes room for more)" if fewer else ""
    log.info("%s%s", chosen, advice)
    return chosen


def activation_bytes(settings: ModelServerSettings, model: Checkpoint) -> int:
    """Estimate the GPU memory that the largest step takes besides weights and KV cache."""
    config: Any = model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    numbers = config.vocab_size + _ACTIVATIONS * (config.hidden_size + inner)
    tokens = min(settings.max_num_batched_tokens, model.context_length)
    return int(tokens * numbers * model.dtype.itemsize)

"""Number of sessions that fit on a service's device, estimated before and after reading weights.

Before, from the checkpoint's headers: a configuration that cannot work fails at once, not after
reading 140 GB (`check_fits`). After, from what is actually free (`plan_cache`), unless
`--kv-cache-memory-bytes` sets the size.

On a GPU the KV cache is allocated up front, so it gets what `--gpu-memory-utilization` leaves, and
sessions share it in blocks. CPU memory is taken as slots are written (`lazy_memory`), so every
session gets a slot as long as one slot could be filled, and the log warns if they could not all be
filled at once. `--block-size` chooses the other way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flyspec.config import ModelServerSettings
from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.device_memory import DeviceMemory, device_memory, give_back
from flyspec.engine.devices import AnyDevice
from flyspec.engine.head_memory import head_memory
from flyspec.engine.heads import replicated_numbers
from flyspec.engine.memory import KVCachePlan, plan_kv_cache, readable
from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from flyspec.engine.loading import LoadedModel

log = logging.getLogger(__name__)

GPU_BLOCK_SIZE = 32
"""Default of `--block-size` on GPUs."""

_ACTIVATIONS = 4
"""Copies of a token's hidden state and MLP state alive at once in a step, besides its row of
logits: an estimate, until steps can be measured."""


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
        """Maximum bytes of the KV cache.

        On a CPU, where memory is taken as it is written, all of it: slots beyond the machine's
        memory could never be used.
        """
        return self.left if self.device.type == "cuda" else self.memory.total

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
    log.info("%s", chosen)
    return chosen


def activation_bytes(settings: ModelServerSettings, model: Checkpoint) -> int:
    """Estimate the GPU memory that the largest step takes besides weights and KV cache."""
    config: Any = model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    numbers = config.vocab_size + _ACTIVATIONS * (config.hidden_size + inner)
    tokens = min(settings.max_num_batched_tokens, model.context_length)
    return int(tokens * numbers * model.dtype.itemsize)

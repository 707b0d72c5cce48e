"""KV heads in a tensor-parallel group: each rank holds a share of them, or several ranks hold one.

As in vLLM: with at most as many ranks as KV heads, each rank holds equally many heads. With more,
rank r of `size` holds only head r // (size / heads), the one that its query heads attend with.
transformers' plans support the first case; `replicate` changes a plan for the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Module, Parameter
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import ColwiseParallel, TensorParallelLayer

_PROJECTIONS = (".k_proj", ".v_proj")
_COLWISE = "colwise"
_REPLICATED = "flyspec_replicated_kv_heads"
_ATTENTION = "flyspec_attention_with_replicated_kv_heads"


def layer_heads(text_config: Any) -> Iterator[tuple[int, int, int]]:
    """Yield the attention heads, KV heads and head size of each layer."""
    layers = getattr(text_config, "per_layer_config", None)
    for layer in layers or [text_config] * text_config.num_hidden_layers:
        heads = layer.num_attention_heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        yield heads, kv_heads, getattr(layer, "head_dim", None) or layer.hidden_size // heads


def splits_heads(text_config: Any) -> bool:
    """Whether the tensor-parallel plan splits the KV heads among the ranks."""
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    projections = (".k_proj", ".query_key_value")
    return any(
        key.endswith(projections) and style in (_COLWISE, _REPLICATED)
        for key, style in plan.items()
    )


def can_split(heads: int, kv_heads: int, size: int) -> bool:
    """Whether `size` ranks can get equally many attention heads, and all the KV heads of those."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def heads_per_rank(kv_heads: int, size: int) -> int:
    """Return the KV heads of a layer that each of `size` ranks holds; requires `can_split`."""
    return max(1, kv_heads // size)


def replicated_numbers(text_config: Any, size: int) -> int:
    """Return how many weights of KV heads a rank holds beyond an even share."""
    if not splits_heads(text_config):
        return 0
    hidden: int = text_config.hidden_size
    return sum(
        2 * dim * hidden * (heads_per_rank(kv_heads, size) * size - kv_heads) // size
        for _, kv_heads, dim in layer_heads(text_config)
    )


def replicate(config: Any, size: int) -> Any:
    """Return the configuration to load for `size` ranks, replicating KV heads if there are fewer.

    Call it once per load, on every rank.
    """
    text_config = config.get_text_config()
    kv_heads = next(layer_heads(text_config))[1]
    if not splits_heads(text_config) or kv_heads >= size:
        return config
    ALL_PARALLEL_STYLES[_REPLICATED] = ReplicatedKVHeads(kv_heads)
    ALL_PARALLEL_STYLES[_ATTENTION] = AttentionOfReplicated(size // kv_heads)
    plan = dict(text_config.base_model_tp_plan)
    for key in text_config.base_model_tp_plan:
        if key.endswith(_PROJECTIONS):
            plan |= {key: _REPLICATED, key.rpartition(".")[0]: _ATTENTION}
    config = deepcopy(config)
    config.get_text_config().base_model_tp_plan = plan
    return config


class ReplicatedKVHeads(ColwiseParallel):
    """A transformers parallel style for a projection to fewer KV heads than there are ranks.

    The ranks are a mesh of (head, replica); weights are sharded over the first dimension only, so
    that each rank reads one head's. The forward is inherited.
    """

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self._kv_heads = kv_heads
        self._mesh: DeviceMesh | None = None

    def shard_param(self, module: Module, param: str, mesh: DeviceMesh) -> None:
        """Shard a parameter (transformers' interface); `mesh` has all ranks in one dimension."""
        meta = module._parameters.get(param)
        if meta is None:
            return
        if self._mesh is None:
            shape = self._kv_heads, mesh.size() // self._kv_heads
            names = "kv_head", "replica"
            self._mesh = init_device_mesh(mesh.device_type, shape, mesh_dim_names=names)
        placements = [Shard(0), Replicate()]
        sharded = distribute_tensor(meta, self._mesh, placements, src_data_rank=None)
        module._parameters[param] = Parameter(sharded, requires_grad=meta.requires_grad)


class AttentionOfReplicated(TensorParallelLayer):
    """A transformers parallel style for the enclosing module: fewer query heads per KV head."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def install_forward(self, module: Module, mesh: DeviceMesh) -> Module:
        """Adjust the group size (transformers' interface); the forward is unchanged."""
        groups = module.num_key_value_groups
        module.num_key_value_groups = groups // self._replicas  # type: ignore[operator, assignment]
        return module

"""KV heads of the ranks of a tensor-parallel group: a share of them each, or one held by several.

As in vLLM: with no more ranks than KV heads each rank holds as many heads. With more, rank r of
`size` holds head r // (size / heads) alone, which is the one that its query heads attend with.
transformers' plans know the first; `replicate` changes a plan for the second.
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
    """Attention heads of each layer, its KV heads, and their size."""
    layers = getattr(text_config, "per_layer_config", None)
    for layer in layers or [text_config] * text_config.num_hidden_layers:
        heads = layer.num_attention_heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        yield heads, kv_heads, getattr(layer, "head_dim", None) or layer.hidden_size // heads


def splits_heads(text_config: Any) -> bool:
    """Whether the plan for tensor parallelism deals the KV heads out to the ranks."""
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    projections = (".k_proj", ".query_key_value")
    return any(
        key.endswith(projections) and style in (_COLWISE, _REPLICATED)
        for key, style in plan.items()
    )


def can_split(heads: int, kv_heads: int, size: int) -> bool:
    """Whether so many ranks get as many attention heads each, and all the KV heads of those."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def heads_per_rank(kv_heads: int, size: int) -> int:
    """KV heads that each of `size` ranks holds of a layer; `can_split` is true of them."""
    return max(1, kv_heads // size)


def replicated_numbers(text_config: Any, size: int) -> int:
    """Numbers of the weights of KV heads that a rank holds beyond an even share of them."""
    if not splits_heads(text_config):
        return 0
    hidden: int = text_config.hidden_size
    return sum(
        2 * dim * hidden * (heads_per_rank(kv_heads, size) * size - kv_heads) // size
        for _, kv_heads, dim in layer_heads(text_config)
    )


def replicate(config: Any, size: int) -> Any:
    """The configuration to load for `size` ranks: its plan replicates KV heads if those are fewer.

    Call once for every load; all ranks do.
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
    """transformers' style for a projection to fewer KV heads than there are ranks.

    The ranks are a mesh of (head, replica): the weights are sharded over the first alone, so that
    each rank reads one head's. The forward is that of its base.
    """

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self._kv_heads = kv_heads
        self._mesh: DeviceMesh | None = None

    def shard_param(self, module: Module, param: str, mesh: DeviceMesh) -> None:
        """Part of transformers' interface; `mesh` has all ranks in one dimension."""
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
    """transformers' style for the module around: fewer of its query heads share a KV head."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def install_forward(self, module: Module, mesh: DeviceMesh) -> Module:
        """Part of transformers' interface; the forward stays as it is."""
        groups = module.num_key_value_groups
        module.num_key_value_groups = groups // self._replicas  # type: ignore[operator, assignment]
        return module

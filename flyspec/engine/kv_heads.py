"""KV heads that several ranks of a tensor-parallel group hold (`heads` says which).

transformers' plans give each rank a share of the heads; `replicate` changes a plan where there are
more ranks than heads.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Module, Parameter
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import ColwiseParallel, TensorParallelLayer

from flyspec.engine.heads import REPLICATED, layer_heads, splits_heads

_PROJECTIONS = (".k_proj", ".v_proj")
_ATTENTION = "flyspec_attention_with_replicated_kv_heads"


def replicate(config: Any, size: int) -> Any:
    """Return the configuration to load for `size` ranks, replicating KV heads if there are fewer.

    Call it once per load, on every rank.
    """
    text_config = config.get_text_config()
    kv_heads = next(layer_heads(text_config))[1]
    if not splits_heads(text_config) or kv_heads >= size:
        return config
    ALL_PARALLEL_STYLES[REPLICATED] = ReplicatedKVHeads(kv_heads)
    ALL_PARALLEL_STYLES[_ATTENTION] = AttentionOfReplicated(size // kv_heads)
    plan = dict(text_config.base_model_tp_plan)
    for key in text_config.base_model_tp_plan:
        if key.endswith(_PROJECTIONS):
            plan |= {key: REPLICATED, key.rpartition(".")[0]: _ATTENTION}
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

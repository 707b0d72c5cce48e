"""The KV cache's memory, planned from a budget before it is allocated."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flyspec.engine.memory import KVCachePlan, plan_kv_cache, plan_slots, slot_bytes
from flyspec.engine.model import Step
from flyspec.engine.pages import PageTable
from flyspec.errors import ConfigError
from tests.engine.random_models import make_model, make_runner


@pytest.mark.parametrize(
    ("budget", "max_sessions", "slots"),
    [(1000, 64, 10), (1099, 64, 10), (1000, 4, 4), (100, 64, 1)],
)
def test_as_many_slots_as_fit(budget: int, max_sessions: int, slots: int) -> None:
    assert plan_slots(100, budget, max_sessions) == slots


def test_a_budget_too_small_for_one_session_says_what_to_change() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_slots(12_600_000, 12_599_999, 8)
    assert str(caught.value) == (
        "--kv-cache-memory-bytes 12599999: one session needs 12600000 bytes (12.6 MB); "
        "raise it, or lower --max-model-len"
    )


def test_the_plan_is_one_line() -> None:
    assert str(KVCachePlan(64, 4096, 12_582_912)) == (
        "KV cache: 64 slots x 4096 tokens, 12.6 MB each, 805 MB in all"
    )
    assert str(KVCachePlan(1, 16, 999_500)).endswith("16 tokens, 1 MB each, 1 MB in all")
    assert str(KVCachePlan(3, 8, 512)).endswith("512 bytes each, 1.54 kB in all")


def test_a_plan_of_blocks_is_one_line_too() -> None:
    plan = KVCachePlan(32, 4090, 12_582_912, 98_304, 32, 5461)
    assert plan.bytes_per_block == 98_304
    assert str(plan) == (
        "KV cache: 5,461 blocks x 32 tokens, 98.3 kB each, 537 MB in all, up to 32 sessions"
    )


def test_sessions_share_as_many_blocks_as_fit() -> None:
    config = make_model("llama").config
    token = slot_bytes(config, 1, torch.float32)
    plan = partial(plan_kv_cache, config, 100, torch.float32, 8, block_size=32)
    whole = plan()
    assert (whole.num_slots, whole.num_blocks, whole.block_size) == (8, 8 * 4, 32)
    # Block 0 is nobody's.
    assert whole.total_bytes == (8 * 4 + 1) * 32 * token
    assert plan(whole.total_bytes) == plan(2 * whole.total_bytes) == whole
    assert plan(whole.total_bytes - 1).num_blocks == 8 * 4 - 1
    least = plan(5 * 32 * token)
    assert (least.num_slots, least.num_blocks) == (8, 4)
    assert least.total_bytes == 5 * 32 * token
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes .*: one session needs"):
        plan(5 * 32 * token - 1)
    table = PageTable(least.num_slots, least.max_length, least.num_blocks, least.block_size)
    assert table.blocks.shape == (8, 4)
    assert (whole.length_in(least.total_bytes), whole.length_in(31 * token)) == (128, 0)


@pytest.mark.parametrize(
    ("kind", "changes", "dtype"),
    [
        ("qwen2", {"num_key_value_heads": 4}, torch.float64),
        ("mistral", {"sliding_window": 7, "head_dim": None}, torch.bfloat16),
        ("gemma3_text", {"head_dim": 12, "num_key_value_heads": 1}, torch.bfloat16),
    ],
)
def test_bytes_are_those_allocated(kind: str, changes: dict, dtype: torch.dtype) -> None:
    model = make_model(kind, dtype=dtype, **changes)
    plan = plan_kv_cache(model.config, 96, dtype, max_sessions=5)
    runner = make_runner(model, plan.num_slots, plan.max_length)
    assert runner.cache.bytes_per_slot == 0
    runner.forward([Step(0, 0, [1])])
    assert runner.cache.bytes_per_slot == plan.bytes_per_slot
    storages = [
        states.untyped_storage().nbytes()
        for layer in runner.cache.kv_layers
        for states in (layer.keys, layer.values)
    ]
    assert sum(storages) == plan.total_bytes
    assert plan_kv_cache(model.config, 96, dtype, 9, plan.total_bytes).num_slots == 5
    assert plan_kv_cache(model.config, 96, dtype, 9, plan.total_bytes - 1).num_slots == 4
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        plan_kv_cache(model.config, 96, dtype, 9, plan.bytes_per_slot)


def test_a_tensor_parallel_rank_holds_its_share_of_the_heads() -> None:
    llama = make_model("llama", num_key_value_heads=4).config
    assert slot_bytes(llama, 8, torch.float32, 4) * 4 == slot_bytes(llama, 8, torch.float32)
    # More ranks than KV heads: each holds one.
    assert slot_bytes(llama, 8, torch.float32, 16) == slot_bytes(llama, 8, torch.float32, 4)
    # Its plan leaves attention whole on every rank.
    phi3 = make_model("phi3", num_key_value_heads=4).config
    assert slot_bytes(phi3, 8, torch.float32, 4) == slot_bytes(phi3, 8, torch.float32)

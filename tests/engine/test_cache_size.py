"""Sessions that fit: planned from headers, sized by free memory, refused with calculations."""

import json
import logging
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from flyspec.config import DraftSettings, ModelServerSettings, VerifySettings
from flyspec.engine import cache_size, device_memory, runner
from flyspec.engine.cache_size import (
    HeadMemory,
    check_fits,
    head_memory,
    plan_cache,
    plan_kv_cache,
    slot_bytes,
)
from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.device_memory import DeviceMemory, host_memory
from flyspec.engine.model import Step
from flyspec.engine.pages import PageTable
from flyspec.engine.runner import ModelRunner
from flyspec.errors import ConfigError
from flyspec.settings_sources import from_command_line
from tests.engine.random_models import loaded_model, make_model, make_runner

GB = 10**9
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
LLAMA_70B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
    dtype=torch.bfloat16,
)
PARAMETERS_70B = 70_553_706_496
# 80 layers x 8 heads x 128 x (key + value) x 2 bytes, a quarter of it on each of four GPUs.
BYTES_A_TOKEN = 80 * 8 * 128 * 2 * 2 // 4


def write_header(path, **tensors):
    """A safetensors file of (dtype, shape, bytes) without the data."""
    header, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at := at + size]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


@pytest.fixture
def llama(tmp_path):
    """Llama 3 70B on the first of four GPUs; its header alone."""
    weights = write_header(
        tmp_path / "model.safetensors", w=("BF16", [PARAMETERS_70B], 2 * PARAMETERS_70B)
    )
    return Checkpoint("llama", LLAMA_70B, torch.bfloat16, CUDA, 131_072, 4, weights)


def settings_of(**given):
    """On four GPUs, with slots unless blocks are asked for."""
    return VerifySettings(model="llama", tensor_parallel_size=4, **{"block_size": 0, **given})


def pretend(monkeypatch, total, free, own=0):
    """A device of so many GB."""
    memory = DeviceMemory(*(int(n * GB) for n in (total, free, own)))
    monkeypatch.setattr(cache_size, "device_memory", lambda device: memory)


# --- before weights are read ----------------------------------------------------------------


def test_the_plan_is_compared_with_what_is_free_and_logged(llama, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    # What it would have taken: 64 slots of the model's whole context.
    whole = plan_kv_cache(LLAMA_70B, 131_072, torch.bfloat16, 64, 0, 4)
    assert whole.total_bytes // GB == 687
    pretend(monkeypatch, total=85, free=84, own=1)
    check_fits(settings_of(max_sessions=64), llama)
    assert caplog.messages == [
        "memory of cuda:0: weights 35.3 GB + CUDA 1 GB + activations 1.13 GB + KV cache 3 slots x "
        "131072 tokens 32.3 GB = 69.7 GB of 76.5 GB (--gpu-memory-utilization 0.9 of 85 GB; 84 GB "
        "free)"
    ]


def test_not_one_session_is_refused_with_the_sum_and_what_to_change(llama, monkeypatch):
    pretend(monkeypatch, total=51, free=50, own=1)
    with pytest.raises(ConfigError) as caught:
        check_fits(settings_of(), llama)
    message = str(caught.value)
    fitting = int(re.search(r"--max-model-len to (\d+) or less", message)[1])
    assert message == (
        "--model llama: not even one session fits on cuda:0: weights 35.3 GB + CUDA 1 GB + "
        "activations 1.13 GB + KV cache 1 slot x 131072 tokens 10.8 GB = 48.2 GB, but only 45.9 GB "
        "(--gpu-memory-utilization 0.9 of 51 GB; 50 GB free); "
        f"lower --max-model-len to {fitting} or less, raise --tensor-parallel-size, "
        "raise --gpu-memory-utilization, or free memory on the device"
    )
    # What it advises works, and is not less than it must be.
    check_fits(settings_of(), llama._replace(context_length=fitting))
    with pytest.raises(ConfigError):
        check_fits(settings_of(), llama._replace(context_length=fitting + 1))
    check_fits(settings_of(gpu_memory_utilization=0.95), llama)


def test_weights_that_do_not_fit_alone_need_another_model_or_more_devices(llama, monkeypatch):
    pretend(monkeypatch, total=25, free=24, own=1)
    with pytest.raises(ConfigError) as caught:
        check_fits(settings_of(gpu_memory_utilization=1.0), llama)
    message = str(caught.value)
    assert message.endswith(
        "but only 25 GB (24 GB free); raise --tensor-parallel-size, use a smaller model or another "
        "--dtype, or free memory on the device"
    )
    # A draft service has one device.
    with pytest.raises(ConfigError) as caught:
        check_fits(DraftSettings(gpu_memory_utilization=1.0, block_size=0), llama)
    assert "--tensor-parallel-size" not in str(caught.value)


def test_bytes_that_are_given_go_before_a_share(llama, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    pretend(monkeypatch, total=85, free=84, own=1)
    given = {"gpu_memory_utilization": 0.3, "max_model_len": 8192}
    short = llama._replace(context_length=8192)
    with pytest.raises(ConfigError, match="not even one session fits"):
        check_fits(settings_of(**given), short)
    check_fits(settings_of(**given, kv_cache_memory_bytes=30 * GB), short)
    assert "KV cache 32 slots x 8192 tokens" in caplog.messages[-1]
    assert caplog.records[-1].levelno == logging.INFO
    # More than there is: as it was asked for, and with a warning.
    check_fits(settings_of(**given, kv_cache_memory_bytes=60 * GB, max_sessions=4096), short)
    assert "KV cache 89 slots x 8192 tokens" in caplog.messages[-1]
    assert "the service will fail or be killed if all of it is used" in caplog.messages[-1]
    assert caplog.records[-1].levelno == logging.WARNING


def test_on_a_cpu_one_session_must_fit_and_a_share_is_planned(llama, monkeypatch, caplog):
    host = llama._replace(device=CPU, tensor_parallel_size=1)
    pretend(monkeypatch, total=512, free=150)
    with pytest.raises(ConfigError) as caught:
        check_fits(VerifySettings(model="llama"), host)
    assert str(caught.value).startswith(
        "--model llama: not even one session fits on cpu: weights 141 GB + KV cache 1 slot x "
        "131072 tokens 43.1 GB = 184 GB, but only 150 GB free; lower --max-model-len to "
    )
    assert "gpu" not in str(caught.value)
    pretend(monkeypatch, total=512, free=200)
    caplog.set_level(logging.INFO)
    check_fits(VerifySettings(model="llama"), host)
    assert "KV cache 1 slot x 131072 tokens 43.1 GB = 184 GB of 200 GB free" in caplog.messages[0]
    pretend(monkeypatch, total=512, free=500)
    check_fits(VerifySettings(model="llama"), host)
    # A quarter of what is left: 2 of 32.
    assert "KV cache 2 slots x 131072 tokens 86.1 GB = 227 GB of 500 GB" in caplog.messages[1]


def test_where_nobody_knows_nothing_is_said(llama, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(cache_size, "device_memory", lambda device: None)
    check_fits(settings_of(), llama)
    pretend(monkeypatch, total=1, free=1)
    check_fits(settings_of(), llama._replace(weights=llama.weights.with_name("none")))
    assert not caplog.messages


# --- after loading --------------------------------------------------------------------------


def loaded(config=LLAMA_70B, device=CUDA, length=8192):
    """The interface of a loaded model."""
    model = SimpleNamespace(config=config, dtype=torch.bfloat16, device=device)
    info = SimpleNamespace(name="llama", context_length=length)
    return SimpleNamespace(model=model, info=info)


def test_the_cache_gets_what_is_left_of_a_gpu(monkeypatch):
    pretend(monkeypatch, total=85, free=46, own=38)
    order = []

    def measure():
        order.append("measured")
        return 2 * GB

    def agree(own):
        order.append("agreed")
        return own

    plan = plan_cache(loaded(), settings_of(max_sessions=64), 4, measure, agree)
    left = 0.9 * 85 * GB - 38 * GB - 2 * GB
    assert plan.num_slots == int((left - plan.spare_bytes) // (8192 * BYTES_A_TOKEN)) == 54
    assert plan.total_bytes <= left < plan.total_bytes + plan.bytes_per_slot
    assert order == ["measured", "agreed"]
    # Not more than sessions are let in, and as many as the rank with the least.
    assert plan_cache(loaded(), settings_of(max_sessions=8), 4, measure).num_slots == 8
    fewer = plan_cache(loaded(), settings_of(), 4, measure, lambda own: min(own, 7 * GB))
    assert fewer.num_slots == 10
    with pytest.raises(ConfigError, match="another rank has no room for one session"):
        plan_cache(loaded(), settings_of(), 4, measure, lambda own: 0)


def test_sessions_share_the_blocks_that_are_left_of_a_gpu(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    pretend(monkeypatch, total=85, free=46, own=38)
    paged = partial(settings_of, block_size=None)
    plan = plan_cache(loaded(), paged(max_sessions=256), 4, lambda: 2 * GB)
    left = 0.9 * 85 * GB - 38 * GB - 2 * GB
    assert (plan.num_slots, plan.block_size) == (256, 32)
    assert plan.num_blocks == left // (32 * BYTES_A_TOKEN) - 1 == 13_922
    assert plan.total_bytes <= left < plan.total_bytes + plan.bytes_per_block
    assert caplog.messages[-1] == (
        "KV cache: 13,922 blocks x 32 tokens, 2.62 MB each, 36.5 GB in all, up to 256 sessions"
    )
    # Not more than sessions can fill, and as many as the rank with the least.
    assert plan_cache(loaded(), paged(max_sessions=8), 4).num_blocks == 8 * 256
    fewer = plan_cache(loaded(), paged(), 4, agree=lambda own: min(own, 7 * GB))
    assert (fewer.num_slots, fewer.num_blocks) == (32, 7 * GB // (32 * BYTES_A_TOKEN) - 1)
    with pytest.raises(ConfigError, match="another rank has no room for one session"):
        plan_cache(loaded(), paged(), 4, agree=lambda own: 256 * 32 * BYTES_A_TOKEN)


@pytest.mark.parametrize(
    ("given", "device", "expected"), [(None, CUDA, 32), (None, CPU, 0), (64, CPU, 64), (0, CUDA, 0)]
)
def test_blocks_are_the_default_on_gpus(given, device, expected):
    assert cache_size.block_size(settings_of(block_size=given), device) == expected


@pytest.mark.parametrize("size", ["8", "48", "512", "-1", "x"])
def test_a_block_size_is_a_power_of_two(size, capsys):
    with pytest.raises(SystemExit):
        from_command_line(DraftSettings, "draft", ["--block-size", size])
    assert "--block-size" in capsys.readouterr().err


def test_bytes_that_are_given_need_no_measuring(monkeypatch):
    pretend(monkeypatch, total=85, free=1, own=38)
    settings = settings_of(kv_cache_memory_bytes=10 * GB)
    assert plan_cache(loaded(), settings, 4, measure_step=pytest.fail).num_slots == 14


def test_on_a_cpu_a_quarter_of_what_is_free_is_planned(monkeypatch):
    pretend(monkeypatch, total=100, free=44)
    of_host = loaded(device=CPU, length=131_072)
    settings = VerifySettings(model="llama", max_sessions=64)
    assert plan_cache(of_host, settings, measure_step=pytest.fail).num_slots == 1
    assert plan_cache(loaded(device=CPU), settings).num_slots == 4
    pretend(monkeypatch, total=100, free=43)
    with pytest.raises(ConfigError, match="not even one session fits on cpu: KV cache 1 slot x"):
        plan_cache(of_host, settings)
    monkeypatch.setattr(cache_size, "device_memory", lambda device: None)
    assert plan_cache(of_host, settings).num_slots == 64


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("context_length", [160, 20])
def test_the_largest_steps_are_tried_to_measure_them(monkeypatch, context_length):
    """A step with the maximum number of tokens, and a prompt chunk at the end of the context."""
    tried = []

    def peak(device, work):
        (rows,) = work()
        tried.append((len(rows.logits), work.args[0][0].start, len(work.args[0][0].token_ids)))
        return 10 ** len(tried)

    monkeypatch.setattr(runner, "peak_bytes", peak)
    settings = ModelServerSettings(max_num_batched_tokens=150, prefill_chunk=32)
    model = loaded_model(make_model("llama"), context_length)
    assert ModelRunner.step_bytes(model, settings) == 110
    most, piece = min(150, context_length), min(32, context_length)
    assert tried == [(most, 0, most), (1, context_length - piece, piece)]


@pytest.mark.usefixtures("one_thread")
def test_what_a_model_cannot_do_is_left_to_its_trial(monkeypatch):
    settings = ModelServerSettings()
    model = loaded_model(make_model("nemotron", dtype=torch.float32))
    assert ModelRunner.step_bytes(model, settings) == 0
    with pytest.raises(ConfigError, match="does not pass arguments on"):
        ModelRunner(model, 2).warm_up()


# --- what is read ---------------------------------------------------------------------------


def test_headers_tell_what_weights_take_once_they_are_loaded(llama, tmp_path):
    file = write_header(
        tmp_path / "a.safetensors",
        half=("BF16", [3, 5], 30),
        wide=("F32", [7], 28),
        scalar=("F16", [], 2),
        packed=("I32", [11], 44),
    )
    assert llama._replace(weights=file).loaded_bytes() == 2 * (15 + 7 + 1) + 44
    assert llama._replace(weights=file, dtype=torch.float64).loaded_bytes() == 8 * 23 + 44
    other = tmp_path / "b.safetensors"
    save_file({"w": torch.zeros(6, 6)}, other, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    names = {"x": file.name, "y": other.name, "z": file.name}
    index.write_text(json.dumps({"metadata": {"total_size": 400}, "weight_map": names}))
    sharded = llama._replace(weights=index)
    assert sharded.loaded_bytes() == 2 * (23 + 36) + 44
    # Not all of them are here yet.
    other.unlink()
    assert sharded.loaded_bytes() == 400
    assert sharded._replace(dtype=torch.float32).loaded_bytes() == 800


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{]", b"\x01" * 50])
def test_a_damaged_header_is_left_to_whoever_loads_it(llama, tmp_path, content):
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(content)
    assert llama._replace(weights=file).loaded_bytes() is None


MEMINFO = "MemTotal:       8000 kB\nMemFree:        10 kB\nMemAvailable:   5000 kB\nHuge:  0\n"


def test_a_host_has_what_the_kernel_calls_available_within_a_containers_limit(
    tmp_path, monkeypatch
):
    meminfo = tmp_path / "meminfo"
    group = tuple(tmp_path / name for name in ("limit", "used", "stat"))
    monkeypatch.setattr(device_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(device_memory, "_CGROUPS", ((*group, "inactive_file"),))
    assert host_memory() is None
    meminfo.write_text(MEMINFO)
    assert host_memory() == DeviceMemory(8_192_000, 5_120_000)
    for path, text in zip(group, ("max", "1000000", "anon 3\ninactive_file 200000\n"), strict=True):
        path.write_text(text)
    assert host_memory() == DeviceMemory(8_192_000, 5_120_000)
    group[0].write_text("2000000")
    assert host_memory() == DeviceMemory(2_000_000, 1_200_000)
    group[1].write_text("3000000")
    assert host_memory() == DeviceMemory(2_000_000, 0)
    assert device_memory.device_memory(CPU) == host_memory()
    assert device_memory.device_memory(torch.device("meta")) is None


def test_sessions_share_as_many_blocks_as_fit():
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
def test_bytes_are_those_allocated(kind, changes, dtype):
    model = make_model(kind, dtype=dtype, **changes)
    plan = plan_kv_cache(model.config, 96, dtype, max_sessions=5)
    runner = make_runner(model, plan.num_slots, plan.max_length)
    assert runner.bytes_per_token == 0
    runner.forward([Step(0, 0, [1])])
    assert runner.bytes_per_token * plan.max_length == plan.bytes_per_slot
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


def test_a_tensor_parallel_rank_holds_its_share_of_the_heads():
    llama = make_model("llama", num_key_value_heads=4).config
    assert slot_bytes(llama, 8, torch.float32, 4) * 4 == slot_bytes(llama, 8, torch.float32)
    # More ranks than KV heads: each holds one.
    assert slot_bytes(llama, 8, torch.float32, 16) == slot_bytes(llama, 8, torch.float32, 4)
    # Its plan leaves attention whole on every rank.
    phi3 = make_model("phi3", num_key_value_heads=4).config
    assert slot_bytes(phi3, 8, torch.float32, 4) == slot_bytes(phi3, 8, torch.float32)


# --- draft heads ----------------------------------------------------------------------------

TARGET = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
)
BF16, F32 = torch.bfloat16, torch.float32
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "draft_vocab_size": 32_000,
}  # fmt: skip


def head(folder, config, name="model.safetensors", **tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_header(folder / name, **{
        tensor: ("BF16", [count], 2 * count) for tensor, count in tensors.items()
    })  # fmt: skip
    return folder


def of(heads, dtype=BF16, device=CPU, **settings):
    named = " ".join(f"h{i}={folder}" for i, folder in enumerate(heads))
    settings = VerifySettings(model="target", heads=named, **settings)
    return head_memory(settings, TARGET, dtype, device, 8192)


def test_each_kind_of_head(tmp_path):
    eagle = head(tmp_path / "eagle", EAGLE3, **{"fc.weight": 1000, "midlayer.mlp": 500})
    assert of([eagle]) == (3000, 0, 2 * 8 * 128 * 2)
    assert of([eagle], F32) == (6000, 0, 2 * 8 * 128 * 4)
    layers = {key: value for key, value in EAGLE3.items() if key != "architectures"}
    speculators = head(
        tmp_path / "speculators",
        {"speculators_model_type": "eagle3",
         "transformer_layer_config": layers | {"head_dim": 64, "num_hidden_layers": 2}},
        **{"layers.0.mlp": 7},
    )  # fmt: skip
    assert of([speculators]) == (14, 0, 2 * 2 * 8 * 64 * 2)
    medusa = head(
        tmp_path / "medusa", {"medusa_num_heads": 3}, "medusa_lm_head.safetensors", **{"0.1": 11}
    )
    assert of([medusa]) == (22, 0, 0)
    # An MTP layer lies among the target's own layers, which are counted already.
    mtp = head(
        tmp_path / "mtp", TARGET.to_dict() | {"num_nextn_predict_layers": 1},
        **{"model.layers.31.mlp": 100, "model.layers.32.eh_proj": 5, "lm_head.weight": 9},
    )  # fmt: skip
    assert of([mtp]) == (10, 0, 2 * 8 * 128 * 2)
    qwen = head(tmp_path / "qwen", TARGET.to_dict(), **{"mtp.fc": 6, "model.layers.0.mlp": 100})
    assert of([qwen]) == (12, 0, 2 * 8 * 128 * 2)
    assert of([eagle, medusa]).weights == 3022
    assert of([tmp_path / "none"]) == of([]) == HeadMemory()


def test_a_gpu_keeps_the_hidden_rows_of_a_step(tmp_path):
    eagle = head(tmp_path / "eagle", EAGLE3, fc=1)
    rows = of([eagle], device=CUDA, max_num_batched_tokens=2048).hidden
    assert rows == 2048 * 33 * 4096 * 2
    assert of([eagle], device=CUDA, max_num_batched_tokens=99_999).hidden == 4 * rows


def test_a_drafter_has_no_heads():
    assert head_memory(DraftSettings(), TARGET, BF16, CUDA, 8192) == HeadMemory()


def test_the_plan_has_heads_in_it(llama, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    eagle = head(tmp_path / "eagle", EAGLE3 | {"hidden_size": 8192}, fc=GB)
    pretend(monkeypatch, total=85, free=84, own=1)
    check_fits(settings_of(heads=f"h={eagle}", max_sessions=64), llama)
    assert caplog.messages == [
        "memory of cuda:0: weights 35.3 GB + CUDA 1 GB + activations 1.13 GB + heads 2 GB + hidden "
        "rows 2.72 GB + KV cache 2 slots x 131072 tokens 21.5 GB + caches of heads 2.15 GB = "
        "65.8 GB of 76.5 GB (--gpu-memory-utilization 0.9 of 85 GB; 84 GB free)"
    ]
    pretend(monkeypatch, total=57, free=56, own=1)
    with pytest.raises(ConfigError, match=r"\+ caches of heads 1\.08 GB = 54 GB, but only"):
        check_fits(settings_of(heads=f"h={eagle}"), llama)


@pytest.mark.parametrize("block_size", [0, 32])
def test_the_cache_leaves_room_for_heads(tmp_path, monkeypatch, block_size):
    eagle = head(tmp_path / "eagle", EAGLE3 | {"hidden_size": 8192}, fc=GB)
    pretend(monkeypatch, total=85, free=48, own=37)
    plain = settings_of(max_sessions=64, block_size=block_size)
    asked = plain.model_copy(update={"heads": f"h={eagle}"})
    with_heads, without = (plan_cache(loaded(), each, 4) for each in (asked, plain))
    info = loaded().info
    memory = head_memory(asked, loaded().model.config, BF16, CUDA, info.context_length)
    tokens = with_heads.total_bytes * with_heads.max_length // with_heads.bytes_per_slot
    used = with_heads.total_bytes + tokens * memory.bytes_per_token + sum(memory.taken.values())
    room = 0.9 * 85 * GB - 37 * GB
    assert with_heads.total_bytes < without.total_bytes <= room
    least = with_heads.bytes_per_block or with_heads.bytes_per_slot
    assert room - 1.2 * least < used <= room

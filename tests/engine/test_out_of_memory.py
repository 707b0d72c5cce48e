"""Running out of memory is reported as such, not as an unsupported model."""

import errno
from unittest import mock

import numpy as np
import pytest
import torch

from flyspec.config import ModelServerSettings
from flyspec.engine import lazy_memory
from flyspec.engine.lazy_memory import lazy_zeros
from flyspec.engine.model import Step
from flyspec.engine.native import choice, family
from flyspec.engine.native.choice import choose_model
from flyspec.engine.out_of_memory import is_out_of_memory, naming_memory
from flyspec.engine.runner import ModelRunner
from flyspec.errors import ConfigError
from tests.engine.native_steps import SETS, compiled, needs_step, small_model
from tests.engine.random_models import loaded_model, make_model, make_runner

pytestmark = pytest.mark.usefixtures("one_thread")

CPU_ALLOCATOR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
)


def caught(work):
    with pytest.raises(BaseException) as info:  # noqa: PT011
        work()
    return info.value


@pytest.mark.parametrize(
    "error",
    [
        CPU_ALLOCATOR,
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        # What really happens here.
        caught(lambda: torch.empty(1 << 60)),
        caught(lambda: np.zeros(1 << 55)),
        caught(lambda: lazy_zeros((1 << 56,), torch.uint8, torch.device("cpu"))),
    ],
)
def test_what_is_out_of_memory(error):
    assert is_out_of_memory(error)
    wrapped = ValueError("it failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        None,
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("shapes cannot be multiplied"),
        ValueError("out of memory, says the prompt"),
        OSError(errno.ENOENT, "No such file"),
    ],
)
def test_what_is_not(error):
    assert not is_out_of_memory(error)


def test_other_errors_stay_as_they_are():
    with pytest.raises(ZeroDivisionError), naming_memory("m", "trying it"):
        _ = 1 // 0
    refused = ConfigError("--model m: refused")
    refused.__cause__ = MemoryError()
    with pytest.raises(ConfigError, match="refused"), naming_memory("m", "trying it"):
        raise refused


def test_a_cache_without_room_is_no_unknown_family(monkeypatch):
    def full(*arguments, **known):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(lazy_memory.mmap, "mmap", full)
    with pytest.raises(ConfigError) as info:
        make_runner(make_model("llama"), num_slots=7, context_length=131_072).warm_up()
    message = str(info.value)
    assert message == (
        "--model llama: out of memory while trying a KV cache of 7 slots x 131072 tokens: "
        "[Errno 12] Cannot allocate memory; lower --max-model-len, --max-sessions or "
        "--kv-cache-memory-bytes"
    )


@pytest.mark.parametrize("where", ["own", "slots"])
def test_a_trial_without_room_says_so(where):
    model = make_model("llama")
    runner = make_runner(model)
    owner = model.model if where == "own" else runner
    with (
        mock.patch.object(owner, "forward", side_effect=CPU_ALLOCATOR),
        pytest.raises(ConfigError) as info,
    ):
        runner.warm_up()
    assert "--model llama: out of memory while " in str(info.value)
    assert "you tried to allocate 8589934592 bytes" in str(info.value)
    assert "use a decoder" not in str(info.value)
    assert "--dtype" not in str(info.value)


def test_more_slots_than_can_be_listed_are_out_of_memory_too():
    settings = ModelServerSettings(max_sessions=4096, kv_cache_memory_bytes=1 << 62)
    with pytest.raises(ConfigError, match="out of memory while planning the KV cache"):
        ModelRunner.planned(loaded_model(make_model("llama"), 1 << 40), settings)


@needs_step
@pytest.mark.parametrize("name", ["NativeModel", "try_out"])
def test_the_native_step_without_room_says_so(name, monkeypatch):
    monkeypatch.setattr(family, "find", lambda: compiled(SETS[0]))
    monkeypatch.setattr(choice, name, mock.Mock(side_effect=CPU_ALLOCATOR))
    monkeypatch.setattr(family, "unsupported", lambda config: None)
    model = small_model("llama")
    with pytest.raises(ConfigError, match=r"out of memory while (packing|comparing) it"):
        choose_model(loaded_model(model), ModelServerSettings(max_sessions=2))


def resident():
    """Resident bytes of this process that belong to no file."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def test_a_cache_takes_memory_as_it_is_written():
    """An idle service uses memory for its weights, not for all its sessions."""
    model = make_model("llama", dtype=torch.float32, max_position_embeddings=8192)
    runner = make_runner(model, num_slots=256, context_length=8192)
    before = resident()
    runner.forward([Step(0, 0, [1])])
    assert runner.bytes_per_token * runner.cache.max_length * 256 > 400_000_000
    for slot in range(0, 256, 16):
        runner.forward([Step(slot, 0, [1, 2, 3])])
        _, read = runner.forward([Step(slot, 3, [4]), Step(slot + 1, 0, [1, 2, 3, 4])])
        torch.testing.assert_close(read.logits, runner.forward([Step(slot, 3, [4])])[0].logits)
    assert resident() - before < 40 << 20
    # What nobody wrote reads as zeros.
    for states in runner.cache.kv_layers[0].read(9, 0, 100):
        assert not states.any()
    assert resident() - before < 40 << 20

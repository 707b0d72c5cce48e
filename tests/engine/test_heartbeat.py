"""Steps that fail or do not end: what is retried, and when the process is restarted."""

import asyncio
import os
import signal
import sys
from concurrent.futures import Future

import pytest

from flyspec import serving
from flyspec.config import STEP_TOKEN_S, DraftSettings
from flyspec.engine.failures import TICK_S, Call, Failures, StepWatch, is_for_good
from flyspec.errors import FlyspecError, ModelFailureError, ModelLostError

WAIT_S = 30.0


def looks(watch, call, seconds):
    """Return the watch's final verdict on that call, after that many seconds."""
    said = watch.observe(TICK_S, call)
    for _ in range(round(seconds / TICK_S)):
        assert not said
        said = watch.observe(TICK_S, call)
    return said


def test_a_call_may_take_the_timeout_and_more_for_its_tokens():
    watch = StepWatch(10.0)
    one, long = Call(1, 1), Call(2, 500)
    assert not looks(watch, one, 10.0)
    assert not looks(watch, None, 100.0), "nothing to do"
    assert not looks(watch, long, 10.0 + 500 * STEP_TOKEN_S)
    assert not looks(watch, Call(2, 500), 10.0), "another one"
    assert looks(watch, one, 10.25) == "a step of 1 tokens has been running for 10.2 s"


def test_a_pause_of_the_process_is_no_hang():
    watch, call = StepWatch(10.0), Call(1, 1)
    watch.observe(TICK_S, call)
    assert not watch.observe(3600.0, call)


class AcceleratorError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    ("error", "for_good"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (AcceleratorError("the launch timed out"), True),
        (RuntimeError("NCCL Error 6: remote process exited"), True),
        (RuntimeError("cuBLAS error: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ZeroDivisionError(), False),
    ],
)
def test_a_devices_error_does_not_heal(error, for_good):
    assert is_for_good(error) == for_good
    failures = Failures("verify")
    told = failures.failed(error)
    assert isinstance(told, ModelFailureError)
    assert told.status == "UNAVAILABLE"
    assert type(error).__name__ in str(told)
    assert failures.lost.done() == for_good


class Service:
    """A service whose model is lost as soon as it starts serving."""

    def __init__(self):
        self.lost = Future()
        self.grace_s = -1.0
        self.missing = {}

    async def start(self):
        self.lost.set_result("its device failed")
        return {"port": 1}

    async def stop(self, grace_s):
        self.grace_s = grace_s


async def test_a_service_whose_model_is_lost_ends():
    service = Service()

    async def load(_):
        return service

    settings = DraftSettings(metrics_port=-1, drain_grace_s=60.0)
    with pytest.raises(ModelLostError, match="the process is restarted: its device failed"):
        async with asyncio.timeout(30):
            await serving.serve("draft", settings, load)
    assert service.grace_s == serving.LOST_GRACE_S


async def test_an_orderly_end_is_no_loss(monkeypatch):
    service = Service()

    async def start():
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        return {"port": 1}

    async def load(_):
        return service

    monkeypatch.setattr(service, "start", start)
    await serving.serve("draft", DraftSettings(metrics_port=-1), load)
    for _ in range(10):  # turns of the loop
        await asyncio.sleep(0)
    assert not service.lost.done()


@pytest.mark.parametrize(
    ("error", "code"), [(ModelLostError("x"), 75), (FlyspecError("the user's"), 2)]
)
def test_its_exit_code_says_to_start_it_again(error, code, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)

    async def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        serving.run(main())
    assert ended.value.code == code

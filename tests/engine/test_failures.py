"""Which failed model steps are retried, and when the process should be restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from concurrent.futures import Future

import pytest

from flyspec import serving
from flyspec.config import DraftSettings
from flyspec.engine.failures import MOST_IN_ROW, Failures, is_for_good
from flyspec.errors import FlyspecError, ModelFailureError, ModelLostError


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
def test_a_devices_error_does_not_heal(error: Exception, for_good: bool) -> None:
    assert is_for_good(error) == for_good
    failures = Failures("verify")
    told = failures.failed(error)
    assert isinstance(told, ModelFailureError)
    assert told.status == "UNAVAILABLE"
    assert type(error).__name__ in str(told)
    assert failures.lost.done() == for_good


def test_a_few_in_a_row_are_enough() -> None:
    failures = Failures("verify")
    for _ in range(5):
        for _ in range(MOST_IN_ROW - 1):
            failures.failed(ValueError("x"))
        failures.worked()
    assert not failures.lost.done()
    for _ in range(MOST_IN_ROW + 2):
        failures.failed(ValueError("x"))
    assert failures.lost.result() == "3 steps in a row failed, the last with ValueError: x"
    assert failures.num_total == 5 * (MOST_IN_ROW - 1) + MOST_IN_ROW + 2


class Service:
    """A service whose model is lost as soon as it starts serving."""

    def __init__(self) -> None:
        self.lost: Future[str] = Future()
        self.grace_s = -1.0
        self.missing: dict[str, str] = {}

    async def start(self) -> dict[str, int]:
        self.lost.set_result("its device failed")
        return {"port": 1}

    async def stop(self, grace_s: float) -> None:
        self.grace_s = grace_s


async def test_a_service_whose_model_is_lost_ends() -> None:
    service = Service()

    async def load(_: object) -> Service:
        return service

    settings = DraftSettings(metrics_port=-1, drain_grace_s=60.0)
    with pytest.raises(ModelLostError, match="the process is restarted: its device failed"):
        async with asyncio.timeout(30):
            await serving.serve("draft", settings, load)
    assert service.grace_s == serving.LOST_GRACE_S


async def test_an_orderly_end_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()

    async def start() -> dict[str, int]:
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        return {"port": 1}

    async def load(_: object) -> Service:
        return service

    monkeypatch.setattr(service, "start", start)
    await serving.serve("draft", DraftSettings(metrics_port=-1), load)
    for _ in range(10):  # turns of the loop
        await asyncio.sleep(0)
    assert not service.lost.done()


@pytest.mark.parametrize(
    ("error", "code"), [(ModelLostError("x"), 75), (FlyspecError("the user's"), 2)]
)
def test_its_exit_code_says_to_start_it_again(
    error: FlyspecError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)

    async def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        serving.run(main())
    assert ended.value.code == code

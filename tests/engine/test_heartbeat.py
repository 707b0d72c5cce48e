"""Steps that fail or do not end: what is retried, and when the process is restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from flyspec import serving
from flyspec.config import STEP_TOKEN_S, DraftSettings
from flyspec.engine.failures import MOST_IN_ROW, TICK_S, Call, Failures, StepWatch, is_for_good
from flyspec.engine.loop import StepLoop, Work
from flyspec.engine.model import Draw, Step
from flyspec.engine.slots import SlotTable
from flyspec.errors import FlyspecError, ModelFailureError, ModelLostError

WAIT_S = 30.0


def looks(watch: StepWatch, call: Call | None, seconds: float) -> str:
    """Return the watch's final verdict on that call, after that many seconds."""
    said = watch.observe(TICK_S, call)
    for _ in range(round(seconds / TICK_S)):
        assert not said
        said = watch.observe(TICK_S, call)
    return said


def test_a_call_may_take_the_timeout_and_more_for_its_tokens() -> None:
    watch = StepWatch(10.0)
    one, long = Call(1, 1), Call(2, 500)
    assert not looks(watch, one, 10.0)
    assert not looks(watch, None, 100.0), "nothing to do"
    assert not looks(watch, long, 10.0 + 500 * STEP_TOKEN_S)
    assert not looks(watch, Call(2, 500), 10.0), "another one"
    assert looks(watch, one, 10.25) == "a step of 1 tokens has been running for 10.2 s"


def test_a_pause_of_the_process_is_no_hang() -> None:
    watch, call = StepWatch(10.0), Call(1, 1)
    watch.observe(TICK_S, call)
    assert not watch.observe(3600.0, call)


class Loop(StepLoop[int]):
    """Its steps answer with their slot, hang if the token is 1, and return NaN if it is 2."""

    service = "test"

    def __init__(self, **options: Any) -> None:
        super().__init__(Mock(cache=SlotTable(16, 64)), **options)
        self.entered, self.go, self.left = (threading.Event() for _ in range(3))
        self.spoiled_slots: list[int] = []

    def run_batch(self, wants: Sequence[Draw]) -> list[int]:
        if any(want.step.token_ids == [1] for want in wants):
            self.entered.set()
            self.go.wait(WAIT_S)
            self.left.set()
        return [want.step.slot if want.step.token_ids != [2] else -1 for want in wants]

    def spoiled(self, slot: int) -> None:
        self.spoiled_slots.append(slot)


class Job:
    def __init__(self, loop: Loop, slot: int, token: int) -> None:
        self.done, self.error = threading.Event(), None
        self.slot, self.token = slot, token
        loop.add(self, self.work(), self.fail)

    def work(self) -> Work[int]:
        ran = yield Draw(Step(self.slot, 0, [self.token]))
        if ran.result < 0:
            raise FloatingPointError("the logits are not finite")
        self.done.set()

    def fail(self, error: Exception) -> None:
        self.error = self.error or error  # type: ignore[assignment]
        self.done.set()

    def ended(self) -> Exception | None:
        assert self.done.wait(WAIT_S)
        return self.error


@contextmanager
def running(**options: Any) -> Iterator[Loop]:
    loop = Loop(**options)
    loop.start().result(WAIT_S)
    try:
        yield loop
    finally:
        loop.go.set()
        loop.stop()


def test_a_call_that_hangs_loses_the_model() -> None:
    with running(step_timeout_s=0.2) as loop:
        assert Job(loop, 0, 0).ended() is None
        hung = Job(loop, 0, 1)
        assert loop.entered.wait(WAIT_S)
        behind = Job(loop, 1, 0)
        assert loop.step_running_ns > 0
        for job in (hung, behind, Job(loop, 2, 0)):
            assert isinstance(job.ended(), ModelLostError)
            assert "a step of 1 tokens has been running for" in str(job.error)
        assert "has been running" in loop.failures.lost.result(WAIT_S)
        assert isinstance(Job(loop, 3, 0).ended(), ModelLostError), "nothing is begun any more"
        loop.stop()
        assert not loop.left.is_set(), "nobody waits for it"


def test_a_slow_start_is_no_hang() -> None:
    loop = Loop(prepare=lambda: loop.go.wait(1.0), step_timeout_s=0.1)
    loop.start().result(WAIT_S)
    assert Job(loop, 0, 0).ended() is None
    assert loop.step_running_ns == 0
    loop.stop()


def test_results_that_are_no_numbers_are_failures_of_the_model() -> None:
    with running() as loop:
        job = Job(loop, 5, 2)
        assert isinstance(job.ended(), ModelFailureError)
        assert "the logits are not finite" in str(job.error)
        assert loop.spoiled_slots == [5]
        assert Job(loop, 0, 0).ended() is None
        for _ in range(3):
            assert Job(loop, 0, 2).ended()
            assert Job(loop, 0, 2).ended()
            assert not loop.failures.lost.done()
            assert Job(loop, 0, 0).ended() is None
        for _ in range(3):
            assert Job(loop, 0, 2).ended()
        assert "3 steps in a row failed" in loop.failures.lost.result(WAIT_S)


@pytest.mark.parametrize("error", [FloatingPointError("x"), ZeroDivisionError("x")])
def test_work_that_fails_before_its_first_step_ends_alone(error: Exception) -> None:
    with running() as loop:
        job = Job(loop, 0, 0)

        def work() -> Work[int]:
            raise error
            yield

        broken = threading.Event()
        loop.add(object(), work(), lambda _: broken.set())
        assert broken.wait(WAIT_S)
        assert job.ended() is None
        assert Job(loop, 0, 0).ended() is None


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

"""The next slot goes to the oldest request, whichever orchestrator opened it."""

from __future__ import annotations

import asyncio

import pytest

from flyspec.errors import ResourceExhaustedError
from verify_service.slot_queue import SlotQueue


class Line:
    """Named sessions, over a queue with a manual clock."""

    def __init__(self, num_slots: int, max_waiting: int | None = None) -> None:
        self.now = 1000.0
        self.queue = SlotQueue(num_slots, max_waiting, lambda: self.now)
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def open(self, name: str, waited_s: float = 0.0, orchestrator_id: str = "") -> None:
        async def wait() -> None:
            await self.queue.wait(waited_s, orchestrator_id)
            self.served.append(name)

        self.tasks[name] = asyncio.create_task(wait())
        await turn()

    async def end(self, orchestrator_id: str = "") -> None:
        self.queue.give_back(orchestrator_id)
        await turn()


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_oldest_request_is_next_whoever_opens_it_and_when():
    line = Line(1, max_waiting=4)
    await line.open("first", orchestrator_id="a")
    await line.open("young", waited_s=1.0, orchestrator_id="a")
    await line.open("old", waited_s=5.0, orchestrator_id="b")
    line.now += 3.0
    await line.open("middle", waited_s=6.0, orchestrator_id="a")
    assert line.queue.waiting == 3
    for owner in ("a", "b", "a"):
        await line.end(owner)
    assert line.served == ["first", "old", "middle", "young"]
    assert (line.queue.active, line.queue.waiting) == (1, 0)


async def test_nobody_overtakes_those_who_wait():
    line = Line(1, max_waiting=1)
    await line.open("first")
    await line.open("waiting")
    with pytest.raises(ResourceExhaustedError, match="--max-sessions"):
        line.queue.take()
    line.queue.give_back()  # the slot is that of the one who waits before its task has run
    with pytest.raises(ResourceExhaustedError):
        line.queue.take()
    await turn()
    assert line.served == ["first", "waiting"]


async def test_a_quarter_as_many_as_have_slots_wait_and_the_youngest_go():
    line = Line(8)
    for index in range(8):
        await line.open(f"served {index}")
    await line.open("young", waited_s=1.0)
    await line.open("older", waited_s=2.0)
    await line.open("youngest", waited_s=0.5)
    with pytest.raises(ResourceExhaustedError, match="2 are waiting"):
        await line.tasks["youngest"]
    await line.open("oldest", waited_s=3.0)
    with pytest.raises(ResourceExhaustedError):
        await line.tasks["young"]
    assert line.queue.waiting == 2
    await line.end()
    await line.end()
    assert line.served[8:] == ["oldest", "older"]
    assert SlotQueue(2)._max_waiting == 1


async def test_who_is_cancelled_leaves_the_queue():
    line = Line(1, max_waiting=2)
    await line.open("first")
    await line.open("leaving")
    await line.open("staying")
    line.tasks["leaving"].cancel()
    await turn()
    assert line.queue.waiting == 1
    await line.end()
    assert line.served == ["first", "staying"]


async def test_a_slot_that_comes_too_late_is_the_next_ones():
    line = Line(1, max_waiting=2)
    await line.open("first", orchestrator_id="a")
    await line.open("leaving", orchestrator_id="b")
    await line.open("staying", orchestrator_id="c")
    line.queue.give_back("a")  # to the one that leaves in the same moment
    line.tasks["leaving"].cancel()
    await turn()
    assert line.served == ["first", "staying"]
    assert line.queue.others("c") == 0
    await line.end("c")
    assert line.queue.active == 0


async def test_each_orchestrator_is_told_what_the_others_hold():
    line = Line(4)
    for name, owner in (("1", "a"), ("2", "a"), ("3", "b")):
        await line.open(name, orchestrator_id=owner)
    assert [line.queue.others(owner) for owner in ("a", "b", "c")] == [1, 2, 3]
    await line.end("a")
    assert [line.queue.others(owner) for owner in ("a", "b", "c")] == [1, 1, 2]

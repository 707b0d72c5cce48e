"""The next slot goes to the oldest request, whichever orchestrator opened it."""

import asyncio

import pytest

from flyspec.errors import ResourceExhaustedError
from verify_service.slot_queue import SlotQueue


class Line:
    """Named sessions, over a queue with a manual clock and a manual number of free blocks."""

    def __init__(self, num_slots, max_waiting=None):
        self.now, self.free = 1000.0, 0
        self.queue = SlotQueue(num_slots, max_waiting, lambda: self.now, lambda: self.free)
        self.places = {}
        self.served = []
        self.tasks = {}

    async def open(self, name, waited_s=0.0, orchestrator_id="", num_blocks=0):
        async def wait():
            self.places[name] = await self.queue.wait(waited_s, orchestrator_id, num_blocks)
            self.served.append(name)

        self.tasks[name] = asyncio.create_task(wait())
        await turn()

    def give_back(self, name):
        self.queue.give_back(self.places.pop(name))

    async def end(self, name):
        self.give_back(name)
        await turn()


async def turn():
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
    for name in ("first", "old", "middle"):
        await line.end(name)
    assert line.served == ["first", "old", "middle", "young"]
    assert (line.queue.active, line.queue.waiting) == (1, 0)


async def test_nobody_overtakes_those_who_wait():
    line = Line(1, max_waiting=1)
    await line.open("first")
    await line.open("waiting")
    with pytest.raises(ResourceExhaustedError, match="--max-sessions"):
        line.queue.take()
    line.give_back("first")  # the slot is that of the one who waits before its task has run
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
    await line.end("served 3")
    await line.end("served 5")
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
    await line.end("first")
    assert line.served == ["first", "staying"]


async def test_a_slot_that_comes_too_late_is_the_next_ones():
    line = Line(1, max_waiting=2)
    await line.open("first", orchestrator_id="a")
    await line.open("leaving", orchestrator_id="b")
    await line.open("staying", orchestrator_id="c")
    line.give_back("first")  # to the one that leaves in the same moment
    line.tasks["leaving"].cancel()
    await turn()
    assert line.served == ["first", "staying"]
    assert line.queue.others("c") == 0
    await line.end("staying")
    assert line.queue.active == 0


async def test_each_orchestrator_is_told_what_the_others_hold():
    line = Line(4)
    for name, owner in (("1", "a"), ("2", "a"), ("3", "b")):
        await line.open(name, orchestrator_id=owner)
    assert [line.queue.others(owner) for owner in ("a", "b", "c")] == [1, 2, 3]
    await line.end("2")
    assert [line.queue.others(owner) for owner in ("a", "b", "c")] == [1, 1, 2]


async def test_a_session_is_admitted_beside_what_others_will_need_of_the_cache():
    line = Line(8, max_waiting=8)
    line.free = 10
    await line.open("first", num_blocks=6)
    await line.open("second", num_blocks=4)
    await line.open("third", num_blocks=3)
    await line.open("fourth", num_blocks=1)
    assert line.served == ["first", "second"], "nobody overtakes"
    with pytest.raises(ResourceExhaustedError, match=r"beside 2 and 2 are .*--kv-cache-memory-byt"):
        line.queue.take()
    # It took less than was kept for it: its beginning was in the cache.
    line.places["first"].has_run = True
    line.free = 8
    line.queue.look_again()
    await turn()
    assert line.served == ["first", "second", "third", "fourth"]
    with pytest.raises(ResourceExhaustedError, match=r"beside 4; .*--kv-cache-memory-bytes"):
        line.queue.take("", 1)


async def test_one_session_is_always_admitted():
    line = Line(2)
    await line.open("first", num_blocks=9)
    await line.open("second", num_blocks=9)
    assert line.served == ["first"]
    await line.end("first")
    assert line.served == ["first", "second"]
    line.queue.give_back(line.places["second"])
    line.queue.give_back(line.queue.take("", 9))

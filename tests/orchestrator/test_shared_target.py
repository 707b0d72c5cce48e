"""Two orchestrators over the same four slots: first come, first served, and few wait."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from flyspec.client import AsyncClient, GenerateOptions, Started
from flyspec.config import OrchestratorSettings
from flyspec.errors import ResourceExhaustedError
from flyspec.rules import Rule
from flyspec.values.rounds import VerifyOpen
from flyspec.values.tokens import SamplingParams
from orchestrator.admission.admission import Admission, HoldTimes
from tests.orchestrator.stacks import orchestrator_at, start_stack
from tests.waiting import idle, until
from verify_service.slot_queue import SlotQueue

SLOTS = 4
LONG = GenerateOptions(rule=Rule("exact"), max_tokens=50, ignore_eos=True)


class Shared:
    """Orchestrators' admissions over a service's queue; a request a second, ended by hand.

    What an orchestrator knows of the others is what it saw at the last `look`.
    """

    def __init__(self, names: str, max_waiting: int | None = None) -> None:
        self.now = 0.0
        self.queue = SlotQueue(SLOTS, clock=lambda: self.now)
        self.seen = dict.fromkeys(names, None)
        self.admissions = {
            name: Admission(
                OrchestratorSettings(max_waiting=max_waiting, max_queue_wait_s=0),
                lambda: SLOTS,
                lambda name=name: self.seen[name],
                HoldTimes(lambda: self.now),
            )
            for name in names
        }
        self.served: list[int] = []
        self.running: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.most_waiting = 0

    async def arrive(self, number: int, name: str) -> None:
        self.now += 1.0
        self.tasks[number] = asyncio.create_task(self._run(number, name, self.now))
        await self.turn()

    async def _run(self, number: int, name: str, arrived: float) -> None:
        async with self.admissions[name].visit("client") as visit, visit.slot(1):
            place = await self.queue.wait(self.now - arrived, name)
            try:
                visit.granted()
                self.served.append(number)
                self.running[number] = asyncio.Event()
                await self.running[number].wait()
            finally:
                self.running.pop(number, None)
                self.queue.give_back(place)

    async def end(self, number: int) -> None:
        self.now += 0.25
        self.running[number].set()
        await self.turn()

    def see(self, name: str) -> None:
        others, waiting = self.queue.others(name), self.queue.others_waiting(name)
        self.seen[name] = others if others or waiting else None

    async def look(self) -> None:
        """The orchestrators probe the service and admit whom they can."""
        for name, admission in self.admissions.items():
            self.see(name)
            admission._look()
        await self.turn()

    async def turn(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        assert self.queue.active <= SLOTS
        waiting = sum(a.waiting for a in self.admissions.values()) + self.queue.waiting
        self.most_waiting = max(self.most_waiting, waiting)

    def refused(self) -> list[int]:
        errors = {n: t.exception() for n, t in self.tasks.items() if t.done()}
        found = [n for n, error in errors.items() if error is not None]
        for number in found:
            error = errors[number]
            assert isinstance(error, ResourceExhaustedError)
            assert error.retry_after_s
        return found

    async def close(self) -> None:
        while self.running or any(not task.done() for task in self.tasks.values()):
            for number in list(self.running):
                await self.end(number)
            await self.look()
        assert not any(a.active or a.waiting for a in self.admissions.values())
        assert (self.queue.active, self.queue.waiting) == (0, 0)


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
async def test_what_waits_does_not_grow_with_orchestrators_and_goes_by_arrival(names):
    shared, rng = Shared(names), random.Random(3)
    for number in range(300):
        await shared.look()
        await shared.arrive(number, rng.choice(names))
        if shared.running and rng.random() < 0.66:  # 1.5 times what can be served
            await shared.end(rng.choice(list(shared.running)))
    await shared.close()
    refused = shared.refused()
    assert 60 < len(refused) < 200
    # One a second arrives, and so often orchestrators look: within a second, the order holds.
    assert all(max(shared.served[: i + 1]) - n <= 1 for i, n in enumerate(shared.served))
    assert len(shared.served) + len(refused) == 300
    assert shared.most_waiting <= 2  # a quarter of the slots, and one that was not known of yet


@pytest.mark.parametrize("names", ["ab", "abc"])
async def test_longer_queues_of_the_orchestrators_are_merged_by_arrival(names):
    shared, rng = Shared(names, max_waiting=20), random.Random(5)
    shared.queue._max_waiting = len(names)
    for number in range(30):
        await shared.arrive(number, rng.choice(names))
        await shared.look()
    assert sum(a.waiting for a in shared.admissions.values()) > 10
    await shared.close()
    assert shared.refused() == []
    assert shared.served == list(range(30))


# --- over gRPC, with a model -------------------------------------------------------------------


def taken(engine, orchestrator_id: str):
    """A session of another orchestrator."""
    open_ = VerifyOpen([0], 1, Rule("exact"), SamplingParams(), 0, orchestrator_id=orchestrator_id)
    return engine.open(open_)


class Reader:
    """A generation of which only the first event is read until the test continues it."""

    def __init__(self, client: AsyncClient) -> None:
        self.started, self.go_on = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncClient) -> None:
        async with aclosing(client.generate("The cat sat", LONG)) as events:
            async for event in events:
                if isinstance(event, Started):
                    self.started.set()
                    await self.go_on.wait()


@pytest.mark.slow
async def test_two_orchestrators_share_four_slots(model_dirs):
    verify = {"max_sessions": SLOTS, "max_waiting": 1}
    async with start_stack(model_dirs, verify=verify, probe_interval_s=0.05) as stack:
        engine, mine = stack.verify_engine, stack.orchestrator.fleet
        addresses = [f"127.0.0.1:{s.port}" for s in (stack.verify_server, stack.draft_server)]
        async with orchestrator_at(*addresses, max_waiting=None, probe_interval_s=0.05) as found:
            other, client, admin = found
            for replica in other.fleet.targets.replicas:
                replica.service.orchestrator_id = "other"  # it would be a process of its own
            held = [taken(engine, "other") for _ in range(SLOTS)]
            await until(lambda: mine.others == SLOTS)
            await until(lambda: other.fleet.others is None)
            for _ in range(2):  # so that both know that others are there
                engine.close(held.pop(0))
                held.append(taken(engine, "third"))
            await until(lambda: other.fleet.others == 2)
            early = Reader(stack.client)
            await until(lambda: engine.sessions.waiting == 1)
            assert not early.started.is_set()
            late = Reader(client)
            with pytest.raises(ResourceExhaustedError) as caught:
                await late.task
            assert caught.value.retry_after_s
            assert not late.started.is_set()
            engine.close(held.pop())
            await early.started.wait()
            early.go_on.set()
            await early.task
            while held:
                engine.close(held.pop())
            assert await idle(admin)
            sessions = engine.sessions
            assert (sessions.active, sessions.waiting, sessions.opened_total) == (0, 0, 7)

"""Which requests run, wait or are refused, and whose they are: without services."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from flyspec.config import OrchestratorSettings
from flyspec.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from orchestrator.admission import admission as waits
from orchestrator.admission import clients as module
from orchestrator.admission.admission import Admission, HoldTimes
from orchestrator.admission.clients import ClientLimits, address_of
from orchestrator.front.grpc import caller_of
from tests.waiting import until


class Clock:
    """A clock set by the test: returns `now`, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Requests:
    """Named generations that run until the test ends them."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.running: list[str] = []
        self.visits = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def begin(self, name: str, tokens: int = 1, timeout_s: float | None = None) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, tokens, timeout_s))
        await turn()

    async def _run(self, name: str, tokens: int, timeout_s: float | None) -> None:
        now = asyncio.get_running_loop().time()
        deadline = None if timeout_s is None else now + timeout_s
        async with self.admission.visit("somebody", deadline) as visit:
            self.visits[name] = visit
            async with visit.slot(tokens):
                self.running.append(name)
                try:
                    await self._ends[name].wait()
                finally:
                    self.running.remove(name)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await turn()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await turn()

    async def error(self, name: str) -> BaseException | None:
        (error,) = await asyncio.gather(self._tasks[name], return_exceptions=True)
        return error

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def admission_of(capacity, holds=None, **settings) -> Admission:
    """With these settings; no limit on the wait unless they have one."""
    settings = OrchestratorSettings(**{"max_queue_wait_s": 0, **settings})
    return Admission(settings, capacity, holds=holds)


def empty(admission: Admission) -> bool:
    return not (admission.active or admission.waiting or admission.outstanding_tokens)


@pytest.fixture
async def begun():
    """Makes requests with `admission_of`; in the end they are cancelled, and leave nothing."""
    made = []

    def make(capacity, **options) -> Requests:
        made.append(Requests(admission_of(capacity, **options)))
        return made[-1]

    yield make
    for requests in made:
        await requests.close()
        assert empty(requests.admission)


async def test_first_come_first_served(begun):
    requests = begun(lambda: 2, max_waiting=10)
    for name in "abcde":
        await requests.begin(name)
    assert requests.running == ["a", "b"]
    assert requests.admission.waiting == 3
    await requests.end("b")
    assert requests.running == ["a", "c"]
    await requests.cancel("d")
    await requests.end("a")
    assert requests.running == ["c", "e"]
    await requests.end("c")
    await requests.end("e")


async def test_as_many_run_as_there_is_capacity_for_now(begun):
    capacity = 1
    requests = begun(lambda: capacity, max_waiting=10)
    for name in "abcd":
        await requests.begin(name)
    assert requests.running == ["a"]
    capacity = 3  # replicas came
    await until(lambda: requests.running == ["a", "b", "c"])
    assert requests.admission.waiting == 1
    capacity = 1
    await requests.end("a")
    await requests.end("b")
    assert requests.running == ["c"]
    await requests.end("c")
    assert requests.running == ["d"]
    await requests.end("d")


async def test_waiting_is_bounded_and_refusals_say_when_to_retry(begun):
    requests = begun(lambda: 2, max_waiting=1)
    for name in "abcd":
        await requests.begin(name)
    error = await requests.error("d")
    assert isinstance(error, ResourceExhaustedError)
    assert "(2 running, 1 waiting)" in str(error)
    assert error.retry_after_s is not None
    assert error.retry_after_s >= waits.UNKNOWN_RETRY_S  # nothing has ended yet
    assert requests.admission.refused_total == 1


@pytest.mark.parametrize(("capacity", "waiting"), [(1, 1), (32, 8), (9, 2)])
async def test_a_share_of_the_slots_may_wait(begun, capacity, waiting):
    requests = begun(lambda: capacity)
    for i in range(capacity + waiting + 3):
        await requests.begin(str(i))
    assert requests.admission.waiting == waiting
    assert requests.admission.refused_total == 3


async def test_requests_that_are_being_read_count_as_waiting():
    admission = admission_of(lambda: 1, max_waiting=1)
    async with admission.visit("a"), admission.visit("b"):
        with pytest.raises(ResourceExhaustedError):
            admission.visit("c")
    async with admission.visit("c"):
        pass
    assert empty(admission)


async def test_tokens_are_bounded_and_a_small_request_does_not_overtake(begun):
    requests = begun(lambda: 10, max_waiting=10, max_outstanding_tokens=100)
    await requests.begin("a", 60)
    await requests.begin("large", 50)
    await requests.begin("small", 10)
    assert requests.running == ["a"]
    assert requests.admission.outstanding_tokens == 60
    requests.visits["a"].used(5)
    await turn()
    assert requests.running == ["a"]
    requests.visits["a"].used(10)  # 50 are left of it
    await turn()
    assert requests.running == ["a", "large"]
    await requests.cancel("large")
    assert requests.running == ["a", "small"]
    await requests.end("a")
    await requests.end("small")


async def test_a_request_larger_than_the_bound_runs_alone(begun):
    requests = begun(lambda: 10, max_waiting=10, max_outstanding_tokens=100)
    await requests.begin("huge", 5000)
    await requests.begin("small", 1)
    assert requests.running == ["huge"]
    requests.visits["huge"].used(4000)
    await turn()
    assert requests.running == ["huge"]
    requests.visits["huge"].used(4950)
    await turn()
    assert requests.running == ["huge", "small"]


async def test_who_would_wait_too_long_is_refused_at_once(begun):
    clock = Clock()
    requests = begun(lambda: 2, max_waiting=100, max_queue_wait_s=7.0, holds=HoldTimes(clock))
    await requests.begin("a")
    clock.now += 10
    await requests.end("a")  # slots are held for 10 s
    for name in "bcde":
        await requests.begin(name)
    error = await requests.error("e")  # the second in the queue: 10 s for two slots to come free
    assert isinstance(error, ResourceExhaustedError)
    assert "wait of 10 s" in str(error)
    assert 10 <= error.retry_after_s <= 10 * (1 + waits.RETRY_JITTER)
    assert requests.running == ["b", "c"]
    assert requests.admission.waiting == 1


async def test_slots_that_are_held_on_and_on_count_before_they_are_given_back(begun):
    clock = Clock()
    requests = begun(lambda: 1, max_waiting=100, max_queue_wait_s=7.0, holds=HoldTimes(clock))
    await requests.begin("a")
    clock.now += 8
    await requests.begin("b")
    assert isinstance(await requests.error("b"), ResourceExhaustedError)


async def test_who_could_not_begin_before_its_deadline_is_refused_at_once(begun):
    clock = Clock()
    requests = begun(lambda: 1, max_waiting=100, holds=HoldTimes(clock))
    await requests.begin("a")
    clock.now += 10
    await requests.end("a")
    await requests.begin("b")
    await requests.begin("c", timeout_s=5)
    error = await requests.error("c")
    assert isinstance(error, ResourceExhaustedError)
    assert "deadline" in str(error)
    await requests.begin("d", timeout_s=50)
    assert requests.admission.waiting == 1


async def test_a_deadline_that_passes_takes_a_request_out_of_the_queue(begun):
    requests = begun(lambda: 1, max_waiting=10)
    await requests.begin("a")
    await requests.begin("b", timeout_s=0.5)
    await requests.begin("c")
    assert requests.admission.waiting == 2
    error = await requests.error("b")
    assert isinstance(error, DeadlineExceededError)
    assert "while waiting for a slot" in str(error)
    await requests.end("a")
    assert requests.running == ["c"]


async def test_a_deadline_ends_a_generation(begun):
    requests = begun(lambda: 1)
    await requests.begin("a", 40, timeout_s=0.5)
    requests.visits["a"].used(7)
    error = await requests.error("a")
    assert isinstance(error, DeadlineExceededError)
    assert "7 of up to 40 prompt and output tokens" in str(error)


async def test_draining_refuses_those_that_wait_and_lets_the_others_go_on(begun):
    requests = begun(lambda: 1, max_waiting=10)
    await requests.begin("a")
    await requests.begin("b")
    admission = requests.admission
    async with admission.visit("read meanwhile") as visit:
        admission.drain()
        await turn()
        assert isinstance(await requests.error("b"), UnavailableError)
        with pytest.raises(UnavailableError, match="draining"):
            async with visit.slot(1):
                pass
    with pytest.raises(UnavailableError):
        admission.visit("late")
    assert requests.running == ["a"]
    assert admission.draining
    admission.resume()
    await requests.begin("c")
    await requests.end("a")
    assert requests.running == ["c"]


async def test_a_service_that_is_full_is_worth_another_try_later():
    admission = admission_of(lambda: 1)
    with pytest.raises(ResourceExhaustedError) as caught:
        async with admission.visit("a") as visit, visit.slot(1):
            raise ResourceExhaustedError("all sessions are in use")
    assert caught.value.retry_after_s is not None


async def test_a_request_that_is_not_read_yet_is_its_clients_and_has_no_place():
    admission = admission_of(lambda: 1, max_concurrent_per_client=1, max_waiting=0)
    slow = [admission.visit(name) for name in "abc"]
    with pytest.raises(ResourceExhaustedError, match="this client"):
        admission.visit("a")
    async with admission.visit("d"):
        with pytest.raises(ResourceExhaustedError, match="all slots"):
            async with slow[0]:
                raise AssertionError("it has a place")
    for visit in slow:
        visit.end()
        visit.end()
    async with admission.visit("a") as visit, visit.slot(1):
        pass
    assert empty(admission)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_comes_and_goes_nothing_is_left(seed):
    rng = random.Random(seed)
    capacity, most_tokens = rng.randint(1, 5), rng.choice([0, 30])
    admission = admission_of(
        lambda: capacity,
        max_concurrent_per_client=3,
        max_waiting=6,
        max_outstanding_tokens=most_tokens,
    )
    outcomes = []

    async def one() -> None:
        await asyncio.sleep(rng.random() * 0.05)
        deadline = asyncio.get_running_loop().time() + rng.random() * 0.1
        client = rng.choice("abcd")
        async with admission.visit(client, rng.choice([None, deadline])) as visit:
            await asyncio.sleep(rng.choice([0, 0.002]))
            tokens = rng.randint(1, 40)
            async with visit.slot(tokens):
                assert 0 < admission.active <= 5
                assert not most_tokens or admission.outstanding_tokens <= most_tokens
                for used in range(0, tokens, 7):
                    visit.used(used)
                    await asyncio.sleep(rng.random() * 0.003)
        outcomes.append(client)

    tasks = [asyncio.create_task(one()) for _ in range(60)]
    for _ in range(30):
        await asyncio.sleep(0.003)
        capacity = rng.randint(1, 5)
        rng.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    unexpected = (ResourceExhaustedError, DeadlineExceededError, asyncio.CancelledError)
    assert all(r is None or isinstance(r, unexpected) for r in results), results
    assert outcomes
    assert empty(admission)
    assert admission._arriving == admission._queued_tokens == 0
    for client in "abcd":  # nothing of theirs is under way
        async with admission.visit(client), admission.visit(client), admission.visit(client):
            pass


def client_of(peer="ipv4:10.0.0.7:4711", **metadata):
    pairs = tuple((key.replace("_", "-"), value) for key, value in metadata.items())
    context = SimpleNamespace(
        invocation_metadata=lambda: pairs, peer=lambda: peer, time_remaining=lambda: None
    )
    return caller_of(context).client


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B::1%5D:50050", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2:ffff::9%5D:2", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:4711", "10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::/64"),
        ("unix:/run/socket", "unix"),
        ("unix:", "unix"),
        ("ipv4:nonsense", "nonsense"),
        ("", ""),
    ],
)
def test_addresses(peer, address):
    assert address_of(peer) == address


def test_a_client_is_what_it_says_or_else_its_address():
    assert client_of() == "10.0.0.7"
    assert client_of(flyspec_client_id="") == "10.0.0.7"
    assert client_of(other="x", flyspec_client_id="batch") == "id:batch"
    # A name that looks like an address is not that address.
    assert client_of(flyspec_client_id="10.0.0.7") != client_of()
    with pytest.raises(InvalidArgumentError, match="flyspec-client-id: at most 128"):
        client_of(flyspec_client_id="x" * 129)


def test_requests_at_once():
    limits = ClientLimits(max_concurrent=2)
    limits.enter("a", 3.0)
    limits.enter("a", 3.0)
    limits.enter("b", 3.0)
    with pytest.raises(
        ResourceExhaustedError, match=r"concurrent requests .*\(2 running"
    ) as caught:
        limits.enter("a", 3.0)
    assert caught.value.retry_after_s == 3.0
    limits.leave("a")
    limits.enter("a", 3.0)


def test_requests_a_minute():
    clock = Clock()
    limits = ClientLimits(max_per_minute=6, clock=clock)
    for _ in range(6):
        limits.enter("a", 1.0)
        limits.leave("a")
    with pytest.raises(ResourceExhaustedError, match="6 requests per minute") as caught:
        limits.enter("a", 1.0)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    limits.enter("b", 1.0)
    clock.now += 9.9
    with pytest.raises(ResourceExhaustedError) as caught:
        limits.enter("a", 1.0)
    assert caught.value.retry_after_s == pytest.approx(0.1)
    clock.now += 0.11
    limits.enter("a", 1.0)
    clock.now += 3600
    for _ in range(6):  # no more than a minute's is saved up
        limits.enter("a", 1.0)
    with pytest.raises(ResourceExhaustedError):
        limits.enter("a", 1.0)


def test_a_refused_request_costs_nothing():
    limits = ClientLimits(max_concurrent=1, max_per_minute=2, clock=Clock())
    limits.enter("a", 1.0)
    for _ in range(10):
        with pytest.raises(ResourceExhaustedError, match="too many concurrent"):
            limits.enter("a", 1.0)
    limits.leave("a")
    limits.enter("a", 1.0)


def test_memory_is_bounded_whatever_names_are_sent(monkeypatch):
    monkeypatch.setattr(module, "MAX_IDLE_CLIENTS", 50)
    limits = ClientLimits(max_concurrent=1, max_per_minute=1, clock=Clock())
    limits.enter("busy", 1.0)
    for i in range(1000):
        limits.enter(f"name {i}", 1.0)
        limits.leave(f"name {i}")
    with pytest.raises(ResourceExhaustedError):  # who is busy is not forgotten
        limits.enter("busy", 1.0)
    with pytest.raises(ResourceExhaustedError):  # nor are the latest
        limits.enter("name 999", 1.0)
    limits.enter("name 1", 1.0)

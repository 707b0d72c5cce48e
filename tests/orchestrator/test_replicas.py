"""Replicas: which are chosen, watched and disconnected."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from flyspec.errors import (
    ConfigError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.values.admin import BreakerState, ProcessInfo
from orchestrator.fleet import replicas
from orchestrator.fleet.breaker import HUNG_FIRST_S, Breaker
from orchestrator.fleet.discovery import Addresses
from orchestrator.fleet.replicas import Pool
from orchestrator.upstreams.protocol import SilentError
from tests.waiting import until


class Session:
    """One that can be ended."""

    def __init__(self):
        self.cuts = 0

    def close(self):
        self.cuts += 1


class Said(str):
    """A service's description: "fine", and its process."""

    process = ProcessInfo("one")


class Service:
    """Gives scripted answers."""

    def __init__(self, address, says):
        self.address, self._says, self.closed = address, says, False
        self.reconnects = self.asked = 0

    async def describe(self, timeout_s):
        self.asked += 1
        await asyncio.sleep(0)
        answer = self._says.get(self.address, "fine")
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Said) else Said(answer)

    async def reconnect(self):
        self.reconnects += 1

    async def close(self):
        self.closed = True


async def works(replica):
    """A trial that succeeds."""
    return 7


def pool_of(spec, says=None, interval_s=0.005, rest_s=0.001, trial=works):
    says = {} if says is None else says

    async def accept(service, info):
        return "" if info == "fine" else f"it is {info}"

    return Pool(
        "services",
        Addresses(spec, "--x"),
        lambda address, name: Service(address, says),
        accept,
        lambda: Breaker(rest_s, 10 * rest_s),
        interval_s,
        trial=trial,
    )


@pytest.fixture
async def started():
    """Starts pools, and closes them in the end."""
    pools = []

    async def start(spec, *args, **options):
        pools.append(pool_of(spec, *args, **options))
        await pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        await pool.close()


async def test_prompts_that_begin_alike_share_a_replica_until_it_is_busy(started):
    pool = await started("a:1,b:1,c:1")
    chosen = {pool.choose([7, n], 1).address for n in range(40)}
    assert chosen == {"a:1", "b:1", "c:1"}
    prompt = list(range(300))
    home = pool.choose(prompt, 10)
    assert all(pool.choose([*prompt[:128], n], 10) is home for n in range(20))
    home.join(Session(), 100)
    other = pool.choose(prompt, 10)
    assert other is not home
    assert pool.choose(prompt, 10, [other]) not in (other, home)


async def test_work_is_counted_while_a_session_lasts(started):
    pool = await started("a:1")
    (replica,) = pool.replicas
    sessions = [Session() for _ in range(3)]
    for weight, session in enumerate(sessions, 1):
        replica.join(session, weight)
    assert replica.outstanding == 6
    replica.leave(sessions[1])
    replica.leave(sessions[1])
    assert (replica.outstanding, len(replica.sessions)) == (4, 2)


async def test_one_that_refuses_calls_gets_nothing_new_and_keeps_what_it_has(started):
    says = {}
    pool = await started("a:1,b:1", says)
    session = Session()
    (a, b) = pool.replicas
    a.join(session, 1)
    says["a:1"] = UnavailableError("shutting down")
    await until(lambda: not a.usable)
    assert "shutting down" in a.problem
    assert pool.choose([1], 1) is b
    assert session.cuts == 0
    del says["a:1"]
    await until(lambda: a.usable)


async def test_one_that_hangs_is_cut_after_two_silences(started):
    says = {}
    pool = await started("a:1", says)
    (a,) = pool.replicas
    session = Session()
    a.join(session, 1)
    says["a:1"] = SilentError("did not answer in time")
    await until(lambda: a.misses)
    await until(lambda: session.cuts)
    assert a.misses >= replicas.MISSES
    assert not a.usable
    await until(lambda: a.service.reconnects >= 3)  # it may be the connection that is lost
    times = 1 + (a.misses - replicas.MISSES) / replicas.RECONNECT_MISSES
    assert times - 1 <= a.service.reconnects <= times + 1
    del says["a:1"]
    await until(lambda: a.usable)
    assert a.misses == 0


async def test_one_that_does_not_fit_is_not_used_and_says_why(started):
    says = {"a:1": "another model"}
    pool = await started("a:1", says)
    assert pool.choose([1], 1) is None
    assert pool.replicas[0].problem == "it is another model"
    says["a:1"] = "fine"
    await pool.changed(5.0)
    assert pool.choose([1], 1) is pool.replicas[0]


async def test_replicas_join_and_leave(monkeypatch):
    monkeypatch.setattr(replicas, "DISCOVER_S", 0.005)
    pool = pool_of("dns:///name:1")
    found = ["a:1", "b:1"]

    async def find():
        return list(found)

    pool._sources[0].find = find
    await pool.start()
    a, _ = pool.replicas
    session = Session()
    a.join(session, 1)
    found[:] = ["b:1", "c:1"]
    await until(lambda: [r.address for r in pool.usable] == ["b:1", "c:1"])
    assert a in pool.replicas, "its session goes on"
    a.leave(session)
    await until(lambda: a not in pool.replicas)
    assert a.service.closed
    await pool.close()


async def test_a_failure_in_a_session_is_looked_after_at_once(started):
    pool = await started("a:1", interval_s=60.0)
    (a,) = pool.replicas
    a.failed(UnavailableError("lost"))
    assert not a.usable
    await until(lambda: a.usable)


async def test_one_that_was_silent_rests_for_longer(started):
    pool = await started("a:1", interval_s=60.0)
    (a,) = pool.replicas
    for number in range(3):
        before = time.monotonic()
        a.failed(SilentError("did not answer in time"))
        assert a.breaker.retry_at >= before + HUNG_FIRST_S * 2**number / 2
        a.breaker.retry_at = 0.0  # its rest is over
        a.breaker.answered(time.monotonic())


@pytest.mark.parametrize("number", [1, 5])
async def test_the_watch_goes_on_whatever_a_service_says(number, started):
    says = {"a:1": RuntimeError("a bug")}
    with pytest.raises(RuntimeError):
        await pool_of("a:1", says).start()
    says.clear()
    pool = await started("a:1", says)
    for _ in range(number):
        says["a:1"] = RuntimeError("a bug")
        asked = pool.replicas[0].service.asked
        await until(lambda: pool.replicas[0].service.asked > asked + 1)  # noqa: B023
        says["a:1"] = "unwell"
        await until(lambda: pool.replicas[0].problem == "it is unwell")
        says["a:1"] = "fine"
        await until(lambda: pool.replicas[0].usable)


@pytest.mark.parametrize("error", [UnavailableError("connection refused"), RuntimeError("a bug")])
async def test_one_that_hung_and_then_fails_otherwise_is_not_asked_without_rest(started, error):
    says = {"a:1": SilentError("did not answer in time")}
    pool = await started("a:1", says, interval_s=60.0, rest_s=60.0)
    (a,) = pool.replicas
    await until(lambda: a.misses)
    says["a:1"] = error
    asked = a.service.asked
    await until(lambda: a.service.asked > asked)
    for _ in range(100):  # turns of the loop; without rest it is asked every few
        await asyncio.sleep(0)
    assert a.service.asked <= asked + 2


async def test_a_trial_that_ends_without_outcome_makes_room_for_another(started):
    pool = await started("a:1", interval_s=60.0, trial=None)
    (a,) = pool.replicas
    a.failed(UnavailableError("lost"))
    await until(lambda: a.usable)
    first, second = Session(), Session()
    a.join(first, 1)
    assert not a.usable, "one trial at a time"
    a.leave(first)
    assert a.usable
    a.join(second, 1)
    assert not a.usable
    a.breaker.succeeded()
    a.leave(second)
    assert a.usable


async def test_one_that_nobody_uses_is_tried_by_its_watcher(started):
    """Else it would stay on trial until a session comes, and admit only that one."""
    says, fails, tried = {"a:1": SilentError("busy")}, [], []

    async def trial(replica):
        assert not replica.usable, "one trial at a time"
        tried.append(replica.address)
        if fails:
            raise fails.pop()
        return 7

    pool = await started("a:1", says, trial=trial)
    (a,) = pool.replicas
    assert not tried
    del says["a:1"]
    await until(lambda: a.breaker.state is BreakerState.CLOSED)
    assert (tried, a.trial_ns) == (["a:1"], 7)
    fails += [SilentError("too late"), UnavailableError("lost")]
    a.failed(UnavailableError("lost"))
    await until(lambda: a.reason == "too late")
    a.breaker.retry_at = 0.0  # its rest is over
    a.disturbed.set()
    await until(lambda: a.breaker.state is BreakerState.CLOSED)
    assert (len(tried), a.reason) == (4, "")


async def test_one_that_is_full_is_not_at_fault_and_one_that_cannot_is_not_used(started):
    errors = [InvalidArgumentError("it cannot"), ResourceExhaustedError("all sessions are in use")]

    async def trial(replica):
        if errors:
            raise errors.pop()
        return 7

    pool = await started("a:1", interval_s=60.0, trial=trial)
    (a,) = pool.replicas
    assert a.usable, "a session may try it"
    assert a.breaker.state is BreakerState.HALF_OPEN
    await pool.refresh()
    assert a.problem == "a:1 refuses to work: it cannot"
    await pool.refresh()
    assert a.breaker.state is BreakerState.CLOSED


async def test_what_a_process_did_wrong_is_forgotten_with_it(started):
    says = {}
    pool = await started("a:1", says)
    (a,) = pool.replicas
    while not a.breaker.is_out:
        a.faulted("it said something wrong")
        await until(lambda: a.usable or a.breaker.is_out)
    assert "out for" in a.reason
    other = Said("fine")
    other.process = ProcessInfo("another")
    says["a:1"] = other
    await until(lambda: a.usable)


async def test_a_list_is_taken_as_it_is_each_once():
    addresses = Addresses("a:1, b:2,[::1]:3,a:1", "--x")
    assert await addresses.find() == ["a:1", "b:2", "[::1]:3"]
    assert not addresses.changes


@pytest.mark.parametrize(
    "spec", ["", ",", "a", "a:", "a:0", "a:65536", "::1:5", "dns:///a", "a b:1"]
)
def test_what_cannot_be_read_names_the_flag_and_says_what_to_give(spec):
    with pytest.raises(ConfigError, match=r"--x: .*host:port"):
        Addresses(spec, "--x")


async def test_a_name_stands_for_all_its_addresses_and_keeps_them_while_dns_fails(monkeypatch):
    answers = [["10.0.0.1", "10.0.0.2"], OSError("no answer"), ["10.0.0.2", "fd00::3"]]

    async def getaddrinfo(host, port, **_):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    addresses = Addresses("dns:///draft:50051,x:1", "--x")
    assert addresses.changes
    assert await addresses.find() == ["x:1", "10.0.0.1:50051", "10.0.0.2:50051"]
    assert await addresses.find() == ["x:1", "10.0.0.1:50051", "10.0.0.2:50051"]
    assert await addresses.find() == ["x:1", "10.0.0.2:50051", "[fd00::3]:50051"]

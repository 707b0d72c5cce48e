"""Named drafters: the operator's commands, and which generation gets which drafter."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flyspec.drafter_names import LOOKUP
from flyspec.errors import (
    AlreadyExistsError,
    IncompatibleError,
    InvalidArgumentError,
    NotFoundError,
    StateError,
    UnavailableError,
)
from flyspec.values.admin import DrafterInfo, DrafterState, ProcessInfo
from flyspec.values.rounds import SessionStatus
from orchestrator.fleet.breaker import Breaker
from orchestrator.fleet.discovery import Addresses
from orchestrator.fleet.drafters import Drafters
from orchestrator.fleet.replicas import Pool
from tests.waiting import until

OFFERED = (DrafterInfo("model", "model"), DrafterInfo("multi_level", "multi_level"))


class Service:
    """A draft service; `down` ones do not answer."""

    def __init__(self, address, down):
        self.address, self._down = address, down

    async def describe(self, timeout_s):
        if self.address in self._down:
            raise UnavailableError(f"{self.address} is down")
        return SimpleNamespace(
            drafters=OFFERED,
            sessions=SessionStatus(0, 8),
            max_speculative_tokens=64,
            process=ProcessInfo(),
        )

    async def reconnect(self):
        pass

    async def close(self):
        pass


class Fleet:
    """Drafters over services that answer, and the trials of each."""

    def __init__(self):
        self.down: set[str] = set()
        self.tried: list[tuple[str, str]] = []
        self.refuse = ""
        self.drafters = Drafters(self.pool)

    def pool(self, address, name, kind=""):
        async def accept(service, info):
            return ""

        async def trial(replica):
            if self.refuse:
                raise UnavailableError(self.refuse)
            self.tried.append((replica.address, kind))
            return 7

        def connect(address, _):
            return Service(address, self.down)

        addresses = Addresses(address, "address")
        return Pool(name, addresses, connect, accept, Breaker, 0.01, trial=trial)


@pytest.fixture
async def fleet():
    fleet = Fleet()
    pool = fleet.pool("own:1", "own")
    await pool.start()
    fleet.drafters.adopt(pool, OFFERED)
    yield fleet
    await fleet.drafters.close()


async def test_the_services_first_drafter_is_the_default_and_lookup_is_always_there(fleet):
    drafters = fleet.drafters
    assert [d.name for d in drafters.all] == ["model", "multi_level", LOOKUP]
    assert drafters.assign("") is drafters.get("model")
    assert drafters.assign("multi_level").kind == "multi_level"
    drafters.check(LOOKUP)
    with pytest.raises(NotFoundError, match=r"speculation.drafter: no drafter 'x'; choose from"):
        drafters.check("x")


async def test_a_life(fleet):
    """Registered, given a share, activated, replaced, drained, removed."""
    drafters = fleet.drafters
    drafter, probe_ns = await drafters.register("new", "new:1,new:2", "")
    assert (drafter.kind, probe_ns) == ("model", 7)
    assert fleet.tried == [("own:1", ""), ("new:1", ""), ("new:2", "")]
    assert drafters.assign("new") is drafter
    assert drafters.assign("").name == "model"

    drafters.activate("new", 0.2)
    assert drafter.state is DrafterState.CANARY
    names = [drafters.assign("").name for _ in range(100)]
    assert names.count("new") == 20
    assert all(names[i : i + 5].count("new") == 1 for i in range(0, 100, 5)), "evenly"

    old = drafters.get("model")
    assert drafters.current(old, by_name=False) is old
    drafters.activate("new", None)
    assert (drafters.active, old.state) == (drafter, DrafterState.REGISTERED)
    assert drafters.current(old, by_name=False) is drafter, "running ones move over"
    assert drafters.current(old, by_name=True) is old, "but not who asked for it by name"

    user = object()
    old.users.add(user)
    with pytest.raises(StateError, match="drain it first, or use force"):
        await drafters.remove("model", force=False)
    await drafters.drain("model", 0.0)
    assert drafters.current(old, by_name=True) is drafter
    with pytest.raises(StateError, match="is draining"):
        drafters.check("model")
    waiting = asyncio.create_task(drafters.drain("model", 30.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    old.users.discard(user)
    await waiting
    await drafters.remove("model", force=False)
    assert "model" not in [d.name for d in drafters.all]
    assert drafters.current(old, by_name=False) is drafter
    assert old.pool.usable, "multi_level still uses the connection"


async def test_the_active_one_stays(fleet):
    drafters = fleet.drafters
    for step in (drafters.drain("model", 0.0), drafters.remove("model", True)):
        with pytest.raises(StateError, match="activate another first"):
            await step
    with pytest.raises(StateError, match="is active; activate another first"):
        drafters.activate("model", 0.5)


async def test_a_share_is_a_share(fleet):
    drafters = fleet.drafters
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidArgumentError, match="between 0 and 1"):
            drafters.activate("multi_level", share)
    drafters.activate("multi_level", 0.7)
    await drafters.register("new", "new:1", "")
    with pytest.raises(InvalidArgumentError, match=r"already have 0\.7; at most 0\.3"):
        drafters.activate("new", 0.4)
    drafters.activate("multi_level", 0.0)
    assert drafters.get("multi_level").state is DrafterState.REGISTERED
    assert {drafters.assign("").name for _ in range(20)} == {"model"}


async def test_what_cannot_draft_is_not_registered(fleet):
    drafters = fleet.drafters
    fleet.down.add("gone:1")
    with pytest.raises(UnavailableError, match="gone:1 is down"):
        await drafters.register("a", "gone:1", "")
    with pytest.raises(NotFoundError, match="no drafter 'eagle'; choose from model, multi_level"):
        await drafters.register("a", "new:1", "eagle")
    fleet.refuse = "it drafts nonsense"
    with pytest.raises(IncompatibleError, match="cannot draft for this target: it drafts nonsense"):
        await drafters.register("a", "new:1", "")
    for name in ("", "a b", "x" * 65, "ä"):
        with pytest.raises(InvalidArgumentError, match="letters, digits"):
            await drafters.register(name, "new:1", "")
    assert [d.name for d in drafters.all] == ["model", "multi_level", LOOKUP]


async def test_a_known_name_gets_another_replica(fleet):
    drafters = fleet.drafters
    drafter, _ = await drafters.register("new", "new:1", "")
    again, _ = await drafters.register("new", "new:2", "model")
    assert again is drafter
    assert [r.address for r in drafter.pool.usable] == ["new:1", "new:2"]
    with pytest.raises(AlreadyExistsError, match="already exists with kind model"):
        await drafters.register("new", "new:3", "multi_level")
    with pytest.raises(AlreadyExistsError, match="already has address new:2"):
        await drafters.register("new", "new:2", "")
    fleet.refuse = "it drafts nonsense"
    with pytest.raises(IncompatibleError):
        await drafters.register("new", "new:4", "")
    assert [r.address for r in drafter.pool.replicas] == ["new:1", "new:2"]


async def test_who_may_stand_in(fleet):
    drafters = fleet.drafters
    new, _ = await drafters.register("new", "new:1", "")
    own = drafters.get("model")
    assert [d.name for d in drafters.ladder(new)] == ["new", "model", "multi_level"]
    fleet.down.add("own:1")
    await own.pool.refresh()
    assert [d.name for d in drafters.ladder(own)] == ["new"]
    assert own.reason == "own:1 is down"
    fleet.down.clear()
    new.state = DrafterState.DRAINING
    await until(lambda: own.pool.usable)
    assert [d.name for d in drafters.ladder(own)] == ["model", "multi_level"]

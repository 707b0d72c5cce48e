"""A generation's drafts when drafters are lost, hang, send nonsense, return, or are swapped."""

from __future__ import annotations

import asyncio

import pytest

from flyspec.errors import InvalidArgumentError
from flyspec.prefix import TokenSequence
from flyspec.values.generation import RecoveryKind
from flyspec.values.rounds import DraftAdvance
from orchestrator.fleet.breaker import Breaker
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.ledger import Ledger
from orchestrator.upstreams.draft import GrpcDraftSession
from tests.orchestrator.fakes import FakeDraft, Offer, plan_of
from tests.orchestrator.pools import TARGET, registry_of
from tests.orchestrator.world import World

WORLD = World(seed=1, eos_share=0.0)
PROMPT = [3, 4, 5, 3, 4]


class Draft(FakeDraft):
    """A draft service that fails on command."""

    def __init__(self, address):
        super().__init__(WORLD, Offer(4))
        self.address, self.timeout_s = address, 0.2
        self.fails = ""
        make = self.stub.Draft

        def call(metadata=()):
            stream = make()
            write, read = stream.write, stream.read

            async def failing_write(message):
                if self.fails == "lost":
                    raise asyncio.InvalidStateError
                await write(message)

            async def failing_read():
                if self.fails == "hangs":
                    await asyncio.sleep(30)
                return await read()

            stream.write, stream.read = failing_write, failing_read
            return stream

        self.stub.Draft = call

    def alter(self, answers):
        for chunk in answers:
            if self.fails == "wrong round":
                chunk.round_id += 1
            if self.fails == "wrong ids" and chunk.token_ids:
                chunk.token_ids[0] = 5_000_000
            if self.fails == "too many" and chunk.last:
                chunk.token_ids.extend([3] * 70)
                chunk.origins.extend([1] * 70)


class Generation:
    """Drafting round after round; every proposal is accepted."""

    def __init__(self, registry, by_name=""):
        self.ledger = Ledger()
        plan = plan_of(prompt_token_ids=PROMPT, drafter=by_name)
        self.drafting = Drafting(registry, plan, TARGET, self.ledger)
        self.sequence = TokenSequence(PROMPT)
        self.round_id = 0

    async def round(self):
        """Return who drafted; the drafts and a bonus token join the sequence."""
        self.round_id += 1
        request = DraftAdvance(self.round_id, 0, (), 4)
        proposal = await self.drafting.propose(self.sequence.tokens.copy(), request)
        self.drafting.record(proposal.drafter, len(proposal.token_ids), 0, 1, 1)
        self.sequence.extend([*proposal.token_ids, 6])
        return proposal.drafter

    @property
    def kinds(self):
        return [r.kind for r in self.ledger.recoveries.kept]


def registry(*names, breaker=None):
    """Drafters with these names, each with its own service; the first is the default."""
    make = breaker or (lambda: Breaker(10.0, 10.0, jitter=lambda: 0.0))
    services = [Draft(name) for name in names]
    drafters = registry_of(services[0], breaker=make)
    drafters._drafters = {names[0]: drafters.active}
    drafters.active.name = names[0]
    for name, service in zip(names[1:], services[1:], strict=True):
        other = registry_of(service, breaker=make).active
        other.name, other.state = name, type(other.state).REGISTERED
        drafters._drafters[name] = other
    return drafters, services


@pytest.mark.parametrize("fails", ["lost", "hangs", "wrong round", "wrong ids", "too many"])
async def test_the_next_drafter_takes_over_and_gives_way_when_the_first_is_back(fails):
    drafters, (one, _) = registry("one", "two")
    generation = Generation(drafters)
    assert await generation.round() == "one"
    one.fails = fails
    # Who hung used up the round's time: prompt lookup here, then the next drafter.
    later = [await generation.round() for _ in range(3)]
    assert later == (["prompt_lookup"] if fails == "hangs" else ["two"]) + ["two"] * 2
    (replica,) = drafters.get("one").pool.replicas
    assert not replica.usable
    one.fails = ""
    replica.breaker.answered(float("inf"))
    assert [await generation.round() for _ in range(2)] == ["one", "one"]
    expected = [RecoveryKind.DRAFTER_REPLACED, RecoveryKind.DRAFTER_RESTORED]
    if fails == "hangs":
        expected.insert(0, RecoveryKind.DRAFTER_FALLBACK)
    assert generation.kinds == expected
    assert not replica.breaker.retry_at < 0
    generation.drafting.close()
    assert not any(d.users for d in drafters.all)
    assert not any(r.sessions for d in drafters.all if d.pool for r in d.pool.replicas)


async def test_a_lost_stream_is_opened_again_at_the_same_drafter():
    drafters, (one, two) = registry("one", "two")
    generation = Generation(drafters)
    await generation.round()
    for kind in ("write", "read"):
        one.break_at(kind)
        assert await generation.round() == "one"
    assert generation.kinds == [RecoveryKind.DRAFTER_REOPENED] * 2
    assert (one.opened, two.opened) == (3, 0)


async def test_another_replica_of_the_same_drafter_comes_first():
    services = [Draft("a"), Draft("b")]
    drafters = registry_of(*services, breaker=lambda: Breaker(10.0, 10.0))
    generation = Generation(drafters)
    await generation.round()
    (busy,) = [s for s in services if s.opened]
    busy.fails = "lost"
    assert await generation.round() == "model"
    assert all(s.opened for s in services)
    assert generation.kinds == [RecoveryKind.DRAFTER_REOPENED]


async def test_without_any_drafter_prompt_lookup_here_goes_on():
    drafters, (one,) = registry("one")
    one.fails = "lost"
    generation = Generation(drafters)
    assert [await generation.round() for _ in range(3)] == ["prompt_lookup"] * 3
    assert generation.kinds == [RecoveryKind.DRAFTER_FALLBACK], "told once"
    assert drafters.get("one").stats.failures_total == 3, "not asked again while its breaker rests"


async def test_only_one_generation_tries_a_drafter_that_failed():
    drafters, (one,) = registry("one")
    generations = [Generation(drafters) for _ in range(5)]
    one.fails = "hangs"
    await asyncio.gather(*(g.round() for g in generations))
    (replica,) = drafters.get("one").pool.replicas
    replica.breaker.answered(float("inf"))
    opened = one.opened
    one.fails = "lost"
    names = await asyncio.gather(*(g.round() for g in generations))
    assert names == ["prompt_lookup"] * 5
    assert one.opened == opened
    failed = drafters.get("one").stats.failures_total
    assert failed == 5 + 1, "one generation, once"
    assert not replica.usable


async def test_the_operator_moves_generations_but_not_those_that_asked_by_name():
    drafters, _ = registry("one", "two")
    free, bound = Generation(drafters), Generation(drafters, by_name="one")
    for generation in (free, bound):
        assert await generation.round() == "one"
    drafters.activate("two", None)
    assert (await free.round(), await bound.round()) == ("two", "one")
    assert free.kinds == [RecoveryKind.DRAFTER_SWAPPED]
    await drafters.drain("one", 0.0)
    assert await bound.round() == "two"
    assert bound.kinds == [RecoveryKind.DRAFTER_SWAPPED]
    assert not drafters.get("one").users
    await drafters.remove("one", force=False)
    assert (await free.round(), await bound.round()) == ("two", "two")


async def test_a_drafter_that_refuses_the_sequence_is_not_asked_again(monkeypatch):
    drafters, (one, two) = registry("one", "two")
    generation = Generation(drafters)
    await generation.round()
    refusal = InvalidArgumentError("the drafter holds 5 tokens")
    original = GrpcDraftSession.propose

    async def refuse(self, *args):
        if self._upstream is one:
            raise refusal
        return await original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(GrpcDraftSession, "propose", refuse)
        assert [await generation.round() for _ in range(2)] == ["two", "two"]
    (replica,) = drafters.get("one").pool.replicas
    assert replica.usable, "others may use it"
    assert await generation.round() == "two"
    assert two.opened == 1


async def test_a_replica_that_takes_nothing_new_is_left_if_there_is_another():
    services = [Draft("a"), Draft("b")]
    drafters = registry_of(*services, breaker=lambda: Breaker(10.0, 10.0))
    generation = Generation(drafters)
    await generation.round()
    replicas = drafters.get("model").pool.replicas
    (busy,) = [r for r in replicas if r.sessions]
    busy.problem = "it drains"
    await generation.round()
    assert not busy.sessions
    (other,) = [r for r in replicas if r.sessions]
    other.problem = "it drains too"
    await generation.round()
    assert other.sessions, "none takes anything: it stays while it is served"

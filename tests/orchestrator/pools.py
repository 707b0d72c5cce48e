"""Pools of services in this process, not watched, since the fakes are always available."""

from __future__ import annotations

from types import SimpleNamespace

from flyspec.values.admin import DrafterInfo, ModelInfo
from flyspec.values.rounds import SessionStatus
from orchestrator.fleet.breaker import Breaker
from orchestrator.fleet.discovery import Addresses
from orchestrator.fleet.drafters import Drafters
from orchestrator.fleet.replicas import Pool, Replica

TARGET = ModelInfo("target", "", 1000, 256)
INFO = SimpleNamespace(
    model=TARGET,
    drafters=(DrafterInfo("model", "model", ModelInfo("draft", "", 1000, 256)),),
    sessions=SessionStatus(0, 16),
    max_speculative_tokens=1000,
    judge=None,
)


class Instant(Breaker):
    """A breaker that admits everything: the fakes recover from failures at once."""

    def allows(self, now: float) -> bool:
        return True


def pool_of(*services, breaker=Instant, info=INFO) -> Pool:
    """A pool of these services, all usable."""

    async def accept(service, info):
        return ""

    pool = Pool("fakes", Addresses("fake:1", "fakes"), lambda address, name: services[0], accept)
    for index, service in enumerate(services):
        replica = Replica(service, breaker())
        replica.info, replica.problem = info, ""
        replica.breaker.succeeded()
        pool._replicas[f"{service.address}-{index}"] = replica
    return pool


def registry_of(*services, breaker=Instant) -> Drafters:
    """Drafters whose default is `model` at these services."""
    drafters = Drafters(lambda address, name, kind: pool_of(*services))
    drafters.adopt(pool_of(*services, breaker=breaker), INFO.drafters)
    return drafters

"""A stack whose metrics, logs and spans tests can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flyspec.cli.stack import Stack
from tests.observability.scraping import Scrape, scrape
from tests.waiting import until

SERVICES = ("orchestrator", "draft", "verify")


@dataclass
class Observed:
    """A stack, what it logged so far, and where its spans go."""

    stack: Stack
    logs: list[str]
    traces: dict[str, Path]

    def port(self, service: str) -> int:
        """Where a service's metrics are."""
        return self.stack.services[service].facts["metrics_port"]

    def scrape(self, service: str) -> Scrape:
        """A service's metrics now."""
        return scrape(self.port(service))

    async def at_rest(self) -> dict[str, Scrape]:
        """Every service's metrics once no call to the orchestrator and no session is left.

        A client has its completion a moment earlier.
        """

        def rests() -> dict[str, Scrape] | None:
            found = {service: self.scrape(service) for service in SERVICES}
            busy = found["orchestrator"].total("flyspec_rpc_open_calls")
            busy += sum(found[s].total(f"flyspec_{s}_sessions") for s in ("draft", "verify"))
            return None if busy else found

        return await until(rests)

    async def since(self, before: dict[str, Scrape], num_requests: int) -> Scrape:
        """What these requests added to the orchestrator's metrics."""
        added = (await self.at_rest())["orchestrator"].since(before["orchestrator"])
        assert added.total("flyspec_requests_total") == num_requests
        return added

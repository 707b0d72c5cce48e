"""Reads metrics as Prometheus does."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import until


class Scrape:
    """Samples of one scrape; `difference` returns what was added since an earlier one."""

    def __init__(self, samples: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
        self._samples = samples

    @property
    def names(self) -> set[str]:
        """Names of the samples."""
        return {name for name, _ in self._samples}

    def total(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels, over all others."""
        return sum(value for _, value in self.find(name, **labels))

    def find(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Samples with these labels, with all that they have."""
        for (found, pairs), value in self._samples.items():
            if found == name and frozenset(labels.items()) <= pairs:
                yield dict(pairs), value

    def values_of(self, label: str) -> set[str]:
        """All values of a label."""
        return {value for _, pairs in self._samples for key, value in pairs if key == label}

    def since(self, earlier: Scrape) -> Scrape:
        """Return what was added since."""
        return Scrape({k: v - earlier._samples.get(k, 0.0) for k, v in self._samples.items()})


def parse(text: str) -> Scrape:
    """Metrics in Prometheus' text format."""
    return Scrape(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


def scrape(port: int) -> Scrape:
    """Return the metrics at a local port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return parse(response.read().decode())


async def settled(registry: CollectorRegistry) -> Scrape:
    """Return a registry's metrics once answered calls have ended, a moment later."""

    def ended() -> Scrape | None:
        found = parse(generate_latest(registry).decode())
        return None if found.total("flyspec_rpc_open_calls") else found

    return await until(ended)

"""What pods and containers may take of their machine."""

from __future__ import annotations

import re

import pytest

from tests.deployment.rendered import OVERLAYS, all_pods, compose, container

UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def num_bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pods_disk_is_bounded_and_holds_its_volumes(overlay: str) -> None:
    """A pod that takes more than its limit is evicted, even if no volume is full."""
    for name, template in all_pods(overlay):
        resources = container(template)["resources"]
        volumes = [v["emptyDir"] for v in template["spec"]["volumes"] if "emptyDir" in v]
        on_disk = sum(num_bytes(v["sizeLimit"]) for v in volumes if v.get("medium") != "Memory")
        requested = num_bytes(resources["requests"]["ephemeral-storage"])
        limit = num_bytes(resources["limits"]["ephemeral-storage"])
        assert requested <= limit, name
        assert limit > on_disk, f"{name}: and logs"


def test_every_container_of_compose_has_a_limit_of_memory_and_processes() -> None:
    for name, service in compose("docker-compose.yml").items():
        assert re.fullmatch(r"(\$\{\w+:-)?\d+g\}?", service["mem_limit"]), name
        assert service["pids_limit"] > 0, name

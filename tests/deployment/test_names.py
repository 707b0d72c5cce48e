"""Every host name given to a container belongs to an object that exists when it is resolved."""

from __future__ import annotations

import re

import pytest

from tests.deployment.rendered import (
    OVERLAYS,
    compose,
    container,
    environment,
    matches,
    of_kind,
    pods,
)

HOST = re.compile(r"(?:dns:///|https?://)([\w.-]+):(\d+)")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_addresses_in_the_environment_are_services_with_pods_behind_them(overlay: str) -> None:
    known = {(o["metadata"]["namespace"], o["metadata"]["name"]): o["spec"]
             for o in of_kind(overlay, "Service")}  # fmt: skip
    templates, asked = [template for _, template in pods(overlay)], set()
    for template in templates:
        for value in environment(overlay, template).values():
            asked |= set(HOST.findall(value))
    for host, port in asked:
        name, namespace, *_ = [*host.split("."), "flyspec"]
        if namespace != "flyspec":
            assert namespace == "monitoring", host  # the only other one that pods may reach
            continue
        spec = known["flyspec", name]
        assert int(port) in [p["port"] for p in spec["ports"]], host
        assert any(matches(spec["selector"], template) for template in templates), host
    assert {"verify", "draft"} <= {host for host, _ in asked}


def test_ranks_find_their_leader_before_it_is_ready() -> None:
    """By the headless Service that the controller makes for a set, which lists pods that start.

    It makes none if there is a Service of the set's name.
    """
    services = {o["metadata"]["name"]: o["spec"] for o in of_kind("multi-node", "Service")}
    (workload,) = of_kind("multi-node", "LeaderWorkerSet")
    assert workload["metadata"]["name"] not in services
    assert workload["spec"]["networkConfig"] == {"subdomainPolicy": "Shared"}
    ranks = {name: t for name, t in pods("multi-node") if "verify" in name}
    assert len(ranks) == 2
    for template in ranks.values():
        assert "--master-addr=$(LWS_LEADER_ADDRESS)" in container(template)["args"]
    # Clients reach leaders alone, and only ready ones.
    assert not services["verify"].get("publishNotReadyAddresses")
    reached = [name for name, t in ranks.items() if matches(services["verify"]["selector"], t)]
    assert reached == [f"{workload['metadata']['name']}-leaderTemplate"]


def test_grafana_has_no_password_to_guess() -> None:
    told = compose("docker-compose.yml")["grafana"]["environment"]
    assert "GF_SECURITY_ADMIN_PASSWORD" not in told
    assert told["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert told["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert told["GF_AUTH_BASIC_ENABLED"] == "false"
    assert told["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"

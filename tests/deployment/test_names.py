"""Every host name given to a container belongs to an object that exists when it is resolved."""

from __future__ import annotations

import re
from functools import partial

import pytest

from tests.deployment import leader_worker_set
from tests.deployment.rendered import (
    OVERLAYS,
    Object,
    compose,
    environment,
    matches,
    of_kind,
    pods,
)

HOST = re.compile(r"(?:dns:///|https?://)([\w.-]+):(\d+)")


def _value(variables: dict[str, str], reference: re.Match[str]) -> str:
    return variables[reference[1]]


def services(overlay: str) -> dict[tuple[str, str], Object]:
    """Services by namespace and name, including those that a controller creates."""
    found = {(o["metadata"]["namespace"], o["metadata"]["name"]): o
             for o in of_kind(overlay, "Service")}  # fmt: skip
    for workload in of_kind(overlay, "LeaderWorkerSet"):
        for made in leader_worker_set.headless_services(workload):
            found.setdefault((made["metadata"]["namespace"], made["metadata"]["name"]), made)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_addresses_in_the_environment_are_services_with_pods_behind_them(overlay: str) -> None:
    known, asked = services(overlay), set()
    templates = [template for _, template in pods(overlay)]
    for template in templates:
        for value in environment(overlay, template).values():
            asked |= set(HOST.findall(value))
    for host, port in asked:
        name, namespace, *_ = [*host.split("."), "flyspec"]
        if namespace != "flyspec":
            assert namespace == "monitoring", host  # the only other one that pods may reach
            continue
        spec = known["flyspec", name]["spec"]
        assert int(port) in [p["port"] for p in spec["ports"]], host
        assert any(matches(spec["selector"], template) for template in templates), host
    assert {"verify", "draft"} <= {host for host, _ in asked}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ranks_find_their_leader_before_it_is_ready(overlay: str) -> None:
    known = services(overlay)
    for workload in of_kind(overlay, "LeaderWorkerSet"):
        made = list(leader_worker_set.pods(workload))
        named = {(p["metadata"]["name"], p["spec"]["subdomain"]): p for p in made}
        for pod in made:
            (own,) = pod["spec"]["containers"]
            variables = {v["name"]: v["value"] for v in own["env"]}
            told = [re.sub(r"\$\((\w+)\)", partial(_value, variables), a) for a in own["args"]]
            (address,) = (a.partition("=")[2] for a in told if a.startswith("--master-addr="))
            host, subdomain, namespace = address.split(".")
            leader = named[host, subdomain]
            service = known[namespace, subdomain]["spec"]
            assert service["clusterIP"] == "None"
            assert service.get("publishNotReadyAddresses"), f"{address} does not resolve at start"
            assert matches(service["selector"], leader)
        # Clients reach leaders alone, and only ready ones.
        spec = known["flyspec", "verify"]["spec"]
        assert not spec.get("publishNotReadyAddresses")
        reached = {p["metadata"]["name"] for p in made if matches(spec["selector"], p)}
        assert reached == {f"{workload['metadata']['name']}-0"}


def test_grafana_has_no_password_to_guess() -> None:
    told = compose("docker-compose.yml")["grafana"]["environment"]
    assert "GF_SECURITY_ADMIN_PASSWORD" not in told
    assert told["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert told["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert told["GF_AUTH_BASIC_ENABLED"] == "false"
    assert told["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"

"""Ports, selectors and host names: what can reach what, and where."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network

import pytest

from flyspec.config import ADMIN_PORT, DRAFT_PORT, GENERATION_PORT, HTTP_PORT, VERIFY_PORT
from flyspec.telemetry.service import DEFAULT_PORTS
from tests.deployment.rendered import (
    IN_THE_CLEAR,
    OVERLAYS,
    ROOT,
    Object,
    all_pods,
    component,
    compose,
    container,
    environment,
    matches,
    of_kind,
    pods,
)

PORTS = {
    "orchestrator": {
        "grpc": GENERATION_PORT,
        "http": HTTP_PORT,
        "admin": ADMIN_PORT,
        "metrics": DEFAULT_PORTS["orchestrator"],
    },
    "draft": {"grpc": DRAFT_PORT, "metrics": DEFAULT_PORTS["draft"]},
    "verify": {"grpc": VERIFY_PORT, "metrics": DEFAULT_PORTS["verify"]},
}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def ports(template: Object) -> dict[str, int]:
    return {p["name"]: p["containerPort"] for p in container(template).get("ports", [])}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_those_that_the_services_listen_on(overlay: str) -> None:
    for name, template in pods(overlay):
        if "worker" not in name:  # ranks that listen for nobody
            assert ports(template) == PORTS[component(template)], name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_ports_that_are_there(overlay: str) -> None:
    """By unencrypted gRPC, and by our own client where ports require TLS."""
    for name, template in pods(overlay):
        if "worker" in name:
            assert not set(PROBES) & set(container(template))
            continue
        for probe in (container(template)[kind] for kind in PROBES):
            if overlay in IN_THE_CLEAR:
                asked = probe["grpc"]["port"]
            else:
                assert "grpc" not in probe, name
                *command, address = probe["exec"]["command"]
                assert command == ["flyspec", "healthcheck", "--address"]
                asked = int(address.removeprefix("localhost:"))
            assert asked in ports(template).values(), name
        # An orchestrator that takes no requests is not dead.
        if component(template) == "orchestrator":
            assert str(ADMIN_PORT) in str(container(template)["livenessProbe"])
            assert str(GENERATION_PORT) in str(container(template)["readinessProbe"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_find_pods_and_their_ports(overlay: str) -> None:
    for service in of_kind(overlay, "Service"):
        name = service["metadata"]["name"]
        found = [t for _, t in pods(overlay) if matches(service["spec"]["selector"], t)]
        assert len(found) == 1, name
        for port in service["spec"]["ports"]:
            assert ports(found[0])[port["targetPort"]] == port["port"], name
        # The admin port is for operators: no Service leads to it.
        assert ADMIN_PORT not in [p["port"] for p in service["spec"]["ports"]]
    clients = {o["metadata"]["name"]: {p["name"]: p.get("appProtocol") for p in o["spec"]["ports"]}
               for o in of_kind(overlay, "Service")
               if "orchestrator" in o["metadata"]["name"]}  # fmt: skip
    clear = overlay in IN_THE_CLEAR
    for protocols in clients.values():
        assert protocols["grpc"] == ("kubernetes.io/h2c" if clear else None)
        assert protocols["http"] == ("http" if clear else "https")
    assert set(clients) == {"orchestrator", "orchestrator-headless"}
    headless = {o["metadata"]["name"] for o in of_kind(overlay, "Service")
                if o["spec"].get("clusterIP") == "None"}  # fmt: skip
    assert {"draft", "verify"} <= headless


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_selector_selects_a_pod(overlay: str) -> None:
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for o in of_kind(overlay, kind):
            spec = o["spec"]
            selector = (spec["selector"] if "selector" in spec else spec["podSelector"]).get(
                "matchLabels", {}
            )
            assert any(matches(selector, t) for _, t in all_pods(overlay)), o["metadata"]["name"]
    for _, template in pods(overlay):
        for spread in template["spec"].get("topologySpreadConstraints", []):
            assert matches(spread["labelSelector"]["matchLabels"], template)


def rules(overlay: str, pod: Object, direction: str) -> list[Object]:
    """What the policies of a pod let in or out."""
    policies = [
        p["spec"] for p in of_kind(overlay, "NetworkPolicy")
        if direction.title() in p["spec"]["policyTypes"]
        and matches(p["spec"]["podSelector"].get("matchLabels", {}), pod)
    ]  # fmt: skip
    assert policies, "every pod is under a policy"
    return [rule for policy in policies for rule in policy.get(direction, [])]


def allowed(overlay: str, target: Object, port: int, source: Object | None) -> bool:
    """True if the policies let a pod of the namespace, or an outsider, reach a port."""
    for rule in rules(overlay, target, "ingress"):
        if port not in [p["port"] for p in rule.get("ports", [{"port": port}])]:
            continue
        if "from" not in rule:
            return True
        for peer in rule["from"]:
            inside = "namespaceSelector" not in peer
            if inside and source and matches(peer["podSelector"]["matchLabels"], source):
                return True
    return False


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_orchestrator_reaches_draft_and_verify(overlay: str) -> None:
    templates = dict(pods(overlay))
    stranger: Object = {"metadata": {"labels": {"app.kubernetes.io/name": "flyspec"}}}
    ranks = "LeaderWorkerSet" in [o["kind"] for o in of_kind(overlay, "LeaderWorkerSet")]
    for target in templates.values():
        port = PORTS[component(target)]["grpc"]
        for source in [*templates.values(), stranger]:
            expected = (
                component(target) == "orchestrator"
                or source is templates["orchestrator"]
                or (ranks and source is not stranger
                    and component(source) == component(target) == "verify")
            )  # fmt: skip
            assert allowed(overlay, target, port, source) is expected
        assert allowed(overlay, target, port, None) is (component(target) == "orchestrator")
    for source in (None, stranger):
        assert allowed(overlay, templates["orchestrator"], HTTP_PORT, source)
        assert not allowed(overlay, templates["orchestrator"], ADMIN_PORT, source)


DNS = {
    "kube-dns or CoreDNS": ("kube-system", {"k8s-app": "kube-dns"}, 53),
    "NodeLocal DNSCache": ("kube-system", {"k8s-app": "node-local-dns"}, 53),
    "NodeLocal DNSCache on the host's network": ("", "169.254.20.10", 53),
    "OpenShift": ("openshift-dns", {"dns.operator.openshift.io/daemonset-dns": "default"}, 5353),
}
"""Where a cluster answers DNS: namespace, labels of the pods or their address, and port."""


def reaches(
    overlay: str,
    source: Object,
    namespace: str,
    peer: dict[str, str] | str,
    port: int,
    protocol: str,
) -> bool:
    """True if the policies let a pod reach pods of another namespace, or an address."""
    for rule in rules(overlay, source, "egress"):
        if "ports" in rule and {"protocol": protocol, "port": port} not in rule["ports"]:
            continue
        for to in rule["to"]:
            if isinstance(peer, str):
                block, address = to.get("ipBlock"), ip_address(peer)
                if block and address in ip_network(block["cidr"]) and not any(
                    address in ip_network(hidden) for hidden in block.get("except", [])
                ):  # fmt: skip
                    return True
            elif "namespaceSelector" in to:
                named = to["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
                if named == namespace and to["podSelector"]["matchLabels"].items() <= peer.items():
                    return True
    return False


@pytest.mark.parametrize("dns", DNS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_reach_dns_in_every_kind_of_cluster(overlay: str, dns: str) -> None:
    for name, template in all_pods(overlay):
        for protocol in ("UDP", "TCP"):
            assert reaches(overlay, template, *DNS[dns], protocol), name


@pytest.mark.parametrize("overlay", ["gpu", "multi-node"])
def test_only_the_download_of_models_reaches_the_internet(overlay: str) -> None:
    found = {name for name, template in all_pods(overlay)
             if reaches(overlay, template, "", "192.0.2.1", 443, "TCP")}  # fmt: skip
    assert found == {"model-download"}
    (download,) = (t for name, t in all_pods(overlay) if name in found)
    assert reaches(overlay, download, "", "2001:db8::1", 443, "TCP")
    assert not reaches(overlay, download, "", "192.0.2.1", 80, "TCP")
    # Not the cluster's own addresses, and not the metadata of the cloud's machine.
    for address in ("10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254", "fd00::1"):
        assert not reaches(overlay, download, "", address, 443, "TCP"), address
    for target in dict(pods(overlay)).values():
        if component(target) != "orchestrator":
            assert not allowed(overlay, target, PORTS[component(target)]["grpc"], download)


def test_compose_publishes_the_orchestrator_alone() -> None:
    published = {}
    for name, service in compose("docker-compose.yml").items():
        if "ports" in service:
            published[name] = service["ports"]
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    assert set(published) == {"orchestrator", "grafana"}
    address = "${FLYSPEC_PUBLISH:-127.0.0.1}"
    assert published["orchestrator"] == [
        *(f"{address}:{port}:{port}" for port in (GENERATION_PORT, HTTP_PORT)),
        f"127.0.0.1:{ADMIN_PORT}:{ADMIN_PORT}",
    ]
    assert all(port.startswith("127.0.0.1:") for port in published["grafana"])


def test_images_expose_and_ask_the_same_ports() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    for service, named in PORTS.items():
        stage = dockerfile.partition(f" AS {service}\n")[2].partition("\nFROM ")[0]
        (exposed,) = (line for line in stage.splitlines() if line.startswith("EXPOSE"))
        assert {int(p) for p in exposed.split()[1:]} == set(named.values())
        assert f'"localhost:{named["grpc"]}"' in stage
        if "http" in named:
            assert f"FLYSPEC_ORCHESTRATOR_HTTP_PORT={named['http']}\n" in stage


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

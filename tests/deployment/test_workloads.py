"""What manifests name exists: images, secrets, files, metrics; and what pods may take and need."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy import image_requirements
from deploy.check_manifests import KUBERNETES
from flyspec.rule_files import load_rules
from flyspec.version import __version__
from tests.deployment.rendered import (
    DEMOS,
    OVERLAYS,
    ROOT,
    SERVICES,
    all_pods,
    compose,
    container,
    kustomize,
    of_kind,
)

DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERIES_SUFFIX = re.compile(r"_(total|sum|count|bucket)$")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_targets_of_the_dockerfile(overlay: str) -> None:
    for name, template in all_pods(overlay):
        image, _, tag = container(template)["image"].partition(":")
        target = image.removeprefix("flyspec-")
        assert f" AS {target}\n" in DOCKERFILE, name
        assert tag.split("-")[0] == __version__
        with_models = target != "orchestrator"
        assert tag.endswith("-cuda") is (overlay not in DEMOS and with_models), name
        assert target.endswith("-demo") is (overlay in DEMOS and with_models), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_named_and_never_held(overlay: str) -> None:
    assert not of_kind(overlay, "Secret")
    made = {o["spec"]["secretName"] for o in of_kind(overlay, "Certificate")}
    for _, template in all_pods(overlay):
        named = {v["secret"]["secretName"] for v in template["spec"]["volumes"] if "secret" in v}
        by_hand = {"flyspec-api-keys", "flyspec-hub-token"}
        if overlay == "cpu-demo-tls":
            by_hand |= {f"{service}-tls" for service in SERVICES}
        assert named <= made | by_hand
        for volume in template["spec"]["volumes"]:
            if "secret" in volume:  # a subPath would never see a renewed certificate
                mounts = container(template)["volumeMounts"]
                assert all("subPath" not in m for m in mounts if m["name"] == volume["name"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_namespaces_want_restricted_pods_and_users_are_those_of_images(overlay: str) -> None:
    (namespace,) = of_kind(overlay, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, template in all_pods(overlay):
        pod = template["spec"]["securityContext"]
        assert re.search(rf"^USER {pod['runAsUser']}:", DOCKERFILE, re.MULTILINE), name
        mounts = {m["mountPath"] for m in container(template)["volumeMounts"]}
        (declared,) = re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)
        assert set(yaml.safe_load(declared)) <= mounts, name


def test_the_rules_file_can_be_read() -> None:
    load_rules(str(ROOT / "k8s/base/rules.toml"), "fly", 15)


@pytest.mark.parametrize("overlay", ["gpu", "multi-node"])
def test_metrics_that_are_scaled_by_exist(overlay: str) -> None:
    adapter = yaml.safe_load(
        (ROOT / "k8s/components/autoscaling/prometheus-adapter.yaml").read_text()
    )["rules"]
    offered = {"Pods": {r["name"]["as"] for r in adapter["custom"]},
               "External": {r["name"]["as"] for r in adapter["external"]}}  # fmt: skip
    workloads = {(o["kind"], o["metadata"]["name"])
                 for o in of_kind(overlay, "Deployment", "LeaderWorkerSet")}  # fmt: skip
    for scaler in of_kind(overlay, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in workloads
        for metric in scaler["spec"]["metrics"]:
            if metric["type"] != "Resource":
                name = metric[metric["type"].lower()]["metric"]["name"]
                assert name in offered[metric["type"]]
    source = "".join(
        path.read_text()
        for folder in ("flyspec/telemetry", "orchestrator", "draft_service", "verify_service")
        for path in (ROOT / folder).rglob("*.py")
    )
    # EngineMetrics and session_metrics put the service's name into theirs.
    source = source.replace('"{prefix}_', '"flyspec_draft_') + source.replace(
        '"{prefix}_', '"flyspec_verify_'
    )
    queries = [r[key] for rules in (adapter["custom"], adapter["external"]) for r in rules
               for key in ("seriesQuery", "metricsQuery")]  # fmt: skip
    for name in set(re.findall(r"flyspec_\w+", " ".join(queries))):
        assert f'"{SERIES_SUFFIX.sub("", name)}"' in source, name


def test_compose_starts_the_demo_if_nothing_is_said() -> None:
    assert "COMPOSE_PROFILES=cpu\n" in (ROOT / ".env").read_text()
    services = compose("docker-compose.yml")
    started = {n for n, s in services.items() if "cpu" in s.get("profiles", ["cpu"])}
    assert started == {"orchestrator", "verify", "draft"}
    for file in ("docker-compose.yml", "docker-compose.tls.yml"):
        for path in re.findall(r"^ +- (\./[^:$]+):", (ROOT / file).read_text(), re.MULTILINE):
            assert (ROOT / path).exists(), path


def test_compose_names_what_it_declares() -> None:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    files = ("docker-compose.yml", "docker-compose.tls.yml")
    for name, service in compose(*files).items():
        assert set(service.get("networks", ())) <= set(document["networks"]), name
        assert set(service.get("depends_on", ())) <= set(document["services"]), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source[0] in "./$" or source in document["volumes"], name


def made_of(target: str) -> set[str]:
    """The stages that an image is built on or copies files from."""
    stage = re.search(rf"^FROM (\S+) AS {target}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    if stage is None:
        return set()
    used = {stage[1], *re.findall(r"^COPY --from=(\S+) /opt/venv", stage[2], re.MULTILINE)}
    return used.union(*map(made_of, used))


def test_only_the_orchestrators_image_has_the_http_api() -> None:
    for target in ("draft", "verify", "draft-demo", "verify-demo"):
        assert {"core", "models"} <= made_of(target)
        assert "http" not in made_of(target)
    assert {"core", "http"} <= made_of("orchestrator")
    assert "models" not in made_of("orchestrator")


def test_images_install_the_extras_that_they_need(tmp_path: Path) -> None:
    image_requirements.main(ROOT / "pyproject.toml", ROOT / "constraints.txt", tmp_path)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    written = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert written["http.txt"] == extras["http"]
    assert set(extras["otlp"]) <= set(written["core.txt"])
    for name in written:
        assert re.search(rf"^COPY --from=requirements .*/requirements/{name} ", DOCKERFILE, re.M)


def test_images_get_what_they_copy() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines()
            if line.startswith("!")]  # fmt: skip
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists()
            assert any(source == k or source.startswith(f"{k}/") for k in kept), source


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


def test_documents_have_the_oldest_and_newest_kubernetes_that_is_checked() -> None:
    told = " ".join((ROOT / "docs" / "deployment.md").read_text().split())
    oldest, newest = KUBERNETES
    assert f"Kubernetes {oldest} or newer" in told
    assert f"against Kubernetes {oldest} and {newest}" in told


def test_images_come_from_a_private_registry(tmp_path: Path) -> None:
    """By the service account, hence for every pod, those of a LeaderWorkerSet and a Job too."""
    k8s = Path(os.path.relpath(ROOT / "k8s", tmp_path.resolve()))
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": [str(k8s / "overlays" / "multi-node")],
                "components": [str(k8s / "components" / "private-registry")],
            }
        )
    )
    objects = kustomize(tmp_path)
    (account,) = (o for o in objects if o["kind"] == "ServiceAccount")
    assert account["imagePullSecrets"] == [{"name": "flyspec-registry"}]
    own = {account["metadata"]["name"]}
    assert set(re.findall(r"serviceAccountName: (\S+)", yaml.safe_dump_all(objects))) == own
    assert "imagePullSecrets" in (ROOT / "docs" / "deployment.md").read_text()

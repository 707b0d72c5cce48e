"""The manifests as rendered by kubectl, and queries on them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flyspec.config import DraftSettings, OrchestratorSettings, ServerSettings, VerifySettings

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
SERVICES = ("orchestrator", "draft", "verify")
DEMOS = {overlay for overlay in OVERLAYS if overlay.startswith("cpu-demo")}
IN_THE_CLEAR = {"cpu-demo", "cpu-demo-swap"}
Object = dict[str, Any]


def kustomize(folder: Path) -> tuple[Object, ...]:
    """The objects of a kustomization; skips the test where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


@functools.cache
def render(overlay: str) -> tuple[Object, ...]:
    """The objects of an overlay."""
    return kustomize(ROOT / "k8s" / "overlays" / overlay)


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    """An overlay's objects of some kinds."""
    return [o for o in render(overlay) if o["kind"] in kinds]


def all_pods(overlay: str) -> Iterator[tuple[str, Object]]:
    """Every pod template of an overlay, with the name of its owner."""
    yield from pods(overlay)
    for job in of_kind(overlay, "Job"):
        yield job["metadata"]["name"], job["spec"]["template"]


def pods(overlay: str) -> Iterator[tuple[str, Object]]:
    """The pod templates of an overlay's services, with the names of their owners."""
    for workload in of_kind(overlay, "Deployment", "LeaderWorkerSet"):
        spec, name = workload["spec"], workload["metadata"]["name"]
        if workload["kind"] == "Deployment":
            yield name, spec["template"]
            continue
        for index, role in enumerate(("leaderTemplate", "workerTemplate")):
            template = spec["leaderWorkerTemplate"][role]
            # What the controller adds.
            metadata = template["metadata"]
            metadata["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = str(index)
            yield f"{name}-{role}", template


def labels(template: Object) -> dict[str, str]:
    """A pod's labels."""
    found: dict[str, str] = template["metadata"]["labels"]
    return found


def component(template: Object) -> str:
    """The service that a pod runs."""
    return labels(template)["app.kubernetes.io/component"]


def container(template: Object) -> Object:
    """A pod's only container."""
    (found,) = template["spec"]["containers"]
    return found


def matches(selector: dict[str, str], template: Object) -> bool:
    """True if a selector of labels selects a pod."""
    return selector.items() <= labels(template).items()


def environment(overlay: str, template: Object) -> dict[str, str]:
    """A pod's environment: its ConfigMaps, then its own variables."""
    maps = {o["metadata"]["name"]: o["data"] for o in of_kind(overlay, "ConfigMap")}
    found: dict[str, str] = {}
    for source in container(template).get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]
    return found | {v["name"]: v["value"] for v in container(template).get("env", [])}


def compose(*files: str) -> Object:
    """The compose file, with an override's services merged as far as the tests look."""
    merged: Object = {}
    for file in files:
        document = yaml.safe_load((ROOT / file).read_text())
        for name, service in document["services"].items():
            ours = merged.setdefault(name, {})
            for key, value in service.items():
                old = ours.get(key)
                ours[key] = old | value if isinstance(old, dict) else value
    return merged


SETTINGS: dict[str, type[ServerSettings]] = {
    "orchestrator": OrchestratorSettings,
    "draft": DraftSettings,
    "verify": VerifySettings,
}


CLIENT = {"FLYSPEC_SSL_CERTFILE", "FLYSPEC_SSL_KEYFILE", "FLYSPEC_SSL_CA_CERTS"}


def read(component: str, variables: dict[str, str]) -> Any:
    """The settings that a service reads from its environment."""
    prefix = f"FLYSPEC_{component.upper()}_"
    given = {}
    for name, value in variables.items():
        if not name.startswith("FLYSPEC_") or name in CLIENT:
            continue
        assert name.startswith(prefix), f"{name} means nothing to {component}"
        field = name.removeprefix(prefix).lower()
        assert field in SETTINGS[component].model_fields, f"{name} is no setting"
        given[field] = value
    return SETTINGS[component].model_validate(given)


def configured(overlay: str) -> Iterator[tuple[str, Object, Any]]:
    """The pod templates of an overlay's services, with their owners' names, and their settings."""
    for name, template in pods(overlay):
        yield name, template, read(component(template), environment(overlay, template))

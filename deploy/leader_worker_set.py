"""Holds a LeaderWorkerSet against the schema of its CustomResourceDefinition, and says how its
controller names what it makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

SCHEMA = Path(__file__).with_name("leader_worker_set.yaml")
LABEL = "leaderworkerset.sigs.k8s.io"
_TYPES = {"object": dict, "array": list, "string": str, "integer": int}
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
Object = dict[str, Any]


def errors(workload: Object) -> list[str]:
    """What is wrong with a LeaderWorkerSet: unknown keys, types, values, what is missing."""
    name = workload["metadata"]["name"]
    found = list(_errors(workload.get("spec"), yaml.safe_load(SCHEMA.read_text()), "spec"))
    if not _DNS_LABEL.fullmatch(name):
        found.append(f"metadata.name: {name!r} cannot be the name of a Service")
    return found


def _errors(value: Any, schema: Object, path: str) -> Iterator[str]:
    if schema.get("x-kubernetes-int-or-string"):
        types: Any = (int, str)
    else:
        types = _TYPES[schema["type"]]
    if not isinstance(value, types) or isinstance(value, bool):
        yield f"{path}: {value!r} has the wrong type"
        return
    if value not in schema.get("enum", [value]):
        yield f"{path}: {value!r} is none of {', '.join(schema['enum'])}"
    if isinstance(value, int) and value < schema.get("minimum", value):
        yield f"{path}: {value} is less than {schema['minimum']}"
    if not isinstance(value, dict):
        return
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{path}.{key} is missing"
    properties = schema.get("properties")
    if properties is not None:
        for key, inner in value.items():
            if key in properties:
                yield from _errors(inner, properties[key], f"{path}.{key}")
            else:
                yield f"{path}.{key} is unknown"


def headless_services(workload: Object) -> list[Object]:
    """The Services that the controller makes, unless there is one of the same name."""
    name, namespace = workload["metadata"]["name"], workload["metadata"]["namespace"]
    selector = {f"{LABEL}/name": name}
    made = {name: selector}
    if _unique(workload):
        replicas = range(workload["spec"].get("replicas", 1))
        made = {f"{name}-{i}": {**selector, f"{LABEL}/group-index": str(i)} for i in replicas}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": own, "namespace": namespace},
         "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True}}
        for own, labels in made.items()
    ]  # fmt: skip


def pods(workload: Object) -> Iterator[Object]:
    """The Pods that the controller makes, with their names, labels, subdomains and variables."""
    name, namespace = workload["metadata"]["name"], workload["metadata"]["namespace"]
    template = workload["spec"]["leaderWorkerTemplate"]
    size = template.get("size", 1)
    for group in range(workload["spec"].get("replicas", 1)):
        leader = f"{name}-{group}"
        subdomain = leader if _unique(workload) else name
        for worker in range(size):
            role = template["workerTemplate"]
            if worker == 0:
                role = template.get("leaderTemplate", role)
            added = {f"{LABEL}/name": name, f"{LABEL}/group-index": str(group),
                     f"{LABEL}/worker-index": str(worker)}  # fmt: skip
            variables = {"LWS_LEADER_ADDRESS": f"{leader}.{subdomain}.{namespace}",
                         "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(worker)}  # fmt: skip
            containers = [
                {**c, "env": [{"name": n, "value": v} for n, v in variables.items()]
                 + [e for e in c.get("env", ()) if e["name"] not in variables]}
                for c in role["spec"]["containers"]
            ]  # fmt: skip
            own = leader if worker == 0 else f"{leader}-{worker}"
            labels = {**role["metadata"].get("labels", {}), **added}
            yield {"apiVersion": "v1", "kind": "Pod",
                   "metadata": {"name": own, "namespace": namespace, "labels": labels},
                   "spec": {**role["spec"], "subdomain": subdomain,
                            "containers": containers}}  # fmt: skip


def _unique(workload: Object) -> bool:
    policy = workload["spec"].get("networkConfig", {}).get("subdomainPolicy", "Shared")
    return bool(policy == "UniquePerReplica")

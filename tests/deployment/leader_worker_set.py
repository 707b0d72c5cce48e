"""What the controller of a LeaderWorkerSet makes of it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.deployment.rendered import Object

LABEL = "leaderworkerset.sigs.k8s.io"


def headless_services(workload: Object) -> list[Object]:
    """The headless Services: made unless there is a Service of the same name."""
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
    """The Pods, with their names, labels, subdomains and variables."""
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

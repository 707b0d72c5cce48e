"""`make manifests`: check what is deployed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml

from flyspec.cli.program import run as run_program
from flyspec.cli.program import single

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build" / "manifests"
TOOLS = ROOT / ".venv-manifests"
REQUIREMENTS = ROOT / "deploy" / "manifest-tools.txt"
COMPOSE_FILES = ("docker-compose.yml", "docker-compose.tls.yml")
KUBERNETES = ("1.30", "1.37")
"""The oldest release with all that the manifests use (`preStop.sleep`), and the newest."""
CUSTOM = ("monitoring.coreos.com/v1", "cert-manager.io/v1")
"""APIs of custom resources, of which no tool here has the schemas."""
Object = dict[str, Any]


class Log:
    """Prints findings with the seconds since the start, and counts failures."""

    def __init__(self) -> None:
        self.failures = 0
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print something worth knowing."""
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", flush=True)

    def check(self, what: str, right: bool, found: object = "") -> None:
        """Print whether something is as it must be, and details."""
        self.failures += not right
        self.say(f"{'ok' if right else 'FAILED'}: {what}{f' ({found})' if found != '' else ''}")

    def skipped(self, what: str, why: object) -> None:
        print(f"{'*' * 75}\n*** SKIPPED: {what}: {why}\n{'*' * 75}")


class Missing(Exception):
    """A tool that is not available here."""


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the root of the checkout, with its output as text."""
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def check(log: Log, name: str, *command: str | Path) -> None:
    """Run a command that fails, and says why, if something is wrong."""
    done = run(*command)
    log.check(name, not done.returncode, done.stdout + done.stderr if done.returncode else "")


def install_python_tools() -> None:
    """Install manifest-tools.txt into .venv-manifests. Raises `Missing`."""
    stamp, wanted = TOOLS / "installed.txt", REQUIREMENTS.read_text()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"  installing {REQUIREMENTS.relative_to(ROOT)} into {TOOLS.name}")
    pip = TOOLS / "bin" / "pip", "install", "--quiet", "-r", REQUIREMENTS
    for step in ((sys.executable, "-m", "venv", TOOLS), pip):
        done = run(*step)
        if done.returncode:
            raise Missing((done.stderr or done.stdout).strip().splitlines()[-1])
    stamp.write_text(wanted)


def render(log: Log) -> dict[str, list[Object]]:
    """Return the objects of every overlay. Raises `Missing`."""
    if shutil.which("kubectl") is None:
        raise Missing("kubectl is not installed")
    found = {}
    for overlay in sorted((ROOT / "k8s" / "overlays").iterdir()):
        done = run("kubectl", "kustomize", overlay)
        log.check(f"k8s/overlays/{overlay.name} renders", not done.returncode, done.stderr)
        (OUTPUT / f"{overlay.name}.yaml").write_text(done.stdout)
        found[overlay.name] = [o for o in yaml.safe_load_all(done.stdout) if o]
    return found


def pods_of(workload: Object) -> Iterator[Object]:
    """The pod templates of a LeaderWorkerSet, as Pods."""
    own, template = workload["metadata"], workload["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        if role in template:
            name = f"{own['name']}-{role.removesuffix('Template')}"
            metadata = {**template[role].get("metadata", {}), "name": name}
            metadata["namespace"] = own["namespace"]
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
                   "spec": template[role]["spec"]}  # fmt: skip


def check_objects(overlays: dict[str, list[Object]], log: Log) -> None:
    """Check what Kubernetes itself knows, and LeaderWorkerSets."""
    paths = []
    for overlay, objects in overlays.items():
        sets = [o for o in objects if o["kind"] == "LeaderWorkerSet"]
        known = [o for o in objects if o["apiVersion"] not in CUSTOM and o not in sets]
        known += [pod for workload in sets for pod in pods_of(workload)]
        paths.append(OUTPUT / f"{overlay}.known.yaml")
        paths[-1].write_text(yaml.safe_dump_all(known, sort_keys=False))
        for workload in sets:
            path = OUTPUT / f"{overlay}.{workload['metadata']['name']}.json"
            path.write_text(json.dumps(workload))
            check(log, f"LeaderWorkerSet of {overlay}", TOOLS / "bin" / "check-jsonschema",
                  "--schemafile", ROOT / "deploy" / "leader_worker_set.yaml", path)  # fmt: skip
    for release in KUBERNETES:
        check(log, f"overlays against Kubernetes {release}",
              TOOLS / "bin" / "kubernetes-validate", "--strict", "-k", release, *paths)  # fmt: skip
    check_safety(paths, log)


def check_safety(paths: list[Path], log: Log) -> None:
    """Let checkov look at files of objects."""
    files = [part for path in paths for part in ("-f", path)]
    config = ROOT / "k8s" / "checkov.yaml"
    done = run(TOOLS / "bin" / "checkov", "--config-file", config, *files, LOG_LEVEL="ERROR")
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        log.check("checkov", False, done.stdout + done.stderr)
        return
    summary = found.get("summary", found)
    if summary["passed"] == 0 or summary["parsing_errors"]:
        log.check("checkov read the files", False, done.stdout)
        return
    failed = found["results"]["failed_checks"] if summary["failed"] else []
    log.check(f"checkov: {summary['passed']} checks passed", not failed, "\n".join(
        f"{f['check_id']} {f['check_name']}: {f['resource']} ({Path(f['file_path']).name})"
        for f in failed
    ))  # fmt: skip


def check_manifests() -> None:
    """Check Kubernetes manifests and compose files, within a minute on one core.

    kubectl renders every overlay of k8s/ into build/manifests/. kubernetes-validate checks the
    result strictly against the schemas of the oldest and the newest Kubernetes, without custom
    resources. LeaderWorkerSets are checked against deploy/leader_worker_set.yaml, and their pod
    templates as Pods. checkov looks for unsafe settings; k8s/checkov.yaml lists what is skipped,
    with reasons. Compose files are checked against the Compose Specification.

    Without kubectl only compose files are checked, and nothing if the other tools cannot be
    installed into .venv-manifests; both are said visibly. The exit code is 1 if a check failed.
    """
    log = Log()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    try:
        install_python_tools()
        check(log, " and ".join(COMPOSE_FILES), TOOLS / "bin" / "check-jsonschema",
              "--builtin-schema", "vendor.compose-spec", *COMPOSE_FILES)  # fmt: skip
        check_objects(render(log), log)
    except Missing as error:
        log.skipped("Kubernetes manifests, or all deployment files", error)
    raise typer.Exit(log.failures > 0)


if __name__ == "__main__":
    run_program(single(check_manifests))

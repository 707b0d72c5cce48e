"""Checks the manifests that are deployed: `make manifests`.

- kubectl renders every overlay of k8s/ into build/manifests/.
- kubernetes-validate (strict) holds them against Kubernetes' schemas. It has none for custom kinds:
  those of Prometheus' operator and cert-manager are held against the types that @kubernetes-models
  has of them; a LeaderWorkerSet against its definition's schema (leader_worker_set.yaml), and its
  pods' templates as Pods.
- checkov looks for what is unsafe; k8s/checkov.yaml has what is left out, with reasons.
- Grafana's dashboards are held against @grafana/schema's types.
- docker-compose reads the compose files, with every profile.

The tools come from the registries, into .venv-manifests and node_modules. One that cannot be had is
said loudly, and its checks are not counted. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy import leader_worker_set
from deploy.findings import Log

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".venv-manifests"
REQUIREMENTS = ROOT / "deploy" / "manifest-tools.txt"
COMPOSE_REQUIREMENTS = ROOT / "deploy" / "compose-tool.txt"
OUTPUT = ROOT / "build" / "manifests"
KUBERNETES = "1.34"
CUSTOM_GROUPS = ("monitoring.coreos.com/", "cert-manager.io/", "leaderworkerset.x-k8s.io/")
MODELS = {
    "monitoring.coreos.com/v1": "prometheus-operator",
    "cert-manager.io/v1": "cert-manager",
}
NODE_MODULES = ROOT / "node_modules"
COMPOSE_PROFILES = "cpu,gpu,observability,second-drafter"


class Missing(Exception):
    """A tool that cannot be had here."""


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command at the root of the checkout, its output as text."""
    return subprocess.run(
        [str(c) for c in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def install_tools(environment: Path, requirements: Path, *flags: str) -> None:
    """Make a virtual environment as a file of requirements says. Raises `Missing`."""
    stamp = environment / "installed.txt"
    wanted = requirements.read_text()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"  installing {requirements.relative_to(ROOT)} into {environment.relative_to(ROOT)}")
    steps: list[list[str | Path]] = [
        [sys.executable, "-m", "venv", environment],
        [environment / "bin" / "pip", "install", "--quiet", *flags, "-r", requirements],
    ]
    for step in steps:
        done = run(*step)
        if done.returncode:
            raise Missing((done.stderr or done.stdout).strip().splitlines()[-1])
    stamp.write_text(wanted)


def render(overlay: Path) -> Path:
    """An overlay's manifests in one file. Raises `Missing`, and `ValueError` if it is wrong."""
    if shutil.which("kubectl") is None:
        raise Missing("kubectl is not installed")
    done = run("kubectl", "kustomize", overlay)
    if done.returncode:
        raise ValueError(done.stderr.strip())
    rendered = OUTPUT / f"{overlay.name}.yaml"
    rendered.write_text(done.stdout)
    return rendered


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pods_of(workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pods that a LeaderWorkerSet makes, as Pods."""
    template = workload["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        if role in template:
            name = f"{workload['metadata']['name']}-{role.removesuffix('Template')}"
            metadata = {**template[role].get("metadata", {}), "name": name}
            metadata["namespace"] = workload["metadata"]["namespace"]
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
                   "spec": template[role]["spec"]}  # fmt: skip


def split(rendered: Path) -> tuple[Path, Path]:
    """What Kubernetes itself knows, and the custom kinds, in a file each."""
    known, custom = [], []
    for document in read(rendered):
        if not document["apiVersion"].startswith(CUSTOM_GROUPS):
            known.append(document)
            continue
        custom.append(document)
        if document["kind"] == "LeaderWorkerSet":
            known += pods_of(document)
    paths = tuple(rendered.with_suffix(f".{part}.yaml") for part in ("known", "custom"))
    for path, documents in zip(paths, (known, custom), strict=True):
        path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return paths[0], paths[1]


def check_known(paths: list[Path], log: Log) -> None:
    """Hold files against Kubernetes' schemas."""
    done = run(TOOLS / "bin" / "kubernetes-validate", "--strict", "-k", KUBERNETES, *paths)
    name = f"{sum(len(read(path)) for path in paths)} objects of Kubernetes {KUBERNETES}"
    log.check(name, not done.returncode, done.stdout + done.stderr if done.returncode else "")


def check_custom(paths: list[Path], log: Log) -> None:
    """Hold custom kinds against the types there are; name the others. Raises `Missing`.

    @kubernetes-models has the definitions as TypeScript, whose compiler finds unknown keys too.
    """
    lines, count = [], 0
    for path in paths:
        for document in read(path):
            package = MODELS.get(document["apiVersion"])
            kind = document["kind"]
            if kind == "LeaderWorkerSet":
                found = leader_worker_set.errors(document)
                log.check(f"{kind} {document['metadata']['name']}", not found, "\n".join(found))
                continue
            if package is None:
                print(f"  unchecked but for its pods: {kind} {document['metadata']['name']} "
                      f"({path.name}): no schema to be had")  # fmt: skip
                continue
            count += 1
            module = f"@kubernetes-models/{package}/{document['apiVersion']}"
            lines.append(f'import type {{ I{kind} as K{count} }} from "{module}";')
            lines.append(f"export const o{count}: K{count} = {json.dumps(document)};")
    if count:
        name = f"{count} objects of custom kinds ({', '.join(MODELS)})"
        check_types(OUTPUT / "custom.mts", lines, name, log)


def check_dashboards(log: Log) -> None:
    """Hold Grafana's dashboards against its own types. Raises `Missing`."""
    lines = [
        'import type { Dashboard } from "@grafana/schema";',
        "// An enum's values as JSON has them.",
        "type Plain<T> = T extends string ? `${T}` : { [K in keyof T]: Plain<T[K]> };",
    ]
    paths = sorted((ROOT / "k8s" / "monitoring" / "dashboards").glob("*.json"))
    for index, path in enumerate(paths):
        lines.append(f"export const d{index}: Plain<Dashboard> = {path.read_text()};")
    check_types(OUTPUT / "dashboards.mts", lines, f"{len(paths)} dashboards of Grafana", log)


def check_types(source: Path, lines: list[str], name: str, log: Log) -> None:
    """Have TypeScript's compiler check a program. Raises `Missing`."""
    install_types()
    source.write_text("\n".join(lines) + "\n")
    done = run(NODE_MODULES / ".bin" / "tsc", "--noEmit", "--strict", "--skipLibCheck",
               "--module", "esnext", "--moduleResolution", "bundler", source)  # fmt: skip
    log.check(name, not done.returncode, done.stdout + done.stderr if done.returncode else "")


def install_types() -> None:
    """Have npm install what package.json names. Raises `Missing`."""
    wanted = [NODE_MODULES / ".bin" / "tsc", NODE_MODULES / "@grafana" / "schema"]
    wanted += [NODE_MODULES / "@kubernetes-models" / package for package in MODELS.values()]
    if all(path.exists() for path in wanted):
        return
    if shutil.which("npm") is None:
        raise Missing("npm is not installed")
    done = run("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock")
    if done.returncode:
        raise Missing("npm could not install what package.json names")


def check_safety(paths: list[Path], log: Log) -> None:
    """Let checkov look at the rendered files."""
    files = [part for path in paths for part in ("-f", str(path))]
    config = ROOT / "k8s" / "checkov.yaml"
    done = run(TOOLS / "bin" / "checkov", "--config-file", config, *files, LOG_LEVEL="ERROR")
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        log.check("checkov", False, done.stdout + done.stderr)
        return
    summary = found.get("summary", found)
    if summary["passed"] == 0 or summary["parsing_errors"]:
        log.check("checkov looked at something", False, done.stdout)
        return
    failed = found["results"]["failed_checks"] if summary["failed"] else []
    log.check(f"checkov: {summary['passed']} checks passed, none failed", not failed, "\n".join(
        f"{f['check_id']} {f['check_name']}: {f['resource']} ({Path(f['file_path']).name})"
        for f in failed
    ))  # fmt: skip


def check_compose(log: Log) -> None:
    """Let docker-compose read the compose files, alone and with the overrides."""
    environment = TOOLS / "compose"
    install_tools(environment, COMPOSE_REQUIREMENTS, "--no-deps")
    for files in (["docker-compose.yml"], ["docker-compose.yml", "docker-compose.tls.yml"]):
        flags = [part for file in files for part in ("-f", file)]
        command = environment / "bin" / "docker-compose"
        done = run(command, *flags, "config", "-q", COMPOSE_PROFILES=COMPOSE_PROFILES)
        log.check(f"{' + '.join(files)}: every profile", not done.returncode,
                  (done.stderr or done.stdout) if done.returncode else "")  # fmt: skip


def main() -> int:
    """Run every check there are tools for; 1 if one failed."""
    log = Log()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    known, custom = [], []
    for overlay in sorted((ROOT / "k8s" / "overlays").iterdir()):
        try:
            parts = split(render(overlay))
        except Missing as error:
            log.skipped("manifests", error)
            break
        except ValueError as error:
            log.check(f"k8s/overlays/{overlay.name} renders", False, error)
        else:
            known.append(parts[0])
            custom.append(parts[1])
            log.check(f"k8s/overlays/{overlay.name} renders", True)
    try:
        install_tools(TOOLS, REQUIREMENTS)
    except Missing as error:
        log.skipped("kubernetes-validate and checkov", error)
    else:
        if known:
            check_known(known, log)
            check_safety(known, log)
    rest: dict[str, Callable[[], None]] = {
        "custom kinds": lambda: check_custom(custom, log),
        "dashboards": lambda: check_dashboards(log),
        "docker-compose.yml": lambda: check_compose(log),
    }
    for what, check in rest.items():
        try:
            check()
        except Missing as error:
            log.skipped(what, error)
    return int(log.failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())

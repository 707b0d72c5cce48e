"""Builds the images and runs them: `make images-check`, as root on Debian, half an hour.

Needs buildah, podman, runc, catatonit, debootstrap and kubectl. The base image is --base, or what
the Dockerfile names if a registry can be reached, or made by debootstrap. What is built and run is
in a directory that is deleted at the end; the machine's own containers are not touched.

Checks what the images hold, that they run with a read-only root file system and as nobody, that
`podman play kube` runs the overlay cpu-demo and the stack answers over its published port, and what
it does when services are paused, killed and told to end; then whom cpu-demo-tls lets in. Exit code
1 if something is not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import yaml

from deploy.containers import CommandError, Containers
from deploy.findings import Log
from deploy.stack_check import PORTS, StackCheck
from deploy.tls_check import TlsCheck, make_certificates, mount_directories

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_BASE = "docker.io/library/python:3.11-slim-bookworm"
TAG = "0.1.0"
TARGETS = ("orchestrator", "draft", "verify", "draft-demo", "verify-demo")
TOOLS = ("buildah", "podman", "runc", "catatonit", "debootstrap", "kubectl")
ADDRESSES = {"draft": "10.89.77.11", "orchestrator": "10.89.77.12", "verify": "10.89.77.13"}
"""In the order in which the overlay's Deployments are rendered."""
LOOK = """
import importlib.util, os, pathlib
places = [pathlib.Path(d) for d in ("/models", "/opt", "/var")]
weights = [str(p) for place in places for p in place.rglob("*.safetensors")]
def writable(path):
    try:
        open(os.path.join(path, ".check"), "w").close()
    except OSError as error:
        return error.strerror
    return "writable"
print({
    "torch": importlib.util.find_spec("torch") is not None,
    "pip": importlib.util.find_spec("pip") is not None,
    "weights": weights,
    "uid": os.getuid(),
    "/": writable("/"),
    "/opt/flyspec": writable("/opt/flyspec"),
    "/tmp": writable("/tmp"),
    "cache": writable(os.environ["HOME"]),
})
"""


def missing() -> list[str]:
    """What has to be installed first."""
    if os.geteuid() != 0:
        return ["root's rights"]
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [tool for tool in TOOLS if shutil.which(tool, path=path) is None]


def find_base(containers: Containers, asked: str, log: Log) -> str:
    """The base image: the one asked for, the Dockerfile's own, or one of our own making."""
    for image in [asked] if asked else [DEFAULT_BASE]:
        if containers.pull(image):
            log.say(f"base image: {image}")
            return image
    if asked:
        raise CommandError(f"--base {asked}: cannot be pulled")
    began = time.monotonic()
    base = containers.make_base()
    log.say(f"base image: no registry has {DEFAULT_BASE} for us; made by debootstrap in "
            f"{time.monotonic() - began:.0f} s")  # fmt: skip
    return base


def find_torch(asked: str | None, log: Log) -> dict[str, str]:
    """The build argument that says where CPU builds of torch are; none if the default will do."""
    if asked is not None:
        return {"TORCH_CPU_INDEX": asked}
    dockerfile = (ROOT / "Dockerfile").read_text()
    (default,) = re.findall(r"^ARG TORCH_CPU_INDEX=(\S+)$", dockerfile, re.MULTILINE)
    try:
        urllib.request.urlopen(default, timeout=20).close()
    except OSError:
        log.say("PyTorch's index cannot be reached: torch from where pip here is told to look")
        return {"TORCH_CPU_INDEX": ""}
    return {}


def build(containers: Containers, base: str, arguments: dict[str, str], log: Log) -> None:
    """Build every target."""
    for target in TARGETS:
        name = f"flyspec-{target}:{TAG}"
        seconds = containers.build(ROOT, target, name, {"BASE_IMAGE": base, **arguments})
        size = containers.image(name)["Size"] / 1e6
        log.say(f"built {name}: {size:.0f} MB, {seconds:.0f} s")


def look_inside(containers: Containers, log: Log) -> None:
    """Check what the images hold, and how they are configured."""
    for target in TARGETS:
        name = f"flyspec-{target}:{TAG}"
        inside = yaml.safe_load(containers.inside(name, LOOK))
        config = containers.image(name)["Config"]
        light = target == "orchestrator"
        log.check(f"{target}: {'no ' if light else ''}torch", inside["torch"] is not light)
        demo = target.endswith("-demo")
        log.check(
            f"{target}: {'bundled' if demo else 'no'} weights", bool(inside["weights"]) is demo
        )
        log.check(f"{target}: numeric user, not root", config["User"] == "10001:10001"
                  and inside["uid"] == 10001, config["User"])  # fmt: skip
        log.check(f"{target}: no pip", not inside["pip"])
        log.check(
            f"{target}: with a read-only root only /tmp and the cache can be written",
            [inside[p] for p in ("/", "/opt/flyspec")] == ["Read-only file system"] * 2
            and [inside[p] for p in ("/tmp", "cache")] == ["writable"] * 2,
        )
        entrypoint = config["Entrypoint"][0]
        health = containers.image(name)["Healthcheck"]["Test"]
        log.check(
            f"{target}: no shell to start it or to ask for its health",
            entrypoint == "python" and health[:2] == ["CMD", "flyspec"],
        )


def refuses_in_the_clear(containers: Containers, log: Log) -> None:
    """As it comes, an image does not listen in the clear."""
    try:
        containers.podman("run", "--rm", "--network", "none", f"flyspec-orchestrator:{TAG}")
    except CommandError as error:
        log.check("orchestrator: refuses to listen in the clear unless told to",
                  "--allow-insecure" in str(error))  # fmt: skip
    else:
        log.check("orchestrator: refuses to listen in the clear unless told to", False)


def render(containers: Containers, overlay: str) -> str:
    """An overlay as kubectl renders it."""
    return containers.run(["kubectl", "kustomize", str(ROOT / "k8s/overlays" / overlay)])


def run_manifest(containers: Containers, log: Log, text: str, check: StackCheck | TlsCheck) -> None:
    """Have podman run a manifest, and check what runs."""
    manifest = containers.work / "manifest.yaml"
    manifest.write_text(text)
    with containers.network() as network:
        addresses = [part for a in ADDRESSES.values() for part in ("--ip", a)]
        containers.podman("play", "kube", "--network", network, *addresses, str(manifest))
        try:
            asyncio.run(check.run())
        finally:
            for service in ADDRESSES:
                logs = containers.podman("logs", "--tail", "400", f"{service}-pod-0-{service}")
                if log.failures:
                    print(f"--- {service}\n{logs}", file=sys.stderr)
            containers.podman("play", "kube", "--down", str(manifest))


def run_stack(containers: Containers, log: Log) -> None:
    """cpu-demo: how it takes what happens to its services."""
    log.say("podman play kube runs k8s/overlays/cpu-demo as kubectl renders it")
    run_manifest(containers, log, render(containers, "cpu-demo"), StackCheck(containers, log))


def run_with_tls(containers: Containers, log: Log) -> None:
    """cpu-demo-tls: who gets in."""
    ours, others = containers.work / "certificates", containers.work / "other-certificates"
    make_certificates(containers, ours, *PORTS, "operator", "client")
    make_certificates(containers, others, "operator")
    log.say("podman play kube runs k8s/overlays/cpu-demo-tls, directories in place of its Secrets")
    manifest = mount_directories(render(containers, "cpu-demo-tls"), ours)
    run_manifest(containers, log, manifest, TlsCheck(containers, log, ours, others))


def main() -> int:
    """Build, look, run, and delete it all again."""
    parser = argparse.ArgumentParser(prog="images_check", description=__doc__)
    parser.add_argument(
        "--base", default="", help="base image; else the Dockerfile's, or debootstrap"
    )
    parser.add_argument(
        "--torch-cpu-index",
        help="TORCH_CPU_INDEX of the build; empty: pip is configured to find it",
    )
    parser.add_argument("--work", type=Path, help="where images go, kept for the next time")
    options = parser.parse_args()
    log = Log()
    if lacking := missing():
        print(f"images-check needs {', '.join(lacking)}: apt-get install buildah podman runc "
              "catatonit debootstrap, and kubectl; as root", file=sys.stderr)  # fmt: skip
        return 2
    work = options.work or Path(tempfile.mkdtemp(prefix="flyspec-images-"))
    work.mkdir(parents=True, exist_ok=True)
    arguments = find_torch(options.torch_cpu_index, log)
    containers = Containers(work, ADDRESSES)
    steps: list[Callable[[Containers, Log], None]] = [
        look_inside, refuses_in_the_clear, run_stack, run_with_tls
    ]  # fmt: skip
    try:
        log.say(f"{containers.run(['podman', '--version'])}, "
                f"{containers.run(['buildah', '--version']).split(' (')[0]}, "
                f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}")  # fmt: skip
        build(containers, find_base(containers, options.base, log), arguments, log)
        for step in steps:
            step(containers, log)
    except CommandError as error:
        log.check(str(error), False)
    finally:
        if options.work is None:
            containers.clean_up()
            log.say("deleted all of it")
    log.say(f"{log.failures} checks failed" if log.failures else "everything is as it should be")
    return int(log.failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())

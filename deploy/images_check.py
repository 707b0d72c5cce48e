"""`make images-check`: build the images, run them with podman, and test what runs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
import yaml

from deploy.check_manifests import Log
from deploy.containers import CommandError, Containers
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.config import ADMIN_PORT, DRAFT_PORT, GENERATION_PORT, VERIFY_PORT
from flyspec.flags import Flag

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_BASE = "docker.io/library/python:3.11-slim-bookworm"
TAG = "0.1.0"
TARGETS = ("orchestrator", "draft", "verify", "draft-demo", "verify-demo")
TOOLS = ("buildah", "podman", "runc", "catatonit", "debootstrap", "kubectl")
ADDRESSES = {"draft": "10.89.77.11", "orchestrator": "10.89.77.12", "verify": "10.89.77.13"}
"""In the order in which kubectl renders the Deployments."""
PORTS = {"": GENERATION_PORT, "admin-": ADMIN_PORT, "draft-": DRAFT_PORT, "verify-": VERIFY_PORT}
USER = 10001
PLACES = ["/", "/opt/flyspec", "/tmp", "cache"]
LOOK = """
import importlib.util, os, pathlib
places = [pathlib.Path(d) for d in ("/models", "/opt", "/var")]
def writable(path):
    try:
        open(os.path.join(path, ".check"), "w").close()
    except OSError as error:
        return error.strerror
    return "writable"
print({
    **{name: importlib.util.find_spec(name) is not None for name in ("torch", "fastapi", "pip")},
    **{place: writable(place) for place in ("/", "/opt/flyspec", "/tmp")},
    "cache": writable(os.environ["HOME"]),
    "weights": [str(p) for place in places for p in place.rglob("*.safetensors")],
    "uid": os.getuid(),
})
"""


def missing() -> list[str]:
    """Return what has to be installed first."""
    if os.geteuid() != 0:
        return ["root privileges"]
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [tool for tool in TOOLS if shutil.which(tool, path=path) is None]


def find_base(containers: Containers, asked: str, log: Log) -> str:
    """Return the base image: the one asked for, the Dockerfile's, or one made by debootstrap."""
    image = asked or DEFAULT_BASE
    if containers.pull(image):
        log.say(f"base image: {image}")
        return image
    if asked:
        raise CommandError(f"--base {asked}: cannot be pulled")
    log.say(f"base image: cannot pull {DEFAULT_BASE}; making one with debootstrap")
    return containers.make_base()


def build(containers: Containers, arguments: dict[str, str], log: Log) -> None:
    for target in TARGETS:
        name, began = f"flyspec-{target}:{TAG}", time.monotonic()
        containers.build(ROOT, target, name, arguments)
        size, seconds = containers.image(name)["Size"] / 1e6, time.monotonic() - began
        log.say(f"built {name}: {size:.0f} MB in {seconds:.0f} s")


def look_inside(containers: Containers, log: Log) -> None:
    """Check what the images contain, and how they are configured."""
    for target in TARGETS:
        name = f"flyspec-{target}:{TAG}"
        inside = yaml.safe_load(containers.inside(name, LOOK))
        image = containers.image(name)
        user, entrypoint = image["Config"]["User"], image["Config"]["Entrypoint"][0]
        demo, light = target.endswith("-demo"), target == "orchestrator"
        writable = [place for place in PLACES if inside[place] == "writable"]
        for what, right in {
            f"{'no ' if light else ''}torch": inside["torch"] is not light,
            f"{'' if light else 'no '}HTTP API": inside["fastapi"] is light,
            f"{'bundled' if demo else 'no'} weights": bool(inside["weights"]) is demo,
            "numeric user, not root": user == f"{USER}:{USER}" and inside["uid"] == USER,
            "no pip": not inside["pip"],
            "with a read-only root, only /tmp and the cache are writable": writable == PLACES[2:],
            "entry point and health check without a shell": entrypoint == "python"
            and image["Healthcheck"]["Test"][:2] == ["CMD", "flyspec"],
        }.items():
            log.check(f"{target}: {what}", right)
    try:
        containers.run("podman", "run", "--rm", "--network", "none", f"flyspec-orchestrator:{TAG}")
        said = ""
    except CommandError as error:
        said = str(error)
    log.check("orchestrator: by default refuses to listen unencrypted", "--allow-insecure" in said)


def test(containers: Containers, overlay: str, log: Log) -> None:
    """Run an overlay as kubectl renders it; run tests/e2e and a load test over HTTP against it."""
    manifest = containers.run("kubectl", "kustomize", ROOT / "k8s/overlays" / overlay)
    flags = [f"--{name}address=127.0.0.1:{port}" for name, port in PORTS.items()]
    http = ["ramp", "--protocol", "http", "--seconds", "10", "--steps", "1"]
    if overlay.endswith("-tls"):
        folder = containers.work / "certificates"
        make_certificates(folder)
        manifest = mount_directories(manifest, folder)
        flags.append(f"--certificates={folder}")
        names = {"ca-certs": "ca.crt", "certfile": "tls.crt", "keyfile": "tls.key"}
        http += [f"--ssl-{flag}={folder}/client/{name}" for flag, name in names.items()]
    log.say(f"podman play kube runs k8s/overlays/{overlay}")
    with containers.play(manifest):
        pytest = ["pytest", "-v", "-s", "-rfEs", "-m", "not full", "tests/e2e", "--podman", *flags]
        passed = []
        for name, command in (("tests/e2e", pytest), ("HTTP", ["loadtest", *http])):
            done = subprocess.run(
                [sys.executable, "-m", *command], cwd=ROOT, env=containers.environment, check=False
            )
            passed.append(done.returncode == 0)
            log.check(f"{overlay}: {name}", passed[-1])
        if not all(passed):
            for service in ADDRESSES:
                logs = containers.run("podman", "logs", "--tail", "400",
                                      f"{service}-pod-0-{service}")  # fmt: skip
                print(f"--- {service}\n{logs}", file=sys.stderr)


def make_certificates(folder: Path) -> None:
    """Make an authority and its certificates, for the containers' user to read."""
    script = ROOT / "deploy" / "demo_certificates.sh"
    subprocess.run(["sh", script, folder], check=True, capture_output=True)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, USER, USER)


def mount_directories(manifest: str, folder: Path) -> str:
    """Replace the Secrets `<service>-tls` of a manifest by directories in `folder`.

    podman 4.3.1 mounts Secrets without decoding their base64.
    """
    documents = [document for document in yaml.safe_load_all(manifest) if document]
    for document in documents:
        if document["kind"] == "Deployment":
            for volume in document["spec"]["template"]["spec"]["volumes"]:
                if secret := volume.pop("secret", None):
                    service = secret["secretName"].removesuffix("-tls")
                    volume["hostPath"] = {"path": str(folder / service), "type": "Directory"}
    changed: str = yaml.safe_dump_all(documents)
    return changed


@with_flags
def images_check(
    base: Annotated[str, Flag(
        "Base image.", default="the Dockerfile's, or else one made by debootstrap",
    )] = "",
    torch_cpu_index: Annotated[str | None, Flag(
        "Build argument TORCH_CPU_INDEX; '' uses pip's own configuration.",
        default="the Dockerfile's",
    )] = None,
    work: Annotated[Path | None, Flag("Directory for images, kept for the next run.")] = None,
) -> None:  # fmt: skip
    """Build the images, run them with podman, and test what runs (docs/deployment.md).

    Needs root on Debian with buildah, podman, runc, catatonit, debootstrap and kubectl.
    """
    log = Log()
    if lacking := missing():
        print(f"images-check needs {', '.join(lacking)}; as root: apt-get install buildah podman "
              "runc catatonit debootstrap, and kubectl", file=sys.stderr)  # fmt: skip
        raise typer.Exit(2)
    folder = work or Path(tempfile.mkdtemp(prefix="flyspec-images-"))
    folder.mkdir(parents=True, exist_ok=True)
    containers = Containers(folder.resolve(), ADDRESSES)
    try:
        log.say(f"{containers.run('podman', '--version')}, "
                f"{containers.run('buildah', '--version').split(' (')[0]}, "
                f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}")  # fmt: skip
        arguments = {"BASE_IMAGE": find_base(containers, base, log)}
        if torch_cpu_index is not None:
            arguments["TORCH_CPU_INDEX"] = torch_cpu_index
        build(containers, arguments, log)
        look_inside(containers, log)
        for overlay in ("cpu-demo", "cpu-demo-tls"):
            test(containers, overlay, log)
    except CommandError as error:
        log.check(str(error), False)
    finally:
        if work is None:
            containers.clean_up()
            log.say("deleted everything")
    log.say(f"{log.failures} checks failed" if log.failures else "all checks passed")
    raise typer.Exit(log.failures > 0)


if __name__ == "__main__":
    run(single(images_check))

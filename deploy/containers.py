"""buildah and podman with storage of their own, apart from the machine's containers.

Needs no daemon, systemd or image registry: images are built with --isolation chroot, and containers
are run by runc in a bridge network, with cgroups that podman manages itself.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BASE = "localhost/flyspec-base:check"
PACKAGES = "python3,python3-venv,ca-certificates"
NETWORK = "flyspec-images-check"
SUBNET = "10.89.77.0/24"
# Podman's warnings about missing systemd, for every image with a HEALTHCHECK.
NOISE = re.compile(r"systemd|static macs")


class CommandError(Exception):
    """A command failed; contains its output."""


class Containers:
    """Images and containers below the directory `work`.

    `addresses` maps names that containers can resolve to addresses in `SUBNET`.
    """

    def __init__(self, work: Path, addresses: dict[str, str]) -> None:
        self.work, self._addresses = work, addresses
        hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (work / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (work / "containers.conf").write_text(
            f'[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
            f'base_hosts_file = "{work}/hosts"\n'
            f'[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nevents_logger = "file"\n'
            f'tmp_dir = "{work}/tmp"\n'
            f'[network]\nnetwork_config_dir = "{work}/networks"\n'
        )
        (work / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{work}/store"\nrunroot = "{work}/run"\n'
        )
        self.environment = os.environ | {
            "CONTAINERS_CONF": f"{work}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{work}/storage.conf",
        }
        """With this environment, `podman` and `buildah` use these images and containers."""

    def run(self, *command: str | Path) -> str:
        """Return a command's standard output. Raises `CommandError`."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if not NOISE.search(line)]
            shown = " ".join(map(str, command[:2] + command[-3:]))
            raise CommandError(f"{shown}: code {done.returncode}\n" + "\n".join(lines[-15:]))
        return done.stdout.strip()

    def make_base(self) -> str:
        """Build a base image of this machine's Debian with debootstrap; return its name."""
        root = self.work / "base"
        release = Path("/etc/os-release").read_text()
        suite = re.search(r"^VERSION_CODENAME=(\w+)$", release, re.MULTILINE)
        if suite is None:
            raise CommandError("/etc/os-release names no Debian suite; pass --base")
        self.run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite[1], root)
        shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
        archive = self.work / "base.tar"
        self.run("tar", "-C", root, "-cf", archive, ".")
        shutil.rmtree(root)
        container = self.run("buildah", "from", "scratch")
        self.run("buildah", "add", "-q", container, archive, "/")
        self.run("buildah", "commit", "-q", "--rm", container, BASE)
        archive.unlink()
        return BASE

    def pull(self, image: str) -> bool:
        """Pull an image unless it is here; False if that is not possible."""
        try:
            self.run("timeout", "60", "buildah", "pull", "-q", image)
        except CommandError:
            return False
        return True

    def build(self, context: Path, target: str, tag: str, arguments: dict[str, str]) -> None:
        """Build a target of the Dockerfile, with pip configured as it is on this machine."""
        configuration, paths = pip_configuration()
        secret = self.work / "pip.conf"
        secret.write_text(configuration)
        self.run(
            "buildah", "bud", "--pull-never", "--format", "docker", "--layers",
            "--isolation", "chroot",
            *(part for item in arguments.items() for part in ("--build-arg", "=".join(item))),
            "--secret", f"id=pip.conf,src={secret}",
            *(part for path in paths for part in ("-v", f"{path}:{path}:ro")),
            "--target", target, "-t", tag, context,
        )  # fmt: skip

    def image(self, name: str) -> dict[str, Any]:
        """Return podman's description of an image."""
        found: list[dict[str, Any]] = json.loads(self.run("podman", "image", "inspect", name))
        return found[0]

    def inside(self, image: str, program: str) -> str:
        """Run a Python program in an unprivileged container; return its output."""
        return self.run(
            "podman", "run", "--rm", "--network", "none", "--read-only",
            "--read-only-tmpfs=false", "--cap-drop", "all", "--security-opt", "no-new-privileges",
            "--entrypoint", "python", image, "-c", program,
        )  # fmt: skip

    @contextmanager
    def play(self, manifest: str) -> Iterator[None]:
        """Run a manifest's pods, one for each of `addresses`, in the order of those."""
        path = self.work / "manifest.yaml"
        path.write_text(manifest)
        addresses = [part for a in self._addresses.values() for part in ("--ip", a)]
        self.run("podman", "network", "create", "--subnet", SUBNET, NETWORK)
        try:
            self.run("podman", "play", "kube", "--network", NETWORK, *addresses, path)
            try:
                yield
            finally:
                self.run("podman", "play", "kube", "--down", path)
        finally:
            self.run("podman", "network", "rm", "-f", NETWORK)

    def clean_up(self) -> None:
        """Delete all containers, and everything below `work`."""
        for command in ("pod rm -fa -t 1", "rm -fa -t 1", "volume rm -fa"):
            try:
                self.run("podman", *command.split())
            except CommandError:
                continue
        # Unmount what is below `work`, innermost mounts first.
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((m for m in mounts if m.startswith(f"{self.work}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        shutil.rmtree(self.work, ignore_errors=True)


def pip_configuration() -> tuple[str, list[str]]:
    """Return this machine's pip settings as a pip.conf, and the local paths that they name."""
    listed = subprocess.run(
        ["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    parser = configparser.RawConfigParser()
    parser.add_section("global")
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", ":env:") and key not in ("no-cache-dir", "python"):
            parser.set("global", key, value.strip("'\""))
    text = "".join(f"{key} = {value}\n" for key, value in parser.items("global"))
    paths = set(re.findall(r"(?<=[\s=])(/[^\s'\"]+)", text))
    # An index names files beside it.
    paths |= {str(Path(path).parent) for path in re.findall(r"file://(/[^\s'\"]+)", text)}
    return "[global]\n" + text, sorted(path for path in paths if Path(path).exists())

"""buildah and podman with a store of their own: nothing of the machine's own containers is touched.

They work without a daemon, systemd or an image registry: images are built with --isolation chroot,
containers run by runc with cgroups that podman makes itself, in a bridge network.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BASE = "localhost/flyspec-base:check"
PACKAGES = "python3,python3-venv,ca-certificates"
# What podman says for want of systemd, whenever an image has a HEALTHCHECK.
NOISE = re.compile(r"systemd|static macs")


class CommandError(Exception):
    """A command failed; what it said."""


class Containers:
    """Images and containers in `work`, a directory that is deleted at the end.

    `names` are what containers can resolve, beyond DNS: name -> address in the network.
    """

    NETWORK = "flyspec-images-check"
    SUBNET = "10.89.77.0/24"

    def __init__(self, work: Path, names: dict[str, str]) -> None:
        self.work = work
        hosts = work / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in names.items()))
        configuration = work / "containers.conf"
        configuration.write_text(
            f'[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
            f'base_hosts_file = "{hosts}"\n'
            f'[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nevents_logger = "file"\n'
            f'[network]\nnetwork_config_dir = "{work}/networks"\n'
        )
        self._environment = {**os.environ, "CONTAINERS_CONF": str(configuration)}
        self._store = ["--root", str(work / "store"), "--runroot", str(work / "run"),
                       "--storage-driver", "overlay"]  # fmt: skip

    def run(self, command: Iterable[str], timeout_s: float = 1800) -> str:
        """Run a command to its end; its standard output. Raises `CommandError`."""
        arguments = [str(part) for part in command]
        done = subprocess.run(
            arguments,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if not NOISE.search(line)]
            raise CommandError(f"{' '.join(arguments[:1] + arguments[-3:])}: code "
                               f"{done.returncode}\n" + "\n".join(said[-15:]))  # fmt: skip
        return done.stdout.strip()

    def buildah(self, *arguments: str) -> str:
        """buildah on this store."""
        return self.run(["buildah", *self._store, *arguments])

    def podman(self, *arguments: str, timeout_s: float = 600) -> str:
        """podman on this store."""
        tmp = str(self.work / "tmp")
        return self.run(["podman", *self._store, "--tmpdir", tmp, *arguments], timeout_s)

    def make_base(self) -> str:
        """A base image of this machine's Debian, by debootstrap; its name."""
        root = self.work / "base"
        release = Path("/etc/os-release").read_text()
        suite = re.search(r"^VERSION_CODENAME=(\w+)$", release, re.MULTILINE)
        if suite is None:
            raise CommandError("/etc/os-release names no suite of Debian; give --base")
        self.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite[1], str(root)])
        shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
        archive = self.work / "base.tar"
        self.run(["tar", "-C", str(root), "-cf", str(archive), "."])
        shutil.rmtree(root)
        container = self.buildah("from", "scratch")
        self.buildah("add", "-q", container, str(archive), "/")
        self.buildah("commit", "-q", "--rm", container, BASE)
        archive.unlink()
        return BASE

    def pull(self, image: str) -> bool:
        """Whether the image is here, or a registry has it for us."""
        try:
            self.run(["buildah", *self._store, "inspect", "--type", "image", image])
        except CommandError:
            pass
        else:
            return True
        try:
            self.run(["timeout", "60", "buildah", *self._store, "pull", "-q", image])
        except CommandError:
            return False
        return True

    def build(self, context: Path, target: str, tag: str, arguments: dict[str, str]) -> float:
        """Build a target of the Dockerfile; seconds that it took.

        pip in the build is configured as pip here is: its mirrors, certificates, local files.
        """
        began = time.monotonic()
        configuration, paths = pip_configuration()
        secret = self.work / "pip.conf"
        secret.write_text(configuration)
        self.buildah(
            "bud", "--pull-never", "--format", "docker", "--layers", "--isolation", "chroot",
            *(part for item in arguments.items() for part in ("--build-arg", "=".join(item))),
            "--secret", f"id=pip.conf,src={secret}",
            *(part for path in paths for part in ("-v", f"{path}:{path}:ro")),
            "--target", target, "-t", tag, str(context),
        )  # fmt: skip
        return time.monotonic() - began

    def image(self, name: str) -> dict[str, Any]:
        """What podman knows of an image."""
        found: list[dict[str, Any]] = json.loads(self.podman("image", "inspect", name))
        return found[0]

    def inside(self, image: str, program: str) -> str:
        """Run a Python program in a new container that may do nothing; its output."""
        return self.podman(
            "run", "--rm", "--network", "none", "--read-only", "--read-only-tmpfs=false",
            "--cap-drop", "all", "--security-opt", "no-new-privileges",
            "--entrypoint", "python", image, "-c", program,
        )  # fmt: skip

    def state(self, container: str) -> dict[str, Any]:
        """A container's state: Status, Pid, ExitCode, StartedAt, ..."""
        found = json.loads(self.podman("container", "inspect", container))[0]
        return {**found["State"], "Restarts": found["RestartCount"]}

    @contextmanager
    def network(self) -> Iterator[str]:
        """A bridge network for as long as this lasts."""
        self.podman("network", "create", "--subnet", self.SUBNET, self.NETWORK)
        try:
            yield self.NETWORK
        finally:
            self.podman("network", "rm", "-f", self.NETWORK)

    def clean_up(self) -> None:
        """Delete everything that was made here."""
        for arguments in (
            ["pod", "rm", "-fa", "-t", "1"],
            ["rm", "-fa", "-t", "1"],
            ["volume", "rm", "-fa"],
            ["network", "rm", "-f", self.NETWORK],
        ):
            try:
                self.podman(*arguments)
            except CommandError:
                continue
        # Only what is below the store is unmounted, the deepest first.
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((m for m in mounts if m.startswith(f"{self.work}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        shutil.rmtree(self.work, ignore_errors=True)


def pip_configuration() -> tuple[str, list[str]]:
    """pip's settings on this machine as a pip.conf, and the paths here that they name."""
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

"""Third-party images are declared in one place, where digests are appended to their tags."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import yaml

from deploy.images_check import DEFAULT_BASE

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"flyspec-(orchestrator|verify|draft)\b")
DIGEST = "sha256:" + 64 * "7"
DOCKER = f"""#!/bin/sh
case "$4" in
  *grafana*) echo "no such host" >&2; exit 1;;
  *) echo "{DIGEST}";;
esac
"""


def images() -> dict[str, str]:
    """Those of `.env`, without digests."""
    lines = (ROOT / ".env").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if "_IMAGE=" in line)
    return {name: image.partition("@")[0] for name, image in found.items()}


def test_every_image_is_ours_or_from_that_place():
    found = images()
    assert len(found) == 3
    assert all(re.fullmatch(r"[\w.]+/[\w/-]+:[\w.-]+", image) for image in found.values())
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    used = set()
    for service in compose["services"].values():
        name = re.fullmatch(r"\$\{(\w+):\?.*\}", service["image"])
        if not OURS.match(service["image"]):
            assert name
            used.add(name[1])
        if "build" in service:
            assert service["build"]["args"]["BASE_IMAGE"].startswith("${BASE_IMAGE:?")
            used.add("BASE_IMAGE")
    assert used == set(found)
    for path in (ROOT / "k8s").rglob("*.yaml"):
        for image in re.findall(r"^\s*-?\s*image:\s*(\S+)", path.read_text(), re.MULTILINE):
            assert OURS.match(image), f"{path}: {image}"
    bases = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    stages = re.findall(r" AS ([\w-]+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(bases) - set(stages) == {"${BASE_IMAGE}"}


def test_the_defaults_of_who_does_not_read_it_are_the_same():
    base = images()["BASE_IMAGE"]
    assert f"ARG BASE_IMAGE={base}\n" in (ROOT / "Dockerfile").read_text()
    assert base == DEFAULT_BASE


def test_digests_are_added_and_renewed_where_a_registry_can_be_asked(tmp_path):
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    path = tmp_path / "env"
    path.write_text((ROOT / ".env").read_text() + f"OLD_IMAGE=a.b/c:1@sha256:{64 * '0'}\n")
    ran = subprocess.run(
        ["sh", ROOT / "deploy" / "pin_images.sh", path],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    text, found = path.read_text(), images()
    assert ran.returncode == 1
    assert ran.stderr == f"no such host\n{found['GRAFANA_IMAGE']} is not pinned\n"
    assert f"BASE_IMAGE={found['BASE_IMAGE']}@{DIGEST}\n" in text
    assert f"PROMETHEUS_IMAGE={found['PROMETHEUS_IMAGE']}@{DIGEST}\n" in text
    assert f"GRAFANA_IMAGE={found['GRAFANA_IMAGE']}\n" in text
    assert f"OLD_IMAGE=a.b/c:1@{DIGEST}\n" in text
    assert "COMPOSE_PROFILES=cpu\n" in text

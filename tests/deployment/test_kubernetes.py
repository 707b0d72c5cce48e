"""What the manifests ask of a cluster: its release, and credentials of a registry."""

from __future__ import annotations

import os
import re
from pathlib import Path

import yaml

from deploy.check_manifests import KUBERNETES
from tests.deployment.rendered import ROOT, kustomize


def test_documents_have_the_oldest_and_newest_kubernetes_that_is_checked() -> None:
    told = " ".join((ROOT / "docs" / "deployment.md").read_text().split())
    oldest, newest = KUBERNETES
    assert f"Kubernetes {oldest} or newer" in told
    assert f"against Kubernetes {oldest} and {newest}" in told


def test_images_come_from_a_private_registry(tmp_path: Path) -> None:
    """By the service account, hence for every pod, those of a LeaderWorkerSet and a Job too."""
    k8s = Path(os.path.relpath(ROOT / "k8s", tmp_path.resolve()))
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": [str(k8s / "overlays" / "multi-node")],
                "components": [str(k8s / "components" / "private-registry")],
            }
        )
    )
    objects = kustomize(tmp_path)
    (account,) = (o for o in objects if o["kind"] == "ServiceAccount")
    assert account["imagePullSecrets"] == [{"name": "flyspec-registry"}]
    own = {account["metadata"]["name"]}
    assert set(re.findall(r"serviceAccountName: (\S+)", yaml.safe_dump_all(objects))) == own
    assert "imagePullSecrets" in (ROOT / "docs" / "deployment.md").read_text()

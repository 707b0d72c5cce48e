"""What `make images-check` changes in the manifests before podman runs them."""

from __future__ import annotations

import copy
from pathlib import Path

import yaml

from deploy.images_check import mount_directories
from tests.deployment.rendered import SERVICES, render


def test_directories_stand_in_for_secrets_and_nothing_else_changes() -> None:
    before = copy.deepcopy(render("cpu-demo-tls"))
    after = list(yaml.safe_load_all(mount_directories(yaml.safe_dump_all(before), Path("/c"))))
    assert len(after) == len(before)
    mounted = set()
    for ours, theirs in zip(before, after, strict=True):
        if ours["kind"] != "Deployment":
            assert theirs == ours
            continue
        volumes = [o["spec"]["template"]["spec"].pop("volumes") for o in (theirs, ours)]
        assert theirs == ours
        for new, old in zip(*volumes, strict=True):
            if "secret" in old:
                service = ours["metadata"]["name"]
                mounted.add(service)
                assert new == {
                    "name": old["name"],
                    "hostPath": {"path": f"/c/{service}", "type": "Directory"},
                }
            else:
                assert new == old
    assert mounted == set(SERVICES)

"""Weights arrive from a hub: the Job of components/model-download, with a stand-in for `hf`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.deployment.rendered import (
    ROOT,
    Object,
    component,
    configured,
    container,
    environment,
    of_kind,
)

HF = """#!/bin/sh
echo "$@" >> "$ASKED"
for folder; do :; done
mkdir -p "$folder"
echo part > "$folder/config.json"
[ "$2" != owner/missing ]
"""
MODELS = """# directory, repository, revision

target owner/target v2
draft owner/draft
"""


def job(overlay: str) -> Object:
    (found,) = (o for o in of_kind(overlay, "Job") if o["metadata"]["name"] == "model-download")
    template: Object = found["spec"]["template"]
    return template


def download(folder: Path, models: str) -> tuple[int, list[str]]:
    """Run the Job's command in a folder; return its exit code, and what it asked of the hub."""
    own = container(job("gpu"))
    places = {m["name"]: m["mountPath"] for m in own["volumeMounts"]}
    assert own["workingDir"] == places["models"]
    programs, asked = folder / "programs", folder / "asked"
    programs.mkdir(exist_ok=True)
    (programs / "models.txt").write_text(models)
    (programs / "hf").write_text(HF)
    (programs / "hf").chmod(0o755)
    asked.write_text("")
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        [*own["command"], own["args"][0].replace(places["model-list"], str(programs))],
        cwd=folder, env={"PATH": path, "ASKED": str(asked)}, check=False,
    )  # fmt: skip
    return done.returncode, asked.read_text().splitlines()


def test_models_arrive_whole_and_once(tmp_path: Path) -> None:
    # Cut off while one is on its way: its directory is not there, and the others are.
    code, asked = download(tmp_path, MODELS + "other owner/missing")
    assert code != 0
    assert [line.split(" --exclude")[0] for line in asked] == [
        "download owner/target --revision v2",
        "download owner/draft --revision main",
        "download owner/missing --revision main",
    ]
    assert not (tmp_path / "other").exists()
    assert (tmp_path / "target" / "config.json").exists()
    assert (tmp_path / "draft" / "config.json").exists()
    # What is there is not asked for again: no weights change under a service that reads them.
    assert download(tmp_path, MODELS) == (0, [])


def test_the_token_is_where_it_is_looked_for() -> None:
    template = job("gpu")
    places = {m["name"]: m["mountPath"] for m in container(template)["volumeMounts"]}
    token = Path(environment("gpu", template)["HF_TOKEN_PATH"])
    assert token.parent.as_posix() == places["hub-token"]


@pytest.mark.parametrize("overlay", ["gpu", "multi-node"])
def test_the_list_has_the_models_that_services_ask_for(overlay: str) -> None:
    maps = {o["metadata"]["name"]: o["data"] for o in of_kind(overlay, "ConfigMap")}
    template = job(overlay)
    volumes = {v["name"]: v for v in template["spec"]["volumes"]}
    text = maps[volumes["model-list"]["configMap"]["name"]]["models.txt"]
    listed = {line.split()[0] for line in text.splitlines() if line and line[0] != "#"}
    asked = set()
    for _, pod, settings in configured(overlay):
        if component(pod) != "orchestrator":
            asked.add(settings.model)
            claim = {v["name"]: v for v in pod["spec"]["volumes"]}["models"]
            assert claim["persistentVolumeClaim"] == {
                **volumes["models"]["persistentVolumeClaim"], "readOnly": True,
            }  # fmt: skip
    assert asked == {f"/models/{directory}" for directory in listed}


def test_its_image_has_the_hubs_command() -> None:
    """`hf`: of huggingface_hub, which tokenizers requires, which every image has."""
    image = container(job("gpu"))["image"].partition(":")[0]
    assert image == "flyspec-orchestrator"
    assert re.search(r"^ +\"tokenizers>=", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert any(r.startswith("huggingface-hub") for r in distribution("tokenizers").requires or ())
    commands = distribution("huggingface_hub").entry_points.select(group="console_scripts")
    assert "hf" in commands.names
    program = shutil.which("hf", path=Path(sys.executable).parent)
    assert program is not None
    flags = re.findall(r" (--[a-z-]+)", container(job("gpu"))["args"][0])
    told = subprocess.run([program, "download", "--help"], capture_output=True, text=True).stdout
    assert all(flag in told for flag in flags)

"""Weights arrive from a hub: the Job of components/model-download, run against a hub of our own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

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

COMMIT = 40 * "a"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "original/model.pth": b"twice"}
MODELS = """# directory, repository, revision

target owner/target v2
draft owner/draft
"""


class Hub(BaseHTTPRequestHandler):
    """The few answers that downloads of a repository need, and what was asked."""

    asked: list[tuple[str, str | None]]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        found, body = 200, b"[]"
        if "/revision/" in self.path:
            files = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "owner/x", "sha": COMMIT, "siblings": files}).encode()
        elif "/tree/" in self.path:
            body = json.dumps([{"type": "file", "path": name, "size": len(data), "oid": COMMIT}
                               for name, data in FILES.items()]).encode()  # fmt: skip
        elif "/resolve/" in self.path and "missing" not in self.path:
            body = FILES[self.path.partition(f"/resolve/{COMMIT}/")[2]]
        else:
            found = 404
        self.send_response(found)
        self.send_header("ETag", f'"{len(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    handler = type("Ours", (Hub,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
        server.shutdown()


def job(overlay: str) -> Object:
    (found,) = (o for o in of_kind(overlay, "Job") if o["metadata"]["name"] == "model-download")
    template: Object = found["spec"]["template"]
    return template


def download(hub: str, folder: Path, models: str) -> subprocess.CompletedProcess[str]:
    """Run the Job's command in a folder, with the paths of its volumes in another."""
    template = job("gpu")
    own, mounted = container(template), folder / "mounted"
    mounted.mkdir(exist_ok=True)
    (mounted / "models.txt").write_text(models)
    (mounted / "token").write_text("hf_secret\n")
    places = {m["name"]: m["mountPath"] for m in own["volumeMounts"]}
    assert own["workingDir"] == places["models"]
    variables = environment("gpu", template)
    assert Path(variables["HF_TOKEN_PATH"]).parent.as_posix() == places["hub-token"]
    script = own["args"][0].replace(places["model-list"], str(mounted))
    return subprocess.run(
        [*own["command"], script],
        cwd=folder,
        env={
            **variables,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_HOME": str(folder / "home"),
            "HF_ENDPOINT": hub,
            "HF_TOKEN_PATH": str(mounted / "token"),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_models_arrive_whole_and_once(
    hub: tuple[str, list[tuple[str, str | None]]], tmp_path: Path
) -> None:
    address, asked = hub
    # Cut off while one is on its way: its directory is not there, and the others are.
    failed = download(address, tmp_path, MODELS + "other owner/missing")
    assert failed.returncode != 0
    assert not (tmp_path / "other").exists()
    for name in ("target", "draft"):
        there = {p.relative_to(tmp_path / name).as_posix(): p.read_bytes()
                 for p in (tmp_path / name).rglob("*")
                 if p.is_file() and ".cache" not in p.parts}  # fmt: skip
        assert there == {k: v for k, v in FILES.items() if not k.endswith(".pth")}
    assert any(path.startswith("/api/models/owner/target/revision/v2") for path, _ in asked)
    assert any(path.startswith("/api/models/owner/draft/revision/main") for path, _ in asked)
    assert {key for path, key in asked if "owner" in path} == {"Bearer hf_secret"}
    # What is there is not asked for again: no weights change under a service that reads them.
    asked.clear()
    again = download(address, tmp_path, MODELS)
    assert again.returncode == 0, again.stderr
    assert asked == []


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
    assert shutil.which("hf", path=Path(sys.executable).parent)

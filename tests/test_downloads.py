"""Models on a hub: what of them is downloaded, and what is said if they cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from flyspec.bundled import DRAFT, TARGET
from flyspec.downloads import download
from flyspec.errors import ConfigError
from flyspec.model_files import gguf_path, is_gguf, model_source, served_name, weight_bytes
from tests.fake_hub import fake_hub

pytest.importorskip("huggingface_hub")
GGUFS = ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf", "f16/tiny-f16-00001-of-00002.gguf",
         "f16/tiny-f16-00002-of-00002.gguf", "big-f16.gguf")  # fmt: skip


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """A model with what else repositories have, one in shards, GGUF files, and what is none."""
    root = tmp_path_factory.mktemp("repositories")

    def write(name, **files):
        for file, text in files.items():
            (path := root / name / file).parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return root / name

    small = {f: (DRAFT / f).read_bytes() for f in ("config.json", "tokenizer.json")}
    weights = (DRAFT / "model.safetensors").read_bytes()
    others = {"README.md": "A model.", "pytorch_model.bin": "pickle", "onnx/model.onnx": "onnx"}
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))})
    return {
        "team/draft": write("draft", **small, **others, **{"model.safetensors": weights}),
        "team/sharded": write(
            "sharded", **small, **{s: s for s in shards}, **{"consolidated.safetensors": "x"},
            **{"model.safetensors.index.json": index},
        ),
        "team/pickled": write("pickled", **small, **others),
        "team/files": write("files", **{f: f"GGUF {f}" for f in GGUFS}),
        "team/adapter": write("adapter", **{"adapter_config.json": "{}"}),
    }  # fmt: skip


@pytest.fixture
def hub(repositories, tmp_path, monkeypatch):
    """A hub, and an empty cache; as if HF_ENDPOINT and HF_HOME had been set at the start."""
    from huggingface_hub import constants

    with fake_hub(repositories) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        yield hub


def refusal(name):
    with pytest.raises(ConfigError) as refused:
        download(name)
    return str(refused.value)


def test_only_what_is_needed_is_downloaded_and_only_once(hub, capfd):
    download("team/draft")
    files = {"config.json", "tokenizer.json", "model.safetensors"}
    assert sorted(hub.asked) == sorted(f"team/draft/{file}" for file in files)
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("downloading")]
    assert line == f"downloading team/draft: 1.9 MB from {hub.url}"
    assert weight_bytes("team/draft") == (DRAFT / "model.safetensors").stat().st_size
    assert (served_name("team/draft"), is_gguf("team/draft")) == ("team/draft", False)
    assert model_source("team/draft").startswith("/")
    hub.repositories = {}
    download("team/draft")  # nothing is asked for


def test_shards_are_those_of_the_index(hub, capfd):
    download("team/sharded")
    asked = {file for file in hub.asked if file.endswith(".safetensors")}
    assert asked == {f"team/sharded/model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert "64 bytes in 2 files" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [("tiny-Q8_0.gguf", 1), ("q4_k_m", 1), ("f16/tiny-f16-00001-of-00002.gguf", 2)],
)
def test_one_gguf_model_of_a_repository(hub, wanted, parts):
    name = f"team/files:{wanted}"
    assert is_gguf(name)
    with pytest.raises(ConfigError, match="not in the cache"):
        gguf_path(name)
    download(name)
    assert len(hub.asked) == parts
    assert wanted.removesuffix(".gguf").lower() in gguf_path(name).as_posix().lower()
    assert served_name(name) == gguf_path(name).stem
    hub.repositories = {}
    download(name)


def test_what_a_hub_does_not_have(hub):
    listed = "big-f16.gguf, f16/tiny-f16-00001-of-00002.gguf, tiny-Q4_K_M.gguf, tiny-Q8_0.gguf"
    assert refusal("team/files:Q2_K").endswith(f"no such file; GGUF files there: {listed}")
    assert "no such file; GGUF files there: big" in refusal("team/files:other.gguf")
    several = "big-f16.gguf, f16/tiny-f16-00001-of-00002.gguf"
    assert refusal("team/files:f16").endswith(f"names several; GGUF files there: {several}")
    assert "has no safetensors; give one of its GGUF files" in refusal("team/files")
    assert "there is no model.safetensors" in refusal("team/pickled")
    assert "is an adapter, not a model" in refusal("team/adapter")
    host = hub.url.removeprefix("http://")
    assert f"no such directory, and no such repository at {host}" in refusal("team/nothing")
    assert "no such repository" in refusal("team/nothing:Q8_0")
    assert not [file for file in hub.asked if file.endswith((".bin", ".gguf"))]


def test_a_gated_repository(hub):
    hub.gated.add("team/draft")
    assert f"is gated: ask for access at {hub.url}/team/draft, then" in refusal("team/draft")


def test_a_hub_that_fails_or_is_not_there(hub, monkeypatch):
    hub.repositories = {"team/draft": hub.repositories["team/draft"] / "none"}
    assert "the repository has no config.json" in refusal("team/draft")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert "127.0.0.1 cannot be reached" in refusal("team/draft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids asking the hub" in refusal("team/draft:Q8_0")


@pytest.mark.parametrize("name", ["", ".", "/nowhere/model", "./model.gguf", "a/b/c"])
def test_paths_are_not_names_on_a_hub(hub, name):
    download(name)
    assert hub.asked == []


@pytest.mark.slow
def test_a_stack_serves_a_pair_from_a_hub(hub, tmp_path):
    hub.repositories = {"team/target": TARGET, "team/draft": DRAFT}
    pair = ("--model", "team/target", "--draft-model", "team/draft")
    command = "flyspec.cli", "generate", "--local", *pair, "--max-tokens", "4", "--json", "Hello"
    done = subprocess.run(
        [sys.executable, "-m", *command], text=True, capture_output=True, timeout=240,
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "team/target"
    said = [line for line in done.stderr.splitlines() if line.startswith("downloading")]
    assert [line.split(":")[0] for line in said] == [f"downloading {name}" for name in pair[1::2]]

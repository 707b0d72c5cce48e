"""`flyspec doctor`: what it finds of a pair, of ports and of a running installation."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flyspec.bundled import MODELS
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.doctor import Diagnosis, Mark, as_text, machine
from flyspec.doctor.gpus import visible
from flyspec.doctor.models import missing_packages
from flyspec.engine.native import library
from flyspec.errors import ConfigError
from flyspec.preflight.ports import check_port
from flyspec.rules.presets import DEFAULT_RULE
from flyspec_lab.ports import free_port
from tests.cli.processes import FREE_PORTS, invoke
from tests.tiny import make_model

NATIVE = "FLYSPEC_NATIVE"


def doctor(*arguments: str) -> tuple[int, str]:
    known = {k: v for k, v in os.environ.items() if not k.startswith("FLYSPEC_") or k == NATIVE}
    with mock.patch.dict(os.environ, known, clear=True):
        done = invoke("doctor", *arguments)
    assert done.err == ""
    return done.code, done.out


def found(*arguments: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    code, said = doctor(*FREE_PORTS, "--http-port", "-1", *arguments, "--json")
    document = json.loads(said)
    assert document["ok"] == (code == 0)
    return code, {
        (f["section"].partition(" model")[0], f["subject"]): f for f in document["findings"]
    }


def test_the_bundled_pair() -> None:
    code, findings = found()
    assert code == 0
    target = findings["target", "model"]["text"]
    assert target.startswith("llama, 6 layers, ")
    assert findings["target", "chat template"]["text"].startswith("renders chats")
    assert findings["pair", "tokenizers"]["facts"] == {"translated": False}
    weights = (MODELS / "target" / "model.safetensors").stat().st_size
    facts = findings["memory", "target"]["facts"]
    # In bfloat16, or twice that in float32 on a processor without it.
    assert 0.98 < facts["weights_bytes"] / weights < 2.02
    assert facts["kv_cache_bytes"] > 0
    assert findings["speculation", "rule"]["text"] == DEFAULT_RULE


def test_the_engine_is_the_one_that_a_start_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NATIVE, "off")
    library.find.cache_clear()
    _, findings = found("--dtype", "float32")
    library.find.cache_clear()
    assert "is in float32" in findings["target", "engine"]["text"]
    assert "FLYSPEC_NATIVE=off" in findings["this machine", "native step"]["text"]


def test_a_pair_with_different_tokenizers_is_translated() -> None:
    pair = ("--model", str(MODELS / "target"), "--draft-model")
    code, findings = found(*pair, str(MODELS / "draft-bytes"))
    assert code == 0
    tokenizers = findings["pair", "tokenizers"]
    assert (tokenizers["mark"], tokenizers["facts"]) == ("warning", {"translated": True})


def test_swapped_models_are_noticed() -> None:
    """By the doctor, and by a stack before it starts."""
    target, draft = str(MODELS / "target"), str(MODELS / "draft")
    _, findings = found("--model", draft, "--draft-model", target)
    swapped = findings["pair", "sizes"]
    assert swapped["mark"] == "warning"
    assert swapped["text"].endswith("were --model and --draft-model swapped?")
    said: list[str] = []
    Stack(StackOptions(model=draft, draft_model=target), on_event=said.append).check()
    assert said == [f"warning: {swapped['text']}"]
    Stack(StackOptions(model=target, draft_model=draft), on_event=said.append).check()
    assert len(said) == 1


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    model = Path(make_model(tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (model / "config.json").write_text(json.dumps(config))
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (model / file).unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, findings = found(
            "--model", str(model), "--draft-model", "/nowhere", "--rule", "flyy",
            "--num-speculative-tokens", "100", "--admin-port", str(port),
            "--kv-cache-memory-bytes", "1000",
        )  # fmt: skip
    assert code == 1
    assert findings["target", "quantization"]["text"] == (
        "compressed-tensors needs packages that are missing: pip install compressed-tensors"
    )
    assert findings["target", "chat template"]["mark"] == "warning"
    assert findings["draft", "model"]["text"].startswith("--draft-model /nowhere: no such dir")
    assert "--kv-cache-memory-bytes 1000: one session needs" in findings["memory", "target"]["text"]
    assert "did you mean fly?" in findings["speculation", "rule"]["text"]
    assert "at most 64" in findings["speculation", "K"]["text"]
    assert f"127.0.0.1:{port}: Address already in use" in findings["ports", "admin-port"]["text"]


def test_the_report_fits_a_terminal_and_needs_no_colour() -> None:
    _, said = doctor(*FREE_PORTS, "--model", str(MODELS / "target"), "--device", "cuda:99")
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in said
    assert any(line.startswith("  error    model") for line in lines)
    assert lines[-1] == "1 error"


def test_a_long_word_is_broken_to_fit() -> None:
    text = as_text([Diagnosis("a", "b", Mark.OK, "x" * 200)])
    assert max(map(len, text.splitlines())) <= 80


def test_a_running_installation() -> None:
    code, said = doctor("--address", "127.0.0.1:1")
    assert code == 1
    assert "no server at 127.0.0.1:1" in said


LISTING = "0, GPU-aa, Card A, 1000, 900\n1, GPU-bb, Card B, 2000, 100\n"


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["Card A", "Card B"]),
        ("1", ["Card B"]),
        ("GPU-bb,0", ["Card B", "Card A"]),
        ("1,7,0", ["Card B"]),
        ("", []),
    ],
)
def test_the_gpus_are_those_that_torch_would_see(chosen: str | None, names: list[str]) -> None:
    found = visible(LISTING, chosen)
    assert [gpu.name for gpu in found] == names
    assert [gpu.index for gpu in found] == list(range(len(names)))


@pytest.mark.parametrize("compiler", ["gcc", "clang", "cc"])
def test_without_a_c_compiler_nothing_is_compiled_for_gpus(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "cuda_problem", lambda: "")
    monkeypatch.setattr(machine, "gpus", list)
    (tmp_path / compiler).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    said = {finding.subject: finding for finding in machine._devices()}
    if compiler == "cc":  # which Triton does not look for
        assert said["compiler"].mark is Mark.WARNING
        assert "there is no C compiler, gcc or clang; install gcc" in said["compiler"].text
        assert "on copies" in said["FlashInfer"].text
    else:
        assert "compiler" not in said
        assert "by FlexAttention" in said["FlashInfer"].text
    monkeypatch.setenv("CC", "nowhere")
    (finding,) = [f for f in machine._devices() if f.subject == "compiler"]
    assert "CC=nowhere is not there" in finding.text


def test_packages_are_those_that_transformers_asks_for() -> None:
    assert missing_packages({}, "no-such-method") is None
    assert "bitsandbytes" in (missing_packages({"load_in_4bit": True}, "bitsandbytes") or ())
    assert set(missing_packages({}, "gptq") or ()) == {"gptqmodel", "optimum"}
    assert shutil.which("python") is None or missing_packages({}, "bitnet") == []


def test_an_outgoing_connection_is_told_from_a_server() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.bind(("127.0.0.1", port))
        client.connect(server.getsockname())
        with pytest.raises(ConfigError, match=r"in use \(by an outgoing connection; free a minute"):
            check_port("--port", "127.0.0.1", port)
    check_port("--port", "127.0.0.1", free_port())

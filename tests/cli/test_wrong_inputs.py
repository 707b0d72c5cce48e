"""Every command of reference/wrong-inputs.md gets the answer shown there, before torch loads."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from flyspec.bundled import MODELS
from flyspec.cli.service import ROOT
from tests.cli.processes import forked


class Row(NamedTuple):
    wrong: str
    typed: str
    answer: str
    time: str


def rows() -> list[Row]:
    lines = (ROOT / "docs/reference/wrong-inputs.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("| ")][1:]
    return [Row(*re.split(r"(?<!\\) \| ", line.removeprefix("| "))) for line in table]


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Path, int]]:
    """A folder with what the commands name, and a port that is taken."""
    llama = json.loads((MODELS / "target" / "config.json").read_text())
    tokenizer = (MODELS / "target" / "tokenizer.json").read_text()
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as taken:
        root = Path(name)

        def write(folder: str, config: dict[str, object] | None, **files: str) -> None:
            (root / folder).mkdir(exist_ok=True)
            if config is not None:
                files["config.json"] = json.dumps(config)
            for file, text in files.items():
                (root / folder / file).write_text(text)

        (root / "models").mkdir()
        for model in ("target", "draft"):
            (root / "models" / model).symlink_to(MODELS / model)
        weights = {"model.safetensors": "", "tokenizer.json": tokenizer}
        write("empty", None)
        write("pickled", llama, **{"pytorch_model.bin": "", "tokenizer.json": tokenizer})
        write("half", llama, **{"model.safetensors.index.json": index, "tokenizer.json": tokenizer})
        index = json.dumps({"weight_map": {"model.layers.1.mlp.up_proj.weight": "a.safetensors"}})
        files = {"model.safetensors.index.json": index, "a.safetensors": ""}
        write("deep", {**llama, "num_hidden_layers": 10**9}, **files)
        write("mute", llama, **{"model.safetensors": ""})
        adapter = '{"base_model_name_or_path": "meta/llama"}'
        write("adapter", None, **{"adapter_config.json": adapter})
        write(".", None, **{"model.gguf": "", "odd.jsonl": '{"say": "hello"}\n'})
        write("mamba", {"model_type": "mamba", "state_size": 16,
                        "architectures": ["MambaForCausalLM"]}, **weights)  # fmt: skip
        write("t5", {"model_type": "t5", "is_encoder_decoder": True}, **weights)
        write("llava", {"model_type": "llava", "vision_config": {},
                        "text_config": {"model_type": "llama"}}, **weights)  # fmt: skip
        write("whisper", {"model_type": "whisper", "is_encoder_decoder": True,
                          "num_mel_bins": 80}, **weights)  # fmt: skip
        yield root, taken.getsockname()[1]


@pytest.mark.usefixtures("default_ports")
@pytest.mark.parametrize("row", rows(), ids=lambda row: row.wrong)
def test_a_wrong_input_is_answered_before_torch_loads(row: Row, place: tuple[Path, int]) -> None:
    root, port = place
    words = row.typed.strip("`").replace("PORT", str(port)).split()
    variables = [word for word in words if re.match(r"[A-Z_]+=", word)]
    command = words[len(variables) :]
    if command[0] == "flyspec":
        module, arguments = "", command[1:]
    else:
        module, arguments = command[2], command[3:]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("FLYSPEC_", "HF_"))},
        "PYTHONPATH": str(ROOT), "HF_HOME": str(root / "hub"), "COLUMNS": "400",
        "HF_HUB_OFFLINE": "1", **dict(word.split("=", 1) for word in variables),
    }  # fmt: skip
    done = forked(*arguments, module=module, cwd=root, environment=environment)
    assert done.code == 2, done.err
    assert "torch was imported" not in done.err
    answer = _answer(done.err, port)
    if "cuda" in row.typed:  # the reason depends on what is installed
        reason = "--device cuda: .*; use --device cpu"
        assert re.search(reason, answer)
        assert re.search(reason, row.answer)
    else:
        assert answer == row.answer


def _answer(said: str, port: int) -> str:
    """The error in what a command printed, with names for what differs by machine."""
    lines = [line for line in said.splitlines() if re.match(r"(\w+: )?[eE]rror: ", line)]
    message = lines[-1] if lines else " ".join(said.split())
    message = re.sub(r"^(\w+: )?[eE]rror: (Invalid value: )?", "", message)
    message = re.sub(r" \(by [^)]*\)", " (by NAME, process ID)", message.replace(str(port), "PORT"))
    return message.replace("|", "\\|").replace("<", "&lt;")

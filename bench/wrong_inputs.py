"""Wrong inputs, the message that each gets, and its time: `python -m bench.wrong_inputs FILE`.

Writes docs/wrong-inputs.md. Each command runs as a process of its own; its time is the processor
time of that process, from its start to its end. A test holds the messages and the limit.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flyspec.bundled import MODELS
from flyspec.cli.service import ROOT

LIMIT_S = 1.0
"""Processor seconds that a wrong input may take."""
_PROGRAMS = {
    "flyspec": ["-m", "flyspec.cli"],
    "verify_service": ["-m", "verify_service"],
    "draft_service": ["-m", "draft_service"],
    "orchestrator": ["-m", "orchestrator"],
}
_VERIFY = "verify_service --port 0 --model"


@dataclass(frozen=True)
class WrongInput:
    """A command with something wrong in it; `environment` is set for it."""

    what: str
    command: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def typed(self) -> str:
        """The command as typed in a shell."""
        program, _, rest = self.command.partition(" ")
        shown = program if program == "flyspec" else f"python -m {program}"
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, shown, rest]).strip()


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended: its exit code, its message, and its processor time in seconds."""

    code: int
    message: str
    cpu_s: float


CASES = [
    WrongInput("a path that does not exist", f"{_VERIFY} models/targte"),
    WrongInput("an absolute path that does not exist", "flyspec serve --model /nowhere"),
    WrongInput("a directory without a config.json", f"{_VERIFY} ./empty"),
    WrongInput("a directory above the model's", f"{_VERIFY} ./models"),
    WrongInput("weights that are not safetensors", f"{_VERIFY} ./pickled"),
    WrongInput("a file of the weights is missing", f"{_VERIFY} ./half"),
    WrongInput("more layers than the weights have", f"{_VERIFY} ./deep"),
    WrongInput("a model without a tokenizer", f"{_VERIFY} ./mute"),
    WrongInput("an adapter without its base", f"{_VERIFY} ./adapter"),
    WrongInput("a GGUF file that is none", f"{_VERIFY} ./model.gguf"),
    WrongInput("a hub id, offline", f"{_VERIFY} owner/name", {"HF_HUB_OFFLINE": "1"}),
    WrongInput("a hub id that is none", f"{_VERIFY} owner/name/more"),
    WrongInput("a state-space model", f"{_VERIFY} ./mamba"),
    WrongInput("an encoder-decoder model", f"{_VERIFY} ./t5"),
    WrongInput("a vision-language model", f"{_VERIFY} ./llava"),
    WrongInput("an audio model", f"{_VERIFY} ./whisper"),
    WrongInput("a drafter's model that cannot draft", "flyspec serve --draft-model ./t5"),
    WrongInput("an unknown device", "flyspec serve --device banana"),
    WrongInput("the draft model's device", "flyspec generate --local --draft-device banana hi"),
    WrongInput("a GPU where there is none", f"{_VERIFY} models/target --device cuda",
               {"CUDA_VISIBLE_DEVICES": ""}),
    WrongInput("a device, by its variable", f"{_VERIFY} models/target",
               {"FLYSPEC_VERIFY_DEVICE": "gpu"}),
    WrongInput("a data type", "flyspec serve --dtype bfloat"),
    WrongInput("a data type, of a service", f"{_VERIFY} models/target --dtype fp16"),
    WrongInput("ranks that do not share the heads", f"{_VERIFY} models/target "
               "--tensor-parallel-size 3"),
    WrongInput("a context longer than the model's", f"{_VERIFY} models/target "
               "--max-model-len 100000"),
    WrongInput("a misspelled option", "flyspec serve --draft-modle models/draft"),
    WrongInput("a misspelled option, of a service", "draft_service --devise cpu"),
    WrongInput("a number that is none", "draft_service --max-sessions many"),
    WrongInput("an unknown rule", "flyspec serve --rule flyy"),
    WrongInput("an unknown drafter", "flyspec serve --drafter modle"),
    WrongInput("a drafter without a model", "draft_service --port 0 --drafter model"),
    WrongInput("K out of range", "flyspec serve --num-speculative-tokens 500"),
    WrongInput("K out of every range", "orchestrator --num-speculative-tokens 5000"),
    WrongInput("a port that is none", "flyspec serve --port 70000"),
    WrongInput("a port that is taken", "flyspec serve --port {taken}"),
    WrongInput("an address without a port", "flyspec generate --address localhost hi"),
    WrongInput("a URL instead of an address", "flyspec drafters list "
               "--admin-address http://127.0.0.1:50053"),
    WrongInput("a URL of a service", "orchestrator --port 0 --admin-port 0 "
               "--verify-address http://127.0.0.1:50052"),
    WrongInput("a key without its certificate", "flyspec serve --ssl-keyfile key.pem"),
    WrongInput("a certificate that does not exist", "orchestrator --port 0 --admin-port 0 "
               "--ssl-certfile no.pem --ssl-keyfile no.key"),
    WrongInput("a prompt file that does not exist", "flyspec generate --prompt-file no.jsonl"),
    WrongInput("a prompt file of unknown format", "flyspec generate --prompt-file odd.jsonl"),
]  # fmt: skip


@contextmanager
def folder() -> Iterator[tuple[Path, int]]:
    """Yield a folder with the models that the commands name, and a port that is taken."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as taken:
        root = Path(name)
        (root / "models").mkdir()
        for model in ("target", "draft"):
            (root / "models" / model).symlink_to(MODELS / model)
        llama = json.loads((MODELS / "target" / "config.json").read_text())
        tokenizer = (MODELS / "target" / "tokenizer.json").read_text()
        index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
        write = _Writer(root)
        (root / "empty").mkdir()
        write("pickled", llama, {"pytorch_model.bin": "", "tokenizer.json": tokenizer})
        write("half", llama, {"model.safetensors.index.json": index, "tokenizer.json": tokenizer})
        index = json.dumps({"weight_map": {"model.layers.1.mlp.up_proj.weight": "a.safetensors"}})
        files = {"model.safetensors.index.json": index, "a.safetensors": ""}
        write("deep", {**llama, "num_hidden_layers": 10**9}, files)
        write("mute", llama, {"model.safetensors": ""})
        write("adapter", None, {"adapter_config.json": '{"base_model_name_or_path": "meta/llama"}'})
        write(".", None, {"model.gguf": "", "odd.jsonl": '{"say": "hello"}\n'})
        kinds: dict[str, dict[str, object]] = {
            "mamba": {"state_size": 16, "architectures": ["MambaForCausalLM"]},
            "t5": {"is_encoder_decoder": True},
            "llava": {"vision_config": {}, "text_config": {"model_type": "llama"}},
            "whisper": {"is_encoder_decoder": True, "num_mel_bins": 80},
        }
        for kind, config in kinds.items():
            files = {"model.safetensors": "", "tokenizer.json": tokenizer}
            write(kind, {"model_type": kind, **config}, files)
        yield root, taken.getsockname()[1]


class _Writer:
    """Writes a model's directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(
        self, name: str, config: Mapping[str, object] | None, files: Mapping[str, str]
    ) -> None:
        directory = self._root / name
        directory.mkdir(exist_ok=True)
        for file, text in files.items():
            (directory / file).write_text(text)
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config))


def run(case: WrongInput, root: Path, taken: int) -> CommandEnd:
    """Run a command in the folder; its message has names instead of what differs by machine."""
    program, *arguments = case.command.format(taken=taken).split()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FLYSPEC_", "HF_"))}
    environment = {
        **inherited, "PYTHONPATH": str(ROOT), "HF_HOME": str(root / "hub"), "COLUMNS": "400",
        "HF_HUB_OFFLINE": "1", **case.environment,
    }  # fmt: skip
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, *_PROGRAMS[program], *arguments],
            cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=errors,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        said = errors.read().decode()
    message = _message(said).replace(str(taken), "PORT")
    message = re.sub(r" \(by [^)]*\)", " (by NAME, process ID)", message)
    message = re.sub(r"torch [0-9][\w.+]*", "torch X", message)
    return CommandEnd(process.returncode, message, usage.ru_utime + usage.ru_stime)


def _message(said: str) -> str:
    """The error in what a command printed, without log lines and usage."""
    lines = [line for line in said.splitlines() if re.match(r"(\w+: )?[eE]rror: ", line)]
    if not lines:
        return " ".join(said.split())
    return re.sub(r"^(\w+: )?[eE]rror: (Invalid value: )?", "", lines[-1])


def row(case: WrongInput, answer: CommandEnd) -> str:
    """Return the line of a case in the document's table."""
    shown = answer.message.replace("|", "\\|").replace("<", "&lt;")
    typed = case.typed.replace("{taken}", "PORT")
    return f"| {case.what} | `{typed}` | {shown} | {answer.cpu_s:.1f} s |"


def document() -> str:
    """Return docs/wrong-inputs.md."""
    rows = []
    with folder() as (root, taken):
        for case in CASES:
            answer = run(case, root, taken)
            print(f"{answer.cpu_s:.2f} s  {case.typed}", file=sys.stderr, flush=True)
            rows.append(row(case, answer))
    return "\n".join([
        "# Wrong inputs", "",
        "What a command answers to a wrong input: it names the option, or environment variable,",
        "that was set and says what to give instead. Nothing is loaded before; the exit code is 2.",
        "`flyspec doctor` with the options of `serve` shows everything at once.", "",
        "The time is the processor time of the whole process, Python's start included. Made by",
        "`python -m bench.wrong_inputs docs/wrong-inputs.md`.", "",
        "| wrong | typed | answer | time |", "|---|---|---|---:|", *rows, "",
    ])  # fmt: skip


if __name__ == "__main__":
    began = time.monotonic()
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
    print(f"{len(CASES)} commands in {time.monotonic() - began:.0f} s", file=sys.stderr)

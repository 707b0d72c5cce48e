"""flyspec on llama.cpp against llama.cpp's own server: `python -m bench.llama_cpp`.

Both run the bundled pair from the same GGUF files, made here, with the same llama.cpp: `make
llama-server` builds the server from the source of the llama-cpp-python that is installed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from demo.gguf import FOLDER, TYPES, convert, file_name
from flyspec.bundled import DRAFT, TARGET
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, say, single
from flyspec.cli.runtime import run_async
from flyspec.errors import ConfigError, FlyspecError
from flyspec.flags import Flag
from flyspec.process import available_cores
from flyspec.prompts import PromptFiles, PromptLimit
from flyspec.tokenizer import Tokenizer
from flyspec.word_problems import problems
from flyspec_lab.bench.openai import OpenAIServer
from flyspec_lab.bench.pair_checkpoints import pad_layers

SERVER = Path("build/llama.cpp/bin/llama-server")
BESIDE = "beside"
"""The draft model in the target's process, as a drafter; `model` is that of the draft service."""
_LEAST_CHANCES = (0.0, 0.5, 0.75)
_SLOWER = 1.3
"""Times the fastest setup's time after which another one is not tried any further."""
_CALIBRATED_ON, _CALIBRATED_TOKENS = 3, 64
_START_S = 60


# fmt: off
@dataclass(frozen=True)
class LlamaCppOptions:
    """What to compare, and on what."""

    server: Annotated[Path, Flag("llama.cpp's llama-server.")] = SERVER
    type: Annotated[str, Flag(
        f"Type of the files' matrices: {', '.join(TYPES)}.", metavar="TYPE",
    )] = "bf16"
    draft_type: Annotated[str | None, Flag(
        "Type of the draft model's matrices.", metavar="TYPE", default="as --type",
    )] = None
    target_layers: Annotated[int, Flag(
        "Layers to add to the target, which leave its texts as they are: a step of so small a "
        "model is no longer than the messages of a round.", min=0,
    )] = 0
    problems: Annotated[int, Flag("Number of fresh word problems.", min=1)] = 12
    repeats: Annotated[int, Flag("Timed runs per prompt.", min=1)] = 3
    prompt_file: PromptFiles = ()
    limit: PromptLimit = 12
    threads: Annotated[str, Flag(
        "Numbers of threads to try for the target, comma-separated.", default="1 and all",
    )] = ""
    drafted: Annotated[str, Flag(
        "Numbers of drafts that llama.cpp is tried with, comma-separated.",
    )] = "3,8,15,24"
    rules: Annotated[str, Flag("Rules, comma-separated.")] = "exact,fly"
    num_speculative_tokens: Annotated[str, Flag("Ks, comma-separated.")] = "15,24"
    drafters: Annotated[str, Flag(
        f"Drafters, comma-separated: `{BESIDE}` runs the draft model in the target's process, "
        "`model` in a draft service.",
    )] = f"{BESIDE},model"
    output: Annotated[Path | None, Flag("File for the report, as JSON.", default="none")] = None
    # fmt: on


@dataclass(frozen=True)
class Setup:
    """How llama-server runs: threads of the target, whether with flash attention; drafts at most,
    and their least probability."""

    threads: int
    flash: bool = True
    drafted: int = 0
    least_chance: float = 0.0

    def __str__(self) -> str:
        own = f"{self.threads} thread{'s' * (self.threads > 1)}"
        own += "" if self.flash else ", plain attention"
        if not self.drafted:
            return f"no drafts, {own}"
        return f"up to {self.drafted} drafts of at least {self.least_chance:g}, {own}"

    def flags(self, draft: Path) -> list[str]:
        flags = ["-t", str(self.threads), "-fa", "on" if self.flash else "off"]
        if self.drafted:
            flags += [
                "-md", str(draft), "-td", "1", "--spec-type", "draft-simple",
                "--spec-draft-n-max", str(self.drafted),
                "--spec-draft-p-min", str(self.least_chance),
            ]  # fmt: skip
        return flags


@dataclass(frozen=True)
class Rival:
    """The server and the files that it serves."""

    program: Path
    target: Path
    draft: Path

    @contextmanager
    def serving(self, setup: Setup) -> Iterator[str]:
        """Run the server; yields its URL."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            str(self.program), "-m", str(self.target), "--port", str(port), "-c", "4096", "-np",
            "1", *setup.flags(self.draft),
        ]  # fmt: skip
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                process.kill()
                process.wait()

    async def seconds(
        self, setup: Setup, prompts: Sequence[Sequence[int]], most: float = math.inf
    ) -> float:
        """Return the seconds of some prompts, each one's best of three; infinity beyond `most`."""
        with self.serving(setup) as url:
            server = await connected(url, prompts[0])
            total = 0.0
            for prompt in prompts:
                done = [await server.complete(prompt, _CALIBRATED_TOKENS) for _ in range(3)]
                total += min(completion.seconds for completion in done)
                if total > most:
                    return math.inf
        return total

    async def fastest(self, setups: Sequence[Setup], prompts: Sequence[Sequence[int]]) -> Setup:
        """Return the setup that continues the prompts fastest."""
        found: dict[Setup, float] = {}
        for setup in setups:
            most = _SLOWER * min(found.values(), default=math.inf)
            found[setup] = await self.seconds(setup, prompts, most)
            tokens = len(prompts) * _CALIBRATED_TOKENS
            rate = f"{tokens / found[setup]:.0f} tokens/s" if found[setup] < most else "slower"
            say(f"llama.cpp, {setup}: {rate}")
        return min(setups, key=found.__getitem__)


def numbers(text: str) -> list[int]:
    """Parse comma-separated numbers. Raises `ConfigError`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{text!r}: must be numbers, separated by commas") from None


async def connected(url: str, prompt: Sequence[int]) -> OpenAIServer:
    """Wait until a server answers."""
    server = OpenAIServer("llama.cpp", url, None)
    for left in reversed(range(_START_S * 10)):
        try:
            await server.connect(prompt)
            return server
        except FlyspecError:
            if not left:
                raise
            await asyncio.sleep(0.1)
    raise AssertionError


def calibration_prompts() -> list[list[int]]:
    """Return word problems as the bundled target's chats, in tokens."""
    from flyspec.engine.bundle import load_bundle
    from flyspec.engine.configuration import read_config
    from flyspec.values.chat import Chat

    name = str(TARGET)
    tokenizer = Tokenizer(load_bundle(name, read_config(name)[1]))
    chosen = problems("calibration", _CALIBRATED_ON)
    return [tokenizer.encode_chat(Chat.of_user(problem.question)) for problem in chosen]


async def compare(o: LlamaCppOptions, rival: Rival) -> int:
    """Find llama.cpp's fastest setups, then measure all in one run; return its exit code.

    Drafting is tried with the threads that are fastest without, and flyspec's target has as many,
    and the kind of attention that is fastest with drafts.
    """
    prompts = calibration_prompts()
    cores = numbers(o.threads) if o.threads else sorted({1, available_cores()})
    plain = await rival.fastest(
        [Setup(*way) for way in itertools.product(cores, (True, False))], prompts
    )
    ways = itertools.product((True, False), numbers(o.drafted)[::-1], _LEAST_CHANCES)
    drafting = await rival.fastest([Setup(plain.threads, *way) for way in ways], prompts)
    say(f"llama.cpp is fastest with {plain}, and with {drafting}")
    with ExitStack() as servers:
        against: list[Any] = []
        for name, setup in (("llama.cpp", plain), ("llama.cpp drafting", drafting)):
            url = servers.enter_context(rival.serving(setup))
            await connected(url, prompts[0])
            against += ["--against", f"{name}={url}"]
        command = [
            sys.executable, "-m", "flyspec.cli", "bench", "--model", rival.target, "--draft-model",
            rival.draft, "--heads", f"{BESIDE}={rival.draft}", "--drafter", o.drafters,
            "--threads", plain.threads, "--flash-attn", "on" if drafting.flash else "off",
            "--problems", o.problems, "--limit", o.limit,
            "--repeats", o.repeats, "--rules", o.rules, "--num-speculative-tokens",
            o.num_speculative_tokens, *against,
            *(flag for path in o.prompt_file for flag in ("--prompt-file", path)),
            *(["--output", o.output] if o.output else []),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(*map(str, command))
        return await process.wait()


@with_flags
def llama_cpp(options: LlamaCppOptions) -> None:
    """Compare flyspec on llama.cpp with llama.cpp's own speculative decoding, in one run.

    llama.cpp's server is tried with several numbers of threads, of drafts and probabilities first,
    and then measured at its best, with and without drafts. Drafts and targets are the same files.
    """
    if not options.server.is_file():
        raise ConfigError(f"--server {options.server}: no such file; build it: make llama-server")
    kinds = (options.type, options.draft_type or options.type)
    if unknown := next((kind for kind in kinds if kind not in TYPES), None):
        raise ConfigError(f"--type {unknown}: must be one of {', '.join(TYPES)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    paths, target = [], TARGET
    if options.target_layers:
        target = FOLDER / f"target-and-{options.target_layers}-layers"
        shutil.rmtree(target, ignore_errors=True)
        pad_layers(TARGET, target, options.target_layers)
    for model, kind in zip((target, DRAFT), kinds, strict=True):
        paths.append(FOLDER / file_name(model, kind))
        convert(model, kind, paths[-1])
    code = run_async(compare(options, Rival(options.server, *paths)))
    if code:
        raise FlyspecError(f"flyspec bench ended with code {code}")


if __name__ == "__main__":
    run(single(llama_cpp))

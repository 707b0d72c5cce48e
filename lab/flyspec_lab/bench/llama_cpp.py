"""llama.cpp's own server on the same GGUF files, at its fastest, with and without drafts.

`make llama-server` builds it from the source of the llama-cpp-python that is installed. It is tried
with one thread and all of them, both kinds of attention, and several numbers of drafts and least
probabilities of a draft.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flyspec.errors import ConfigError, FlyspecError
from flyspec.model_files import gguf_path, is_gguf
from flyspec.process import available_cores
from flyspec_lab.bench.openai import OpenAIServer
from flyspec_lab.bench.peers import Calibration, fastest

PLAIN, DRAFTING = "llama.cpp", "llama.cpp drafting"
_DRAFTED, _LEAST_CHANCES = (24, 15, 8, 3), (0.0, 0.5, 0.75)
_TOKENS = 64
_SLOWER = 1.3
"""Times the fastest setup's time after which another one is not tried any further."""
_CONTEXT = 4096
_START_S = 600


@dataclass(frozen=True)
class ServerSetup:
    """Threads of the target, whether with flash attention; drafts at most, and their least
    probability."""

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

    def flags(self, draft: str) -> list[str]:
        flags = ["-t", str(self.threads), "-fa", "on" if self.flash else "off"]
        if self.drafted:
            flags += [
                "-md", draft, "-td", "1", "--spec-type", "draft-simple",
                "--spec-draft-n-max", str(self.drafted),
                "--spec-draft-p-min", str(self.least_chance),
            ]  # fmt: skip
        return flags


@dataclass(frozen=True)
class LlamaServer:
    """The program, the files that it serves (`draft` may be empty), and requests at the same time.

    Raises `ConfigError` if there is no such program, or the models are not GGUF files.
    """

    program: Path
    target: str
    draft: str
    parallel: int = 1

    def __post_init__(self) -> None:
        if not self.program.is_file():
            raise ConfigError(
                f"--llama-server {self.program}: no such file; build it: make llama-server"
            )
        for name in filter(None, (self.target, self.draft)):
            if not is_gguf(name):
                raise ConfigError(f"--llama-server serves GGUF files; {name} is none")

    @contextlib.asynccontextmanager
    async def serving(
        self, name: str, setup: ServerSetup, prompt: Sequence[int]
    ) -> AsyncIterator[OpenAIServer]:
        """Run the server until it has answered, and then for as long as the context is open."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            str(self.program), "-m", str(gguf_path(self.target)), "--port", str(port),
            "-c", str(_CONTEXT * self.parallel), "-np", str(self.parallel),
            *setup.flags(str(gguf_path(self.draft)) if self.draft else ""),
        ]  # fmt: skip
        with tempfile.TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
            try:
                server = OpenAIServer(name, f"http://127.0.0.1:{port}")
                for left in reversed(range(5 * _START_S)):
                    try:
                        await server.connect(prompt)
                        break
                    except FlyspecError:
                        if process.returncode is not None or not left:
                            log.seek(0)
                            said = log.read().decode(errors="replace").strip()[-500:]
                            raise FlyspecError(f"{self.program} does not start: {said}") from None
                    await asyncio.sleep(0.2)
                yield server
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def calibrate(
        self, prompts: Sequence[Sequence[int]], say: Callable[[str], None]
    ) -> list[Calibration[ServerSetup]]:
        """Find the fastest setup without drafts, then with as many threads the one with drafts."""

        async def seconds(setup: ServerSetup, least: float) -> float:
            """Add up each prompt's best of three, or return infinity if it is too slow."""
            async with self.serving(PLAIN, setup, prompts[0]) as server:
                total = 0.0
                for prompt in prompts:
                    done = [await server.complete(prompt, _TOKENS) for _ in range(3)]
                    total += min(answer.seconds for answer in done)
                    if total > _SLOWER * least:
                        return math.inf
            say(f"llama.cpp, {setup}: {len(prompts) * _TOKENS / total:.1f} tokens/s")
            return total

        ways = itertools.product(sorted({1, available_cores()}), (True, False))
        found = [await fastest(PLAIN, [ServerSetup(*way) for way in ways], seconds)]
        if self.draft:
            drafts = itertools.product((True, False), _DRAFTED, _LEAST_CHANCES)
            setups = [ServerSetup(found[0].setup.threads, *way) for way in drafts]
            found.append(await fastest(DRAFTING, setups, seconds))
        return found

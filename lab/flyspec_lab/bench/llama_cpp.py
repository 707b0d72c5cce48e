"""llama.cpp's own server on the same GGUF files, at its fastest, with and without drafts.

`make llama-server` builds it from the source of the llama-cpp-python that is installed. It is tried
with one thread and all of them, both kinds of attention, and several numbers of drafts and least
probabilities of a draft.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from flyspec.errors import ConfigError, FlyspecError
from flyspec.model_files import gguf_path, is_gguf
from flyspec_lab.bench.modes import Complete
from flyspec_lab.bench.openai import OpenAIServer
from flyspec_lab.bench.peers import THREADS, Calibration, Setup, calibrate

PLAIN, DRAFTING = "llama.cpp", "llama.cpp drafting"
_MOST, _LEAST = "--spec-draft-n-max", "--spec-draft-p-min"
_DRAFTED, _LEAST_CHANCES = (24, 15, 8, 3), (0.0, 0.5, 0.75)
_CONTEXT = 4096
_START_S = 600


@dataclass(frozen=True)
class LlamaServer:
    """The program, the files that it serves (`draft` may be empty), and requests at the same time.

    Its setups are its flags. Raises `ConfigError` if there is no such program, or the models are
    not GGUF files.
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

    async def calibrate(self, prompts: Sequence[Sequence[int]]) -> list[Calibration]:
        """Find the fastest setup without drafts, then with the same flags the one with drafts."""
        frames = [{"-t": t, "-fa": attention} for t, attention in product(THREADS, ("on", "off"))]
        found = [await calibrate(PLAIN, [frames], self.serving, prompts)]
        if self.draft:
            drafts = [{_MOST: n, _LEAST: p} for n, p in product(_DRAFTED, _LEAST_CHANCES)]
            start = found[0].setup
            found.append(await calibrate(DRAFTING, [drafts], self.serving, prompts, start))
        return found

    @contextlib.asynccontextmanager
    async def serving(self, setup: Setup) -> AsyncIterator[Complete]:
        """Run the server until it has answered, and then for as long as the context is open."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = {
            "-m": gguf_path(self.target), "--port": port, "-c": _CONTEXT * self.parallel,
            "-np": self.parallel, **setup,
        }  # fmt: skip
        if _MOST in setup:
            flags |= {"-md": gguf_path(self.draft), "-td": 1, "--spec-type": "draft-simple"}
        with tempfile.TemporaryFile() as log:
            words = [str(word) for flag in flags.items() for word in flag]
            process = await asyncio.create_subprocess_exec(
                str(self.program), *words, stdout=log, stderr=log
            )
            try:
                server = OpenAIServer(f"--llama-server {self.program}", f"http://127.0.0.1:{port}")
                for left in reversed(range(5 * _START_S)):
                    try:
                        await server.connect([0])
                        break
                    except FlyspecError:
                        if process.returncode is not None or not left:
                            log.seek(0)
                            said = log.read().decode(errors="replace").strip()[-500:]
                            raise FlyspecError(f"{self.program} does not start: {said}") from None
                    await asyncio.sleep(0.2)
                yield server.complete
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

"""One service as a child process: start it, wait until it is ready, keep its log, signal it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flyspec
from flyspec.cli.child import IMPORTS, ChildJob
from flyspec.cli.fork_server import READY_FD, ForkedProcess, ForkServer
from flyspec.cli.stack_options import STACK_FLAGS
from flyspec.errors import ConfigError, FlyspecError
from flyspec.spelling import respell
from flyspec.startup import STAGE

ROOT = Path(flyspec.__file__).resolve().parent.parent
KEPT_LOG_LINES = 20
_BLOCK = 1 << 16
_ERROR = re.compile(r"(?:\w+: )?error: (.*)")
MODEL_IMPORTS = (
    "verify_service.server",
    "draft_service.server",
    "flyspec.engine.native.choice",
    "transformers.models.llama.modeling_llama",  # most models are Llamas, or resemble one
)
"""Modules that services with a model need, imported before their settings are known."""


_CAUSES = {
    signal.SIGILL: "an instruction that this processor lacks, or a miscompiled llama.cpp: "
    "docs/gguf.md#crashes",
    signal.SIGKILL: "out of memory, unless someone sent it",
    signal.SIGSEGV: "a fault in compiled code: a kernel, torch, or llama.cpp",
}
"""Likely causes of the signals that a service may die from."""


class ServiceDiedError(FlyspecError):
    """A service ended unexpectedly."""


@dataclass
class Child:
    """A child process: its name, last log lines, and the ports it announced (`facts`).

    `launch` it, then `run` a service in it; or `start` does both.
    """

    name: str
    process: asyncio.subprocess.Process | ForkedProcess
    stdin: int
    announcement: asyncio.StreamReader
    ready_fd: int
    facts: dict[str, Any] = field(default_factory=dict)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LOG_LINES))
    reader: asyncio.Task[None] | None = None
    pipes: list[asyncio.BaseTransport] = field(default_factory=list)

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        flags: Sequence[str],
        threads: int,
        on_log: Callable[[str], None],
        server: ForkServer | None = None,
    ) -> Child:
        """Start `python -m MODULE FLAGS`; it stops when this process ends, however it ends.

        Forked by `server` if there is one, which has then imported what a model needs.
        """
        imports = () if server is None else MODEL_IMPORTS
        child = await cls.launch(name, threads, on_log, imports, server)
        child.run(module, flags, {"OMP_NUM_THREADS": str(threads)})
        return child

    @classmethod
    async def launch(
        cls,
        name: str,
        threads: int,
        on_log: Callable[[str], None],
        imports: Sequence[str] = (),
        server: ForkServer | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a process, forked by `server` if there is one, that imports modules and waits."""
        stdin, output, announcement = os.pipe(), os.pipe(), os.pipe()
        process: asyncio.subprocess.Process | ForkedProcess
        try:
            if server is not None and server.running:
                ready_fd = READY_FD
                process = server.fork(imports, stdin[0], output[1], announcement[1])
            else:
                ready_fd = announcement[1]
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "flyspec.cli.child",
                    stdin=stdin[0],  # its end of file tells the child to stop
                    stdout=output[1],
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=[ready_fd],
                    start_new_session=True,  # Ctrl-C reaches only this process
                    env=child_environment(threads, environment) | {IMPORTS: ",".join(imports)},
                )  # fmt: skip
        except BaseException:
            for descriptor in (stdin[1], output[0], announcement[0]):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (stdin[0], output[1], announcement[1]):
                os.close(descriptor)
        log, log_pipe = await _reader(output[0])
        announced, ready_pipe = await _reader(announcement[0])
        child = cls(name, process, stdin[1], announced, ready_fd, pipes=[log_pipe, ready_pipe])
        child.reader = asyncio.ensure_future(child._read_log(log, on_log))
        return child

    def run(self, module: str, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run `python -m MODULE FLAGS` in it."""
        job = ChildJob(module, [*flags, "--ready-fd", str(self.ready_fd)], environment)
        with contextlib.suppress(BrokenPipeError):  # `ready` will say that it has ended
            os.write(self.stdin, job.to_line())

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ready(self, on_stage: Callable[[str], None] = lambda _: None) -> None:
        """Wait until it is ready, or raise the reason why it ended; report what it is doing."""
        while line := await self.announcement.readline():
            told = json.loads(line)
            if STAGE not in told:
                self.facts = told
                return
            on_stage(told[STAGE])
        raise await self.failure()

    async def ended(self) -> int:
        """Wait for its end and its last log lines; return the exit code."""
        code = await self.process.wait()
        if self.reader is not None:
            await asyncio.wait([self.reader], timeout=1.0)
        for pipe in self.pipes:
            pipe.close()
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1
        return code

    async def failure(self) -> FlyspecError:
        """Wait for its end; return its error message, or its exit code and last lines."""
        code = await self.ended()
        if code == 2 and self._errors:
            message = respell(self._errors[-1], STACK_FLAGS.get(self.name, {}))
            return ConfigError(f"{self.name} service: {message}")
        said = "".join(f"\n  {line}" for line in self.lines)
        return ServiceDiedError(f"{await self.how_it_ended()}{said and f'; last lines:{said}'}")

    @property
    def _errors(self) -> list[str]:
        """Error messages in its last lines."""
        return [match[1] for line in self.lines if (match := _ERROR.match(line))]

    async def how_it_ended(self) -> str:
        """Wait for its end; return a message with the exit code, or signal and cause."""
        code = await self.ended()
        how = f"code {code}"
        if code < 0:
            number = signal.Signals(-code)
            cause = _CAUSES.get(number)
            how = f"signal {number.name}" + (f" ({cause})" if cause else "")
        why = f": {self._errors[-1]}" if self._errors else ""
        return f"the {self.name} service ended with {how}{why}"

    async def buried(self) -> None:
        """Wait for its end, then kill processes it left behind."""
        await self.ended()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Signal it if it is running; SIGKILL also goes to the processes it started."""
        if self.process.returncode is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                if number is signal.SIGKILL:
                    os.killpg(self.pid, number)
                else:
                    self.process.send_signal(number)

    async def _read_log(self, log: asyncio.StreamReader, on_log: Callable[[str], None]) -> None:
        """Keep the last lines. Reads blocks so that the service never waits for its log."""
        rest = ""
        while block := await log.read(_BLOCK):
            *lines, rest = (rest + block.decode(errors="replace")).split("\n")
            rest = rest[-_BLOCK:]
            for line in filter(str.strip, lines):
                self.lines.append(line.rstrip())
                if not _ERROR.match(line):  # reported by `failure`
                    on_log(line.rstrip())
        if rest.strip():
            self.lines.append(rest)


def child_environment(threads: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child with this many threads for torch, and `more` variables."""
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": str(threads),
        "TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1", **(more or {}),
    }  # fmt: skip


async def _reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    return reader, transport

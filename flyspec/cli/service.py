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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flyspec
from flyspec.errors import ConfigError, FlyspecError
from flyspec.spelling import respell

ROOT = Path(flyspec.__file__).resolve().parent.parent
KEPT_LOG_LINES = 20
_BLOCK = 1 << 16
_ERROR = re.compile(r"(?:\w+: )?error: (.*)")
DRAFT_FLAGS = {
    f"--{name}": f"--draft-{name}"
    for name in ("model", "device", "dtype", "threads", "port", "gpu-memory-utilization",
                 "kv-cache-memory-bytes")
}  # fmt: skip
"""The stack's flags by those of the draft service."""


class ServiceDiedError(FlyspecError):
    """A service ended unexpectedly."""


@dataclass
class Child:
    """A child process: its name, last log lines, and the ports it announced (`facts`)."""

    name: str
    process: asyncio.subprocess.Process
    announcement: asyncio.StreamReader
    pipe: asyncio.BaseTransport
    facts: dict[str, Any] = field(default_factory=dict)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LOG_LINES))
    reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        flags: list[str],
        threads: int,
        on_log: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `python -m MODULE FLAGS`; it stops when this process ends, however it ends."""
        read_fd, write_fd = os.pipe()
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "flyspec.cli.child", module, *flags,
                "--ready-fd", str(write_fd),
                stdin=asyncio.subprocess.PIPE,  # its end of file tells the child to stop
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[write_fd],
                start_new_session=True,  # Ctrl-C reaches only this process
                env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": str(threads),
                     "TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1", **(environment or {})},
            )  # fmt: skip
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        announcement = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(announcement), os.fdopen(read_fd, "rb")
        )
        service = cls(name, process, announcement, pipe)
        service.reader = asyncio.ensure_future(service._read_log(on_log))
        return service

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ready(self) -> None:
        """Wait until it is ready, or raise the reason why it ended."""
        try:
            line = await self.announcement.readline()
        finally:
            self.pipe.close()
        if not line:
            raise await self.failure()
        self.facts = json.loads(line)

    async def ended(self) -> int:
        """Wait for its end and its last log lines; return the exit code."""
        code = await self.process.wait()
        if self.reader is not None:
            await asyncio.wait([self.reader], timeout=1.0)
        return code

    async def failure(self) -> FlyspecError:
        """Wait for its end; return its error message, or its exit code and last lines."""
        code = await self.ended()
        if code == 2 and self._errors:
            message = self._errors[-1]
            if self.name == "draft":
                message = respell(message, DRAFT_FLAGS)
            return ConfigError(f"{self.name} service: {message}")
        said = "".join(f"\n  {line}" for line in self.lines) or " none"
        return ServiceDiedError(f"{await self.how_it_ended()}; last lines:{said}")

    @property
    def _errors(self) -> list[str]:
        """Error messages in its last lines."""
        return [match[1] for line in self.lines if (match := _ERROR.match(line))]

    async def how_it_ended(self) -> str:
        """Wait for its end; return a message with the exit code or signal."""
        code = await self.ended()
        how = f"code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        why = f": {self._errors[-1]}" if self._errors else ""
        return f"the {self.name} service ended with {how}{why}"

    async def buried(self) -> None:
        """Wait for its end, then kill processes it left behind."""
        await self.ended()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Signal it if it is running; SIGKILL also goes to the processes it started."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if number is signal.SIGKILL:
                    os.killpg(self.pid, number)
                else:
                    self.process.send_signal(number)

    async def _read_log(self, on_log: Callable[[str], None]) -> None:
        """Keep the last lines. Reads blocks so that the service never waits for its log."""
        assert self.process.stdout is not None
        rest = ""
        while block := await self.process.stdout.read(_BLOCK):
            *lines, rest = (rest + block.decode(errors="replace")).split("\n")
            rest = rest[-_BLOCK:]
            for line in filter(str.strip, lines):
                self.lines.append(line.rstrip())
                if not _ERROR.match(line):  # reported by `failure`
                    on_log(line.rstrip())
        if rest.strip():
            self.lines.append(rest)

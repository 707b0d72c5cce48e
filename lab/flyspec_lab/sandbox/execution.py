"""Runs a program with its tests in the sandbox and says whether they passed."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import IO

from flyspec.errors import ConfigError, FlyspecError
from flyspec_lab.sandbox.bubblewrap import SandboxLimits, bubblewrap_command
from flyspec_lab.sandbox.system_calls import system_call_filter

_END_S = 60.0
_PIPE_BYTES = 1 << 16  # what a pipe holds; who writes more has to wait
_READY = b"ready\n"
_LIMITS = SandboxLimits()
_SIGNALED = 128  # and the signal's number, in bubblewrap's exit status
_STOPPED_BY = {24: "CPU time (SIGXCPU)", 9: "CPU time or memory (SIGKILL)", 25: "file size"}


@dataclass(frozen=True)
class Execution:
    """Outcome of all tests; of a failure, the reason in a few words, as the program tells it."""

    passed: bool
    detail: str = ""


def run_tests(program: str, tests: str, limits: SandboxLimits = _LIMITS) -> Execution:
    """Run Python source, then its tests in the same variables; an exception is a failure.

    Output is discarded, and all its processes are gone afterwards. Raises `ConfigError` if the
    sandbox is missing or does not work; nothing is ever run outside of it.
    """
    request = json.dumps({"program": program, "tests": tests}).encode()
    key, challenge = secrets.token_bytes(32), secrets.token_bytes(32)
    with (
        _holding(request) as program_fd,
        _holding(system_call_filter()) as filter_fd,
        _pipe() as (told, info_fd),
    ):
        process = subprocess.Popen(
            bubblewrap_command(limits, program_fd, filter_fd, info_fd),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(program_fd, filter_fd, info_fd),
            start_new_session=True,  # Ctrl-C is for us, and makes no answer wrong
        )
        with process:
            assert process.stdin
            try:
                with suppress(BrokenPipeError):  # bubblewrap itself has failed, and says why
                    process.stdin.write(key + challenge)
                    process.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(limits.wall_s)
                status = process.returncode
            finally:
                _end(process, told)
            output, errors = _written(process.stdout), _written(process.stderr)
    if not output.startswith(_READY):
        said = " ".join(errors.decode(errors="replace").split())
        raise ConfigError(
            "generated code is run only in a sandbox, and bubblewrap does not work here: "
            f"{said or 'it did not start'}; it needs version 0.8 and, unless root starts it, "
            "user namespaces"
        )
    if status is not None and status < 0:
        raise FlyspecError(f"bubblewrap was ended from outside by signal {-status}")
    answer = output.removeprefix(_READY)
    expected = b"passed " + hashlib.blake2b(challenge, key=key).hexdigest().encode()
    if status == 0 and hmac.compare_digest(answer, expected):
        return Execution(True)
    return Execution(False, _reason(status, answer, limits))


@lru_cache(maxsize=1)
def check_sandbox() -> None:
    """Raise `ConfigError` if generated code cannot be run here; tried once."""
    if not run_tests("x = 1", "assert x == 1").passed:
        raise ConfigError("the sandbox for generated code does not work: a trivial program failed")


def _written(pipe: IO[bytes] | None) -> bytes:
    """Return what has been written to a pipe."""
    assert pipe
    os.set_blocking(pipe.fileno(), False)
    try:
        return os.read(pipe.fileno(), _PIPE_BYTES)
    except BlockingIOError:
        return b""


def _end(process: subprocess.Popen[bytes], told: int) -> None:
    """Kill bubblewrap, and with it, by `--die-with-parent`, all others; wait until they are gone.

    The first process of a process namespace ends only after all others in it. `told` has its id.
    """
    first = None
    with suppress(BlockingIOError, ValueError, ProcessLookupError):
        first = os.pidfd_open(json.loads(os.read(told, _PIPE_BYTES))["child-pid"])
    process.kill()
    if first is not None:
        try:
            select.select([first], [], [], _END_S)
        finally:
            os.close(first)


def _reason(status: int | None, answer: bytes, limits: SandboxLimits) -> str:
    """Return why a program failed; without a status, it had to be stopped."""
    if status is None:
        return f"took more than {limits.wall_s:g} s"
    if answer.startswith(b"failed "):
        said = answer.removeprefix(b"failed ").decode(errors="replace")
        return re.sub(r"[^ -~]", "?", said)
    if what := _STOPPED_BY.get(status - _SIGNALED):
        return f"was killed at its limit of {what}"
    return f"ended before its tests did (exit status {status})"


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Give a pipe: where to read, without waiting, and where to write."""
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    try:
        yield ends
    finally:
        for fd in ends:
            os.close(fd)


@contextmanager
def _holding(data: bytes) -> Iterator[int]:
    """Give a file descriptor from which to read the data."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        yield file.fileno()

"""Runs a program with its tests in the sandbox and says whether they passed."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import select
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache

from flyspec.errors import ConfigError, FlyspecError
from flyspec_lab.sandbox.bubblewrap import SandboxLimits, bubblewrap_command
from flyspec_lab.sandbox.system_calls import system_call_filter

_START_S = 60.0
_MAX_BYTES = 4096
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
            try:
                heard = _talk(process, key + challenge, limits.wall_s)
            finally:
                _end(process, told)
    if not heard.ready:
        said = " ".join(heard.errors.decode(errors="replace").split())
        raise ConfigError(
            "generated code is run only in a sandbox, and bubblewrap does not work here: "
            f"{said or 'it did not start'}; it needs version 0.8 and, unless root starts it, "
            "user namespaces"
        )
    if heard.exit_status is not None and heard.exit_status < 0:
        raise FlyspecError(f"bubblewrap was ended from outside by signal {-heard.exit_status}")
    answer = bytes(heard.output).removeprefix(_READY)
    expected = b"passed " + hashlib.blake2b(challenge, key=key).hexdigest().encode()
    if heard.exit_status == 0 and hmac.compare_digest(answer, expected):
        return Execution(True)
    return Execution(False, _reason(heard, answer, limits))


@lru_cache(maxsize=1)
def check_sandbox() -> None:
    """Raise `ConfigError` if generated code cannot be run here; tried once."""
    if not run_tests("x = 1", "assert x == 1").passed:
        raise ConfigError("the sandbox for generated code does not work: a trivial program failed")


@dataclass
class _Heard:
    """Result of the sandbox; `exit_status` is None if it had to be stopped."""

    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    exit_status: int | None = None

    @property
    def ready(self) -> bool:
        return self.output.startswith(_READY)

    @property
    def too_much(self) -> bool:
        return max(len(self.output), len(self.errors)) >= _MAX_BYTES


def _talk(process: subprocess.Popen[bytes], secret: bytes, wall_s: float) -> _Heard:
    """Hand over the secret and listen until the end, the time limit or too long an answer."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with suppress(BrokenPipeError):  # bubblewrap itself has failed, and says why
        process.stdin.write(secret)
        process.stdin.close()
    heard = _Heard()
    deadline = time.monotonic() + _START_S
    started = False
    exit_fd = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as waiting:
            waiting.register(exit_fd, selectors.EVENT_READ)
            for pipe, into in ((process.stdout, heard.output), (process.stderr, heard.errors)):
                os.set_blocking(pipe.fileno(), False)
                waiting.register(pipe, selectors.EVENT_READ, into)
            while not heard.too_much and (left := deadline - time.monotonic()) > 0:
                ready = [key for key, _ in waiting.select(left)]
                for key in ready:
                    if key.data is not None and not _read(key.fd, key.data):
                        waiting.unregister(key.fileobj)
                if heard.ready and not started:
                    started, deadline = True, time.monotonic() + wall_s
                if any(key.fd == exit_fd for key in ready):
                    heard.exit_status = process.wait()
                    _read(process.stdout.fileno(), heard.output)
                    _read(process.stderr.fileno(), heard.errors)
                    break
    finally:
        os.close(exit_fd)
    return heard


def _read(fd: int, into: bytearray) -> bool:
    """Read what is there, within limits; return whether there may be more to come."""
    try:
        data = os.read(fd, _MAX_BYTES)
    except BlockingIOError:
        return True
    into += data
    return bool(data)


def _end(process: subprocess.Popen[bytes], told: int) -> None:
    """Kill bubblewrap, and with it, by `--die-with-parent`, all others; wait until they are gone.

    The first process of a process namespace ends only after all others in it. `told` has its id.
    """
    first = None
    with suppress(BlockingIOError, ValueError, ProcessLookupError):
        first = os.pidfd_open(json.loads(os.read(told, _MAX_BYTES))["child-pid"])
    process.kill()
    if first is not None:
        try:
            select.select([first], [], [], _START_S)
        finally:
            os.close(first)


def _reason(heard: _Heard, answer: bytes, limits: SandboxLimits) -> str:
    if heard.too_much:
        return "wrote to a file descriptor that is not its own"
    if heard.exit_status is None:
        return f"took more than {limits.wall_s:g} s"
    if answer.startswith(b"failed "):
        said = answer.removeprefix(b"failed ").decode(errors="replace")
        return re.sub(r"[^ -~]", "?", said)
    if what := _STOPPED_BY.get(heard.exit_status - _SIGNALED):
        return f"was killed at its limit of {what}"
    return f"ended before its tests did (exit status {heard.exit_status})"


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

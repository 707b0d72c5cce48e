"""Runs a program and then its tests, inside the sandbox; imports nothing of flyspec.

Standard input has 32 bytes of key and 32 of challenge; /program.json has program and tests, and
the only argument the limits. The answer on standard output is a line `ready`, and then `passed`
with a digest that needs both key and challenge, or `failed` with the reason. The challenge is read
only once all tests have passed, so ending early or writing to any file descriptor is no pass.

Program and tests share an interpreter, as every benchmark has it. A program written against this
very file could therefore still pretend to pass, as one could whose results say they equal
everything; it could do no harm by that.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import sys
from types import CodeType
from typing import Any


def main() -> None:
    key = os.read(0, 32)
    with open("/program.json", encoding="utf-8") as file:
        request = json.load(file)
    channel = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 10)
    challenge = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
    _restrict(json.loads(sys.argv[1]))
    os.write(channel, b"ready\n")
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    # Held on to, since the program may replace them where they come from.
    read, write, leave, digest, own_id = os.read, os.write, os._exit, hashlib.blake2b, os.getpid
    process_id = own_id()
    reason = _run(request["program"], request["tests"])
    if own_id() != process_id:  # a copy of the program gives no answer
        leave(1)
    if reason is None:
        write(channel, b"passed " + digest(read(challenge, 32), key=key).hexdigest().encode())
        leave(0)
    write(channel, b"failed " + reason.encode("utf-8", "replace")[:400])
    leave(1)


def _restrict(limits: dict[str, Any]) -> None:
    """Become nobody and accept the limits, both for good."""
    if limits["identity"] is not None:
        os.setgroups([])
        os.setgid(limits["identity"])
        os.setuid(limits["identity"])
    for what, value in (
        (resource.RLIMIT_NPROC, limits["num_processes"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(what, (value, value))
    # A signal at first, which says why, and the end a second later.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))


def _run(program: str, tests: str) -> str | None:
    """Return why it failed. Tests are compiled apart, so that no open quote swallows them."""
    execute = exec
    try:
        codes: list[CodeType] = [
            compile(source, name, "exec", dont_inherit=True)
            for source, name in ((program, "<program>"), (tests, "<tests>"))
        ]
        # Without a name of its own, as HumanEval runs it: `__name__` is that of `builtins`.
        variables: dict[str, Any] = {}
        for code in codes:
            execute(code, variables)
    except BaseException as error:
        try:
            said = " ".join(str(error).split())
        except BaseException:
            said = ""
        return f"{type(error).__name__}: {said}".rstrip(": ")
    return None


if __name__ == "__main__":
    main()

"""Limits of generated code: the command line of bubblewrap.

    /python         this Python's interpreter and standard library, read-only
    /lib, /usr/lib  the system's shared libraries, read-only
    /dev            null and urandom
    /tmp            a small file system in memory, the only place to write to

There is no network, no /proc, no program but Python, and no process but its own. Needs bubblewrap
0.8 (Debian 12, Ubuntu 24.04).

The number of processes is limited per user id. Started by root, the code becomes a user whose id
nobody has, since the limit does not bind root; started by a user, it is in a user namespace, which
counts for itself since Linux 5.14.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from flyspec.errors import ConfigError

_INSIDE = Path(__file__).with_name("inside.py")
_NOBODY = 65534
# Past what systemd gives to containers (up to 0x6FFFFFFF), and below 2^31.
_UNUSED_IDS = range(0x70000000, 0x7FFFFFFF)
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")


@dataclass(frozen=True)
class SandboxLimits:
    """Resources of generated code. Memory and CPU time are limits of each of its processes."""

    wall_s: float = 30.0
    """Time until all of it is killed: generous, since a busy machine must change no score."""
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 4 << 20
    """Size of /tmp, and of any file."""
    num_processes: int = 8
    """Processes and threads, including two of the sandbox's own."""
    open_files: int = 64


def bubblewrap_command(
    limits: SandboxLimits, program_fd: int, filter_fd: int, info_fd: int
) -> list[str]:
    """Return the command that runs `inside.py` on the program in a file descriptor.

    `filter_fd` has the filter of system calls; the sandbox's first process id goes to `info_fd`.
    Raises `ConfigError` if bubblewrap is not installed.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigError(
            "generated code is run only in a sandbox, and its program bwrap is not on the PATH; "
            "install bubblewrap (apt-get install bubblewrap)"
        )
    identity = secrets.choice(_UNUSED_IDS) if _is_real_root() else None
    request = json.dumps({"identity": identity, **asdict(limits)})
    return [
        bwrap, "--die-with-parent", "--new-session", "--clearenv",
        "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
        "--unshare-cgroup-try", "--hostname", "sandbox",
        # Root keeps what it needs to become somebody else, which takes even that from it.
        *(
            ("--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY))
            if identity is None
            else ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
        ),
        *_directories("/python", "/python/bin", f"/python/{sys.platlibdir}", "/usr", "/dev"),
        *_python(),
        *_shared_libraries(),
        "--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom",
        "--perms", "1777", "--size", str(limits.file_bytes), "--tmpfs", "/tmp",
        "--perms", "0444", "--ro-bind-data", str(program_fd), "/program.json",
        "--ro-bind", str(_INSIDE), "/inside.py",
        "--remount-ro", "/", "--chdir", "/tmp",
        "--seccomp", str(filter_fd), "--info-fd", str(info_fd),
        "--setenv", "PYTHONHASHSEED", "0",
        "/python/bin/python", "-S", "-s", "-P", "-B", "/inside.py", request,
    ]  # fmt: skip


def _is_real_root() -> bool:
    """True if this is root in the first user namespace, to which all ids are known."""
    try:
        mapped = Path("/proc/self/uid_map").read_text().split()
    except OSError:
        return False
    return os.geteuid() == 0 and mapped == ["0", "0", str(2**32 - 1)]


def _directories(*paths: str) -> Iterator[str]:
    """Yield options that make directories; those that bubblewrap makes itself are private."""
    for path in paths:
        yield from ("--perms", "0755", "--dir", path)


def _python() -> Iterator[str]:
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    name = f"/python/{sys.platlibdir}"
    yield from ("--ro-bind", os.path.realpath(sys.executable), "/python/bin/python")
    base = Path(sys.base_prefix).resolve()
    if base == Path("/usr"):  # its libraries are among the system's
        yield from ("--ro-bind", str(standard), f"{name}/{standard.name}")
    else:
        yield from ("--ro-bind", str(standard.parent), name)
        yield from ("--setenv", "LD_LIBRARY_PATH", name)
    for packages in ("site-packages", "dist-packages"):
        if (standard / packages).is_dir():
            yield from ("--tmpfs", f"{name}/{standard.name}/{packages}")


def _shared_libraries() -> Iterator[str]:
    for path in _LIBRARIES:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            if path.count("/") > 2:
                yield from _directories(os.path.dirname(path))
            yield from ("--ro-bind", path, path)
    yield from _directories("/etc")
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")

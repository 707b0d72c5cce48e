"""The filter of system calls for generated code, as a classic BPF program for seccomp.

It closes what namespaces and resource limits leave open: new user namespaces and with them most of
the kernel, memory that no limit counts (System V, memfd), keyrings, tracing, and sockets, of which
some families (AF_VSOCK) know no network namespace. Everything else is allowed.
"""

from __future__ import annotations

import errno
import platform
import struct

from flyspec.errors import ConfigError

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000  # linux/seccomp.h
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*, but for CLONE_NEWTIME, which clone() does not know
_X32 = 0x40000000

_CLONE3 = 435
_SAME_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
DENIED = {
    # architecture: (its number in linux/audit.h, clone, what is denied)
    "x86_64": (0xC000003E, 56, {
        "socket": 41, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
        "pivot_root": 155, "chroot": 161, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "kcmp": 312, "add_key": 248, "request_key": 249, "keyctl": 250,
        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "shmget": 29, "shmat": 30,
        "semget": 64, "msgget": 68, "memfd_create": 319, "syslog": 103,
    }),
    "aarch64": (0xC00000B7, 220, {
        "socket": 198, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39,
        "pivot_root": 41, "chroot": 51, "ptrace": 117, "process_vm_readv": 270,
        "process_vm_writev": 271, "kcmp": 272, "add_key": 217, "request_key": 218, "keyctl": 219,
        "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "shmget": 194, "shmat": 196,
        "semget": 190, "msgget": 186, "memfd_create": 279, "syslog": 116,
    }),
}  # fmt: skip


def system_call_filter() -> bytes:
    """Return the program for this machine. Raises `ConfigError` where its numbers are unknown."""
    machine = platform.machine()
    if machine not in DENIED:
        raise ConfigError(
            f"generated code is not run on {machine}: the sandbox knows only "
            f"{' and '.join(DENIED)}; score it on such a machine"
        )
    architecture, clone, denied = DENIED[machine]
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture, on_true=1),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":  # the same calls by other numbers
        program += [_instruction(_AT_LEAST, _X32, on_false=1), _fail(errno.ENOSYS)]
    for number in (*denied.values(), *_SAME_EVERYWHERE.values()):
        program += [_instruction(_EQUAL, number, on_false=1), _fail(errno.EPERM)]
    program += [
        # Its flags are in memory, which no filter can read; the C library then calls clone.
        _instruction(_EQUAL, _CLONE3, on_false=1),
        _fail(errno.ENOSYS),
        _instruction(_EQUAL, clone, on_false=3),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_ANY_BIT, _NEW_NAMESPACES, on_false=1),
        _fail(errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _fail(error: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | error)


def _instruction(code: int, value: int, on_true: int = 0, on_false: int = 0) -> bytes:
    """Return a `struct sock_filter`; jumps count instructions to skip."""
    return struct.pack("=HBBI", code, on_true, on_false, value)

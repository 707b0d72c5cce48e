"""Starts services by forking one process that has imported what they need.

Importing torch and transformers takes most of a start; this way it is done once for all services.
The server (`python -m flyspec.cli.fork_server FD`) has one thread and never touches a device or
makes a connection, so its children are as good as processes of their own. A request names modules
to import first and brings three descriptors; the answers are process ids and, later, exit codes.
Each child then waits for its `ChildJob` on standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

_MOST_BYTES = 1 << 16
_DEVICES = "nvidia[0-9]*", "dxg", "kfd", "davinci[0-9]*", "accel*"
"""Device files of accelerators: NVIDIA's, WSL's, AMD's, Ascend's and others'."""
READY_FD = 3
"""A child's descriptor of the pipe on which it announces that it is ready."""
_SINGLE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's library would start threads when it is imported; nothing here multiplies with numpy."""


def can_fork(devices: Sequence[str]) -> bool:
    """True if services on these devices may be forked; not if one could use an accelerator.

    Importing libraries may initialise an accelerator's driver, which no child can use then.
    """
    if sys.platform != "linux":
        return False
    return all(d == "cpu" for d in devices) or not any(
        next(Path("/dev").glob(pattern), None) for pattern in _DEVICES
    )


class ForkedProcess:
    """A process forked by the server, with what is used of `asyncio.subprocess.Process`.

    `pid` is 0 until the server has forked it.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def ended(self, returncode: int) -> None:
        if not self._ended.is_set():
            self.returncode = returncode
            self._ended.set()

    def lost(self) -> None:
        """Kill it: the server ended, which alone would learn of its end."""
        if not self._ended.is_set():
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            self.ended(-signal.SIGKILL)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.pid and self.returncode is None:
            os.kill(self.pid, number)


class ForkServer:
    """The client's side. Start it, fork, close it once its children have ended."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._server: asyncio.subprocess.Process | None = None
        self._children: list[ForkedProcess] = []

    async def start(self, environment: Mapping[str, str]) -> None:
        with self.connection() as theirs:
            self._server = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "flyspec.cli.fork_server", str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches only this process
                env={**environment, **_SINGLE_THREAD},
            )  # fmt: skip

    def connection(self) -> socket.socket:
        """Return the server's end of a new connection; this end is read from now on."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return theirs

    @property
    def running(self) -> bool:
        return self._socket is not None

    def fork(
        self, imports: Sequence[str], stdin: int, output: int, announcement: int
    ) -> ForkedProcess:
        """Ask for a child once `imports` are imported, and return at once.

        It reads from `stdin`, writes to `output`, and has `announcement` as `READY_FD`.
        """
        process = ForkedProcess()
        self._children.append(process)
        if self._socket is None:
            process.lost()
            return process
        request = json.dumps({"child": len(self._children) - 1, "imports": imports})
        socket.send_fds(self._socket, [request.encode()], [stdin, output, announcement])
        return process

    async def close(self) -> None:
        """End the server, and with it children that are still running or not yet forked."""
        self._hang_up()
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                self._server.kill()
            await self._server.wait()

    def _read(self) -> None:
        """Note what the server tells."""
        while self._socket is not None:
            try:
                message = self._socket.recv(_MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._hang_up()
                return
            told = json.loads(message)
            child = self._children[told["child"]]
            if "pid" in told:
                child.pid = told["pid"]
            else:
                child.ended(told["returncode"])

    def _hang_up(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for child in self._children:
            child.lost()


# --- in the server's process ------------------------------------------------------------------


class _Forker:
    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._children: dict[int, int] = {}  # by process id

    def serve(self) -> bool:
        """Fork as asked. Return True in a child, False when the client is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, 8)
            if not message:
                return False
            request = json.loads(message)
            for module in request["imports"]:
                with contextlib.suppress(ImportError):  # the child will say what is missing
                    import_module(module)
            gc.freeze()
            if self._fork(request["child"], descriptors):
                return True

    def _fork(self, child: int, descriptors: Sequence[int]) -> bool:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        try:
            if pid := os.fork():
                os.setpgid(pid, pid)  # in both, as either may be the first
                self._children[pid] = child
                self._tell({"child": child, "pid": pid})
            else:
                self._become(descriptors)
                return True
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        for descriptor in descriptors:
            os.close(descriptor)
        return False

    def _become(self, descriptors: Sequence[int]) -> None:
        """Make this child a process of its own, with the descriptors it was given."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        self._socket.close()
        # First out of the way, as one may have the number that another is to get.
        stdin, output, announcement = (fcntl.fcntl(d, fcntl.F_DUPFD, 16) for d in descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        for descriptor, number in (stdin, 0), (output, 1), (output, 2), (announcement, READY_FD):
            os.dup2(descriptor, number)
        for descriptor in (stdin, output, announcement):
            os.close(descriptor)
        gc.enable()

    def _reap(self) -> None:
        """Tell of children that have ended. May interrupt itself."""
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            self._tell({"child": self._children.pop(pid), "returncode": code})

    def _tell(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # the client is gone; so are we soon
            self._socket.send(json.dumps(message).encode())


def main() -> None:
    gc.disable()  # collections find nothing while importing, and take a third of the time
    if not _Forker(int(sys.argv[1])).serve():
        return
    from flyspec.cli.child import read_job, run

    if (job := read_job()) is not None:
        run(job)


if __name__ == "__main__":
    main()

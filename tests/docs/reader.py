"""A reader who works through a document: a folder, a shell whose state lasts, servers that run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from flyspec.config import ADMIN_PORT, DRAFT_PORT, GENERATION_PORT, HTTP_PORT, VERIFY_PORT
from tests.docs.blocks import ROOT, UNRUN, Block, blocks
from tests.docs.commands import SERVICES, commands, variables

LIMIT_S = 240
STARTING_S = 120
PORTS = {
    "draft_service": {"--port": DRAFT_PORT},
    "verify_service": {"--port": VERIFY_PORT},
    "orchestrator": {"--port": GENERATION_PORT, "--admin-port": ADMIN_PORT},
    "flyspec": {
        "--port": GENERATION_PORT, "--admin-port": ADMIN_PORT, "--http-port": HTTP_PORT,
        "--draft-port": DRAFT_PORT, "--verify-port": VERIFY_PORT,
    },
}  # fmt: skip
SHARED = ["flyspec", "serve"]
_KEEP = 'trap \'{ export -p; declare -f; echo "cd $(printf %q "$PWD")"; } > "$STATE"\' EXIT\n'

_OUTLIVE = "trap : TERM\n"
"""Has the shell end after the server that it runs, which drains when both are told to end."""


def server_of(block: Block) -> list[str]:
    """Return the command of a block that starts a server and nothing else, or nothing."""
    found = [words for words in commands(block.text) if words] if block.language == "sh" else []
    if len(found) != 1:
        return []
    words = found[0][len(variables(found[0])) :]
    is_server = words[:2] == SHARED or (words[:2] == ["python", "-m"] and words[2] in SERVICES)
    return words if is_server and "--help" not in words else []


def ports_of(words: list[str]) -> list[int]:
    """Return the ports that a server's command makes it listen on."""
    program = words[0] if words[0] == "flyspec" else words[2]
    ports = dict(PORTS[program])
    for flag, value in pairwise(words):
        if flag in ports:
            ports[flag] = int(value)
    return [port for port in ports.values() if port > 0]


class Server:
    """A server that a reader would have in another terminal, listening once this returns."""

    def __init__(self, script: str, words: list[str], folder: Path) -> None:
        self.words, self.ports, self.log = words, ports_of(words), folder / "server.log"
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", _OUTLIVE + script], cwd=folder, env=environment(folder),
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + STARTING_S
        while not all(map(listens, self.ports)):
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.2)

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        assert self._process.wait(60) is not None


class Reader:
    """Works through one document at a time; the ports are those that it names."""

    def __init__(self, folder: Path) -> None:
        self._root, self._servers = folder, list[Server]()
        self._document, self._folder, self._output = "", folder, ""

    def open(self, document: str) -> None:
        """Take up a document, in a folder of its own.

        If it does not begin by serving, `flyspec serve` is running already.
        """
        if document == self._document:
            return
        run = [b for b in blocks(document) if b.language == "sh" and b.mark not in UNRUN]
        own = bool(run and server_of(run[0]))
        if own or [server.words for server in self._servers] != [SHARED]:
            self.close()
        self._document = document
        self._folder = self._root / Path(document).stem
        checkout(self._folder)
        if not own and not self._servers:
            self._servers.append(Server(" ".join(SHARED), SHARED, self._folder))

    def close(self) -> None:
        while self._servers:
            self._servers.pop().stop()

    def do(self, block: Block) -> None:
        """Do what a block says."""
        if block.mark == "file":
            (self._folder / block.reason).write_text(block.text)
        elif block.mark == "answer":
            assert last(block.text) == last(self._output)
        elif words := server_of(block):
            for server in [s for s in self._servers if {*s.ports} & {*ports_of(words)}]:
                self._servers.remove(server)
                server.stop()
            self._servers.append(Server(self._script(block.text), words, self._folder))
        elif block.language == "sh":
            self._run(["bash", "-euo", "pipefail", "-c", self._script(block.text)])
        elif block.language == "python":
            self._run([sys.executable, "-c", block.text])

    def _script(self, text: str) -> str:
        state = self._folder / ".state"
        return f"STATE={state}\n{f'. {state}' if state.exists() else ''}\n{_KEEP}{text}"

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=self._folder, env=environment(self._folder), text=True,
            capture_output=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._output = done.stdout
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def environment(folder: Path) -> dict[str, str]:
    """The environment of a reader who installed flyspec and activated its environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT}/lab", "HOME": str(folder)}


def checkout(folder: Path) -> None:
    """Make a folder as a reader has it: a checkout, and models of their own in models/."""
    folder.mkdir()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True)
    for name in {line.split("/")[0] for line in listed.stdout.splitlines()}:
        (folder / name).symlink_to(ROOT / name)
    (folder / "models").symlink_to(ROOT / "demo" / "models")


def listens(port: int) -> bool:
    """True if a server listens there.

    Asked from another address: from its own, Linux may give the question the very port it asks
    for, connect it to itself and keep that port from the server for a minute.
    """
    with socket.socket() as connection:
        connection.settimeout(1)
        connection.bind(("127.0.0.2", 0))
        return connection.connect_ex(("127.0.0.1", port)) == 0


def last(text: str) -> str:
    return re.split(r"\n", text.strip())[-1].strip()

"""Who has a port that cannot be listened on."""

from __future__ import annotations

import socket

import pytest

from flyspec.errors import ConfigError
from flyspec.preflight.ports import check_port
from loadtest.ports import free_port


def test_a_listening_process_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: .* in use \(by .*, process \d+\)"):
            check_port("--port", "127.0.0.1", port)


def test_an_outgoing_connection_is_told_from_a_server() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.bind(("127.0.0.1", port))
        client.connect(server.getsockname())
        with pytest.raises(ConfigError, match=r"in use \(by an outgoing connection; free a minute"):
            check_port("--port", "127.0.0.1", port)
    check_port("--port", "127.0.0.1", free_port())

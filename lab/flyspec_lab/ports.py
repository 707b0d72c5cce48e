"""Ports of this machine."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a port of this machine that nothing listens on.

    It is below the range from which the system takes the ports of outgoing connections, so it stays
    free until someone listens on it, and while whoever did restarts.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port

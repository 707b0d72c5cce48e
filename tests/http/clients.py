"""Clients of a stack's HTTP port: httpx, or bytes over a socket."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx2
from prometheus_client import generate_latest

from tests.observability.scraping import Scrape, parse

CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "the cat"}]
LONG = {"messages": SAID, "max_tokens": 200, "ignore_eos": True}


def client_of(stack, key: str = "", **headers: str) -> httpx2.AsyncClient:
    if key:
        headers["authorization"] = f"Bearer {key}"
    url = f"http://127.0.0.1:{stack.http_port}"
    return httpx2.AsyncClient(base_url=url, headers=headers, timeout=60)


def scrape(stack) -> Scrape:
    """The orchestrator's metrics now."""
    return parse(generate_latest(stack.registry).decode())


def request(body, path: str = CHAT) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def connect(stack, size: int = 0):
    """Return a stream to the HTTP port, with a small receive buffer if `size` is given."""
    plain = socket.socket()
    if size:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", stack.http_port))
    return await asyncio.open_connection(sock=plain, limit=size or 1 << 16)

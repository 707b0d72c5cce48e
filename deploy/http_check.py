"""Requests to the HTTP port of an installation in containers."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from deploy.findings import Log
from flyspec.config import HTTP_PORT

HOST = "127.0.0.1"
START_S = 180.0
"""Seconds that the services may take to load their models."""
CHAT = "Mia has 12 stamps and buys 30 more. How many has she now?"


def check_http(log: Log, name: str, certificates: Path | None) -> None:
    """Wait for the HTTP API, list its models, and send a chat, whole and as a stream.

    With `certificates`, a folder as `deploy/demo_certificates.sh` makes it: by TLS, as `client`;
    and check that nobody else gets in.
    """
    plain = f"http://{HOST}:{HTTP_PORT}"
    if certificates is None:
        _check_answers(log, name, plain, None)
        return
    base = plain.replace("http:", "https:")
    files = certificates / "client"
    client, stranger = (ssl.create_default_context(cafile=files / "ca.crt") for _ in range(2))
    client.load_cert_chain(files / "tls.crt", files / "tls.key")
    _check_answers(log, name, base, client)
    log.check(f"{name}: HTTP refuses unencrypted requests", not _answers(plain, None))
    log.check(f"{name}: HTTP refuses clients without a certificate", not _answers(base, stranger))


def _check_answers(log: Log, name: str, base: str, context: ssl.SSLContext | None) -> None:
    try:
        log.say(f"{name}: HTTP is ready after {_wait(base, context):.0f} s")
        models = [m["id"] for m in json.loads(_ask(f"{base}/v1/models", context))["data"]]
        log.check(f"{name}: HTTP lists models", bool(models), len(models))
        # With this rule the text is always the same.
        (model,) = (model for model in models if model.endswith(":exact"))
        asked = {"model": model, "messages": [{"role": "user", "content": CHAT}]}
        url = f"{base}/v1/chat/completions"
        reply = json.loads(_ask(url, context, asked))["choices"][0]["message"]["content"]
        lines = _ask(url, context, asked | {"stream": True}).decode().splitlines()
    except OSError as error:
        log.check(f"{name}: HTTP", False, error)
        return
    log.check(f"{name}: HTTP answers a chat", bool(reply), repr(reply[-20:]))
    *events, end = (line.removeprefix("data: ") for line in lines if line)
    parts = [c["delta"].get("content") or "" for e in events for c in json.loads(e)["choices"]]
    log.check(f"{name}: HTTP streams the same text",
              end == "[DONE]" and "".join(parts) == reply, f"{len(events)} chunks")  # fmt: skip


def _wait(base: str, context: ssl.SSLContext | None) -> float:
    """Wait until requests are accepted; return the seconds. Raises `OSError`."""
    began = time.monotonic()
    while not _answers(base, context):
        if time.monotonic() - began > START_S:
            raise TimeoutError(f"{base}/health is not 200 after {START_S:g} s")
        time.sleep(0.5)
    return time.monotonic() - began


def _answers(base: str, context: ssl.SSLContext | None) -> bool:
    try:
        _ask(f"{base}/health", context)
    except (OSError, HTTPException):
        return False
    return True


def _ask(url: str, context: ssl.SSLContext | None, body: Any = None) -> bytes:
    """Return a response's body. Raises `OSError`, also for other codes than 200."""
    request = urllib.request.Request(url, headers={"content-type": "application/json"})
    if body is not None:
        request.data = json.dumps(body).encode()
    with urllib.request.urlopen(request, timeout=60, context=context) as response:
        content: bytes = response.read()
        return content

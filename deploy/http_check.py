"""Requests to the HTTP port of an installation in containers, by OpenAI's own client."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

from openai import APIError, DefaultHttpxClient, OpenAI

from deploy.findings import Log
from flyspec.config import HTTP_PORT

START_S = 180.0
"""Seconds that the services may take to load their models."""
CHAT = "Mia has 12 stamps and buys 30 more. How many has she now?"


def check_http(log: Log, name: str, certificates: Path | None) -> None:
    """Wait for the HTTP API, list its models, and send a chat, whole and as a stream.

    With `certificates`, a folder as `deploy/demo_certificates.sh` makes it: by TLS, as `client`;
    and check that nobody else gets in.
    """
    if certificates is None:
        check_answers(log, name, _client("http"))
        return
    files = certificates / "client"
    known, stranger = (ssl.create_default_context(cafile=files / "ca.crt") for _ in range(2))
    known.load_cert_chain(files / "tls.crt", files / "tls.key")
    check_answers(log, name, _client("https", known))
    log.check(f"{name}: HTTP refuses unencrypted requests", not _models(_client("http")))
    log.check(f"{name}: HTTP refuses clients without a certificate",
              not _models(_client("https", stranger)))  # fmt: skip


def check_answers(log: Log, name: str, client: OpenAI) -> None:
    """Wait until a server lists its models, and send it a chat."""
    began = time.monotonic()
    while not (models := _models(client)) and time.monotonic() - began < START_S:
        time.sleep(0.5)
    log.check(f"{name}: HTTP lists models", bool(models), len(models))
    # With this rule the text is always the same.
    exact = next((model for model in models if model.endswith(":exact")), "")
    try:
        whole = client.chat.completions.create(
            model=exact, messages=[{"role": "user", "content": CHAT}]
        )
        chunks = list(client.chat.completions.create(
            model=exact, messages=[{"role": "user", "content": CHAT}], stream=True
        ))  # fmt: skip
    except APIError as error:
        log.check(f"{name}: HTTP", False, error)
        return
    text = whole.choices[0].message.content or ""
    log.check(f"{name}: HTTP answers a chat", bool(text), repr(text[-20:]))
    streamed = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    log.check(f"{name}: HTTP streams the same text", streamed == text, f"{len(chunks)} chunks")


def _client(scheme: str, context: ssl.SSLContext | None = None) -> OpenAI:
    http = DefaultHttpxClient(verify=context or True)
    url = f"{scheme}://127.0.0.1:{HTTP_PORT}/v1"
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0, http_client=http)


def _models(client: OpenAI) -> list[str]:
    """Return the names of the models; none if the server does not answer."""
    try:
        return [model.id for model in client.models.list()]
    except APIError:
        return []

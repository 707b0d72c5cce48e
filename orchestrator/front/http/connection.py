"""A client's connection: uvicorn's protocol with limits on request heads."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 10.0
"""Seconds for a connection's TLS handshake, and for each request head."""
MAX_HEAD_BYTES, HEAD_END = 1 << 16, b"\r\n\r\n"


class HttpConnection(HttpToolsProtocol):
    """Closes connections whose request heads come too slowly or are too large.

    Requests find it in their scope's state as `connection`.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes, self._tail = 0, b""
        self._head: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            end = (self._tail + data).find(HEAD_END)
            self._head_bytes += len(data) if end < 0 else end
            self._tail = data[1 - len(HEAD_END) :]
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The request's head is too large.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_bytes, self._tail = 0, b""
        super().on_message_complete()

    def abort(self) -> None:
        """Close at once; what the client has not read is lost."""
        self.transport.abort()

    @property
    def certificate_names(self) -> list[str]:
        """The common and alternative names in the client's certificate; empty without one."""
        certificate: dict[str, Any] = self.transport.get_extra_info("peercert") or {}
        names = [name for _, name in certificate.get("subjectAltName", ())]
        subject = (pair for part in certificate.get("subject", ()) for pair in part)
        names += [value for name, value in subject if name == "commonName"]
        return list(dict.fromkeys(names))

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _head_came(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

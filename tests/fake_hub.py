"""A hub of models on this machine, as far as `huggingface_hub` asks one for a model's files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NO_REPOSITORY = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted"}


class FakeHub:
    """Repositories by name, each a folder; `asked` has the files that were downloaded."""

    def __init__(self, url: str, repositories: Mapping[str, Path]) -> None:
        self.url, self.repositories = url, repositories
        self.gated = set[str]()
        self.asked = list[str]()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        listing = path.startswith("/api/models/")
        name, _, file = path.removeprefix("/api/models").removeprefix("/").partition("/resolve/")
        name = name.split("/revision/")[0]
        folder = self.hub.repositories.get(name)
        if folder is None:
            self._send(401, b"", NO_REPOSITORY, with_body)
        elif listing:
            files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
            siblings = [{"rfilename": p.relative_to(folder).as_posix(), "size": p.stat().st_size}
                        for p in files]  # fmt: skip
            document = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(document).encode(), {}, with_body)
        elif name in self.hub.gated:
            self._send(403, b"", GATED, with_body)
        else:
            found = folder / file.partition("/")[2]
            body = found.read_bytes() if found.is_file() else b""
            if with_body:
                self.hub.asked.append(f"{name}/{found.relative_to(folder)}")
            tag = f'"{hashlib.sha256(body).hexdigest()}"'
            self._send(
                200 if found.is_file() else 404, body,
                {"ETag": tag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
                | ({} if found.is_file() else {"X-Error-Code": "EntryNotFound"}), with_body,
            )  # fmt: skip

    def _send(self, code: int, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
        self.send_response(code)
        for header in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(*header)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_hub(repositories: Mapping[str, Path]) -> Iterator[FakeHub]:
    """Serve repositories while the context is open."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        hub = FakeHub(f"http://127.0.0.1:{server.server_port}", repositories)
        server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()

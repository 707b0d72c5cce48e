"""OpenAI-compatible servers to compare with: llama-server, vLLM and others.

They get completion requests for the token ids of the same prompts, and for as many tokens as plain
decoding produced, past an end of sequence if they can. Answers are streamed, for the time to first
token. No prompt may be found in a cache: llama-server is told so; other
servers must be started without prefix caching (vLLM: `--no-enable-prefix-caching`).

A server given as a command runs only for its turn, so that several need not fit the memory at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException, HTTPResponse
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from flyspec.errors import FlyspecError
from flyspec_lab.bench.modes import Answer
from flyspec_lab.bench.options import PORT
from flyspec_lab.ports import free_port

_OPENER = build_opener(ProxyHandler({}))
_TIMEOUT_S = 600.0
_POLL_S = 0.5
_STOP_S = 30.0
_LOG_CHARACTERS = 1000
_MAX_CONCURRENT = 64
_REFUSALS = (400, 415, 422)
_EXTRAS = {"ignore_eos": True, "cache_prompt": False}
"""Fields that llama-server and vLLM know besides the standard; other servers may refuse them."""


class _RefusedError(FlyspecError):
    """The server rejects the request as it is."""


class OpenAIServer:
    """A server at a URL, for prompts as token ids; `option` names it in errors."""

    def __init__(self, option: str, url: str) -> None:
        self.option, self.url = option, url
        self.model = ""
        self._extras: dict[str, Any] = dict(_EXTRAS)
        threads = ThreadPoolExecutor(_MAX_CONCURRENT, "completions")
        self._in_thread = partial(asyncio.get_running_loop().run_in_executor, threads)

    async def connect(self, prompt_token_ids: Sequence[int]) -> None:
        """Find out which model it serves and which fields it takes. Raises `FlyspecError`."""
        await self._in_thread(self._connect, prompt_token_ids)

    async def complete(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Answer:
        """Continue a prompt greedily. Raises `FlyspecError`."""
        return await self._in_thread(self._complete, prompt_token_ids, max_tokens)

    async def answers(self) -> bool:
        """True if it is up, and has read its model."""
        try:
            await self._in_thread(self._models)
        except FlyspecError:
            return False
        return True

    def _models(self) -> Any:
        with self._open("/v1/models") as response:
            return self._parse(response.read()).get("data")

    def _connect(self, prompt_token_ids: Sequence[int]) -> None:
        models = self._models()
        if isinstance(models, list) and models and isinstance(models[0], dict):
            self.model = str(models[0].get("id", ""))
        try:
            self._complete(prompt_token_ids, 1)
        except _RefusedError:
            self._extras = {}
            self._complete(prompt_token_ids, 1)

    def _complete(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Answer:
        request = {
            "model": self.model, "prompt": list(prompt_token_ids), "max_tokens": max_tokens,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            **self._extras,
        }  # fmt: skip
        begin = time.perf_counter()
        first, lines = None, []
        with self._open("/v1/completions", json.dumps(request).encode()) as response:
            try:
                for line in response:
                    if line.startswith(b"data:"):
                        first = first or time.perf_counter()
                        lines.append(line)
            except (OSError, HTTPException) as error:
                raise self._error(f"broke off its answer: {error!r}") from None
        end = time.perf_counter()
        events = [self._parse(line[5:]) for line in lines if line[5:].strip() != b"[DONE]"]
        texts = [str(c.get("text") or "") for e in events for c in e.get("choices") or ()]
        usage: dict[str, Any] = next((e["usage"] for e in reversed(events) if e.get("usage")), {})
        tokens = int(usage.get("completion_tokens") or sum(map(bool, texts)))
        if first is None or tokens == 0:
            raise self._error("answered without a token")
        return Answer(tokens, end - begin, first - begin)

    def _open(self, path: str, body: bytes | None = None) -> HTTPResponse:
        parts = urlsplit(self.url)
        url = parts._replace(path=parts.path + path, query="").geturl()
        request = Request(url, body, {"Content-Type": "application/json"})
        try:
            response: HTTPResponse = _OPENER.open(request, timeout=_TIMEOUT_S)
        except HTTPError as error:
            said = error.read(300).decode(errors="replace").strip()
            failure = self._error(f"{path} returned {error.code} {error.reason}: {said}")
            raise (_RefusedError(str(failure)) if error.code in _REFUSALS else failure) from None
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise self._error(
                f"does not answer: {getattr(reason, 'strerror', None) or repr(reason)}"
            ) from None
        return response

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            document = json.loads(data)
        except ValueError:
            raise self._error(f"answered with invalid JSON: {data[:100]!r}") from None
        if isinstance(document, dict) and "error" in document:
            raise self._error(f"says: {json.dumps(document['error'])[:300]}")
        return document if isinstance(document, dict) else {}

    def _error(self, what: str) -> FlyspecError:
        return FlyspecError(f"{self.option}: {self.url} {what}")


@contextlib.asynccontextmanager
async def serving(option: str, where: str) -> AsyncIterator[OpenAIServer]:
    """Yield the server at a URL, or that of a command with `PORT` in it, which is ended afterwards.

    Raises `FlyspecError` with the last of its output if it ends, or does not answer in ten minutes.
    """
    if PORT not in where:
        yield OpenAIServer(option, where)
        return
    port = str(free_port())
    server = OpenAIServer(option, f"http://127.0.0.1:{port}")
    with tempfile.TemporaryFile() as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(where.replace(PORT, port)),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise FlyspecError(f"{option}: cannot be run: {error}") from None
        try:
            deadline = time.monotonic() + _TIMEOUT_S
            while not await server.answers():
                code = process.returncode
                if code is not None or time.monotonic() > deadline:
                    why = "does not answer" if code is None else f"ended with {code}"
                    raise FlyspecError(f"{option}: {why}; its last output: {_last_of(log)}")
                await asyncio.sleep(_POLL_S)
            yield server
        finally:
            await _end(process)


def _last_of(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-_LOG_CHARACTERS:].strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask a process to end, then kill what is left of its group."""
    for asked in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, asked)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_S)

"""`--against`: comparing with an OpenAI-compatible server, healthy or not."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from flyspec.errors import ConfigError, FlyspecError
from flyspec_lab.bench.modes import Item, OtherMode
from flyspec_lab.bench.openai import OpenAIServer, serving
from flyspec_lab.bench.options import parse_against


class Stub(ThreadingHTTPServer):
    """Gives scripted answers and records the requests."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.refuses: tuple[str, ...] = ()
        self.takes_token_ids = True
        self.usage = True
        self.events: list[str] | None = None
        self.models: Any = {"data": [{"id": "stub"}]}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        self._answer(200, json.dumps(self.server.models))

    def do_POST(self) -> None:
        stub = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub.requests.append(request)
        refused = [name for name in stub.refuses if name in request]
        if refused or (isinstance(request["prompt"], list) and not stub.takes_token_ids):
            self._answer(400, f"cannot take {refused or 'token ids'}")
            return
        events = stub.events
        if events is None:
            texts = [f" {i}" for i in range(request["max_tokens"])]
            events = [json.dumps({"choices": [{"text": text}]}) for text in texts]
            if stub.usage:
                usage = {"completion_tokens": request["max_tokens"]}
                events.append(json.dumps({"choices": [], "usage": usage}))
            events.append("[DONE]")
        self._answer(200, "".join(f"data: {event}\n\n" for event in events))

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


async def test_the_prompt_s_tokens_and_as_many_of_the_output(stub: Stub) -> None:
    server = OpenAIServer("--against stub", stub.url)
    await server.connect([1, 2, 3])
    mode = OtherMode("stub", server.complete, True)
    sample = await mode.run(Item("g", 4, "text", (65, 66), 7))
    assert (sample.mode, sample.group, sample.prompt) == ("stub", "g", 4)
    assert (sample.tokens, sample.token_ids) == (7, ())
    assert sample.first_token_s is not None
    assert 0 < sample.first_token_s <= sample.seconds
    asked = stub.requests[-1]
    assert (asked["model"], asked["prompt"], asked["max_tokens"]) == ("stub", [65, 66], 7)
    assert (asked["temperature"], asked["ignore_eos"], asked["cache_prompt"]) == (0, True, False)


async def test_what_a_server_does_not_know_is_left_out(stub: Stub) -> None:
    stub.refuses, stub.usage = ("ignore_eos",), False
    server = OpenAIServer("--against stub", stub.url)
    await server.connect([65])
    done = await server.complete([65, 66], 3)
    assert done.tokens == 3
    assert "ignore_eos" not in stub.requests[-1]
    stub.takes_token_ids = False
    with pytest.raises(FlyspecError, match=r"400 Bad Request: cannot take token ids"):
        await OpenAIServer("--against stub", stub.url).connect([65])


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (['{"error": {"message": "full"}}'], "says: .*full"),
        (["[DONE]"], "answered without a token"),
        (["{"], "answered with invalid JSON"),
    ],
)
async def test_answers_that_are_none(stub: Stub, events: list[str], message: str) -> None:
    stub.events = events
    with pytest.raises(FlyspecError, match=f"--against stub: {stub.url} {message}"):
        await OpenAIServer("--against stub", stub.url).connect([65])


async def test_a_server_that_is_not_there(stub: Stub) -> None:
    stub.models = []
    await OpenAIServer("--against stub", stub.url).connect([65])  # names no model: no matter
    with pytest.raises(FlyspecError, match=r"does not answer: Connection refused"):
        await OpenAIServer("--against gone", "http://127.0.0.1:1").connect([65])


SERVER = """
import sys
from tests.cli.test_bench_against import Stub
print("reading weights", flush=True)
Stub(int(sys.argv[1])).serve_forever()
"""


async def test_a_server_is_run_for_its_turn_and_says_why_it_cannot_be() -> None:
    async with serving("--against stub", f"{sys.executable} -c '{SERVER}' {{port}}") as server:
        await server.connect([65])
        assert (await server.complete([65, 66], 3)).tokens == 3
    assert not await server.answers()
    for command, message in (
        (f"{sys.executable} -c 'print(1 / 0)' {{port}}", "ended with 1; .*ZeroDivisionError"),
        ("no-such-server {port}", "cannot be run: .*no-such-server"),
    ):
        with pytest.raises(FlyspecError, match=f"--against stub: (?s:{message})"):
            async with serving("--against stub", command):
                pass


def test_names_and_urls() -> None:
    urls = ["llama=http://h:8/v1/", "http://h:8?a=b", "https://h"]
    assert parse_against(urls) == (
        ("llama", "http://h:8"), ("h:8", "http://h:8?a=b"), ("h", "https://h"),
    )  # fmt: skip
    command = "vllm=env A=1 vllm serve --port {port}"
    assert parse_against([command]) == (("vllm", "env A=1 vllm serve --port {port}"),)
    for text in ("llama", "llama=", "ftp://h", "llama=h:8", "http://", "http://h:x"):
        with pytest.raises(ConfigError, match="give NAME=http://HOST:PORT"):
            parse_against([text])

"""The flags of load tests, apart from each scenario's own. No locust."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from flyspec.cli.program import check_file
from flyspec.client import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, Credentials, GenerateOptions
from flyspec.config import HTTP_PORT
from flyspec.flags import Flag, flags_of
from flyspec.rules import Rule
from flyspec.speculation_length import SpeculationLength
from flyspec.values.requests import SERVERS, request_flag
from flyspec.values.tokens import SamplingParams
from flyspec_lab.report import PageResults
from loadtest.connection import Endpoint
from loadtest.goals import Goals
from loadtest.prompts import FRESH, VARIED, Source

ProtocolName = Literal["grpc", "http"]
DEFAULT_ADDRESSES: Mapping[ProtocolName, str] = {
    "grpc": DEFAULT_ADDRESS,
    "http": f"127.0.0.1:{HTTP_PORT}",
}
CHANNELS = 4
"""gRPC connections to each address, which requests share."""

_flag = partial(Flag, group="Requests")
_asked = partial(request_flag, group="Requests")


def _sources(texts: Sequence[str]) -> tuple[Source, ...]:
    return tuple(map(Source.parse, texts))


def _processes(texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    pairs = [text.partition("=") for text in texts]
    if bad := [text for text, (name, _, pid) in zip(texts, pairs, strict=True)
               if not name or not pid.isdecimal()]:  # fmt: skip
        raise ValueError(f"{bad[0]}: not NAME=PID")
    return tuple((name, int(pid)) for name, _, pid in pairs)


# fmt: off
@dataclass(frozen=True)
class Requests:
    """The requests."""

    prompt_file: Annotated[tuple[Source, ...], _flag(
        "Prompt file, in any format of `flyspec generate`; repeatable, mixed by weight. Instead of "
        f"a file: {FRESH} (fresh word problems), {VARIED} (those, code and long chats).",
        metavar="FILE[:WEIGHT]", default=FRESH, read=_sources,
    )] = ()
    problems: Annotated[int, _flag("Number of fresh word problems.", min=1)] = 2000
    chat: Annotated[bool | None, _flag(
        "Send prompts as chat messages.", default="only questions, not code",
    )] = None
    rule: Annotated[str, _flag("Acceptance rule.", default=SERVERS)] = ""
    num_speculative_tokens: Annotated[
        SpeculationLength | None, _asked("num_speculative_tokens")
    ] = None
    drafter: Annotated[str, _asked("drafter")] = ""
    max_tokens: Annotated[int, _asked("max_tokens")] = 128
    ignore_eos: Annotated[bool | None, _asked("ignore_eos", default="no")] = None
    temperature: Annotated[float, _asked("temperature")] = 0.0
    top_p: Annotated[float, _asked("top_p")] = 1.0
    timeout_s: Annotated[float, _asked("timeout_s", default=None, min=0)] = 120.0
    seed: Annotated[int, _flag("Random seed of prompts and arrivals.")] = 0
    # fmt: on

    def options(self) -> GenerateOptions:
        return GenerateOptions(
            sampling=SamplingParams(self.temperature, self.top_p),
            max_tokens=self.max_tokens,
            ignore_eos=bool(self.ignore_eos),
            drafter=self.drafter,
            rule=Rule(self.rule) if self.rule else None,
            num_speculative_tokens=self.num_speculative_tokens,
            timeout_s=self.timeout_s,
        )


# fmt: off
@dataclass(frozen=True)
class ConnectionFlags:
    """Connections to the installation."""

    protocol: Annotated[ProtocolName, Flag("gRPC, or OpenAI's API over HTTP.")] = "grpc"
    connections: Annotated[int | None, Flag(
        "TCP connections to each address. Over HTTP a connection has one request at a time, and "
        "others wait for it.", min=1, default=f"{CHANNELS}; over HTTP one per running request",
    )] = None
    # fmt: on

    def endpoints(self, addresses: str, credentials: Credentials) -> list[Endpoint]:
        """Return where to connect, checked; empty is the default. Raises `ConfigError`."""
        found = [
            Endpoint(address, credentials)
            for address in (addresses or DEFAULT_ADDRESSES[self.protocol]).split(",")
        ]
        for endpoint in found:
            if self.protocol == "http":
                endpoint.http_url()
            else:
                credentials.security(endpoint.address)
        return found


# fmt: off
@dataclass(frozen=True)
class LoadOptions:
    """The installation, the requests, what has to hold, and where the report goes."""

    address: Annotated[str, Flag(
        "Generation address, or several, comma-separated, used in turn.",
        default=" or ".join(DEFAULT_ADDRESSES.values()),
    )] = ""
    admin_address: Annotated[str, Flag(
        f"Admin address, usually {DEFAULT_ADMIN_ADDRESS}. Without it, the test cannot check "
        "that nothing is left open at the end.",
    )] = ""
    seconds: Annotated[float, Flag(
        "Total seconds of load; the last requests end later.", min=1,
    )] = 120.0
    watch: Annotated[tuple[tuple[str, int], ...], Flag(
        "Process on this machine whose memory is recorded; repeatable.",
        metavar="NAME=PID", read=_processes,
    )] = ()
    every: Annotated[float, Flag("Seconds between samples of memory and status.", min=0.01)] = 1.0
    records: Annotated[Path | None, Flag(
        "Write every request to a .jsonl or .gz file, one JSON document per line.", group="Results",
    )] = None
    # fmt: on
    connection: ConnectionFlags = field(default_factory=ConnectionFlags)
    credentials: Credentials = field(default_factory=Credentials)
    requests: Requests = field(default_factory=Requests)
    goals: Goals = field(default_factory=Goals)
    results: PageResults = field(default_factory=PageResults)

    def validate(self) -> None:
        """Refuse what cannot work before anything runs. Raises `ConfigError`."""
        self.results.check()
        check_file("--records", self.records, (".jsonl", ".gz"))
        self.goals.validate()
        self.endpoints()

    def endpoints(self) -> list[Endpoint]:
        """Return where to connect. Raises `ConfigError`."""
        return self.connection.endpoints(self.address, self.credentials)

    def told(self, own: Any) -> dict[str, Any]:
        """The flags that a report repeats: no secrets, addresses or names of files."""
        found: dict[str, Any] = {"seconds": self.seconds}
        for part in (self.connection, self.requests, self.goals, own):
            for name in flags_of(type(part)):
                value = getattr(part, name)
                if value not in (None, "", ()):
                    found[name] = _plain(value)
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, int | float | str | bool | dict) else str(value)

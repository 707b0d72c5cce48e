"""The flags of load tests, apart from each scenario's own. No locust."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from flyspec.client import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, Credentials, GenerateOptions
from flyspec.drawing import check_file
from flyspec.flags import Flag, flags_of
from flyspec.rules import Rule
from flyspec.speculation_length import SpeculationLength
from flyspec.values.generation import SERVERS, request_flag
from flyspec.values.tokens import SamplingParams
from loadtest.connection import Endpoint
from loadtest.goals import Goals
from loadtest.prompts import FRESH, VARIED, Source
from loadtest.report.files import LabResults

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
    """What requests ask for."""

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
class LoadOptions:
    """The installation, the requests, what has to hold, and where the report goes."""

    address: Annotated[str, Flag(
        "Generation address, or several, comma-separated, used in turn.",
    )] = DEFAULT_ADDRESS
    admin_address: Annotated[str, Flag(
        f"Admin address, usually {DEFAULT_ADMIN_ADDRESS}. Without it, the test cannot check "
        "that nothing is left open at the end.",
    )] = ""
    seconds: Annotated[float, Flag(
        "Total seconds of load; the last requests end later.", min=1,
    )] = 120.0
    connections: Annotated[int, Flag("TCP connections to each address.", min=1)] = 4
    watch: Annotated[tuple[tuple[str, int], ...], Flag(
        "Process on this machine whose memory is recorded; repeatable.",
        metavar="NAME=PID", read=_processes,
    )] = ()
    every: Annotated[float, Flag("Seconds between samples of memory and status.", min=0.01)] = 1.0
    records: Annotated[Path | None, Flag(
        "Write every request to a .jsonl or .gz file, one JSON document per line.", group="Results",
    )] = None
    # fmt: on
    credentials: Credentials = field(default_factory=Credentials)
    requests: Requests = field(default_factory=Requests)
    goals: Goals = field(default_factory=Goals)
    results: LabResults = field(default_factory=LabResults)

    def validate(self) -> None:
        """Refuse what cannot work before anything runs. Raises `ConfigError`."""
        self.results.check()
        check_file("--records", self.records, (".jsonl", ".gz"))
        self.goals.validate()
        for endpoint in self.endpoints():
            endpoint.credentials.security(endpoint.address)

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(address, self.credentials) for address in self.address.split(",")]

    def told(self, own: Any) -> dict[str, Any]:
        """The flags that a report repeats: no secrets, addresses or names of files."""
        found = {"seconds": self.seconds, "connections": self.connections}
        for part in (self.requests, self.goals, own):
            for name in flags_of(type(part)):
                value = getattr(part, name)
                if value not in (None, "", ()):
                    found[name] = _plain(value)
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, int | float | str | bool | dict) else str(value)

"""The flags of load tests, apart from each scenario's own. No locust."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from flyspec.client import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, Credentials, GenerateOptions
from flyspec.config import HTTP_PORT
from flyspec.errors import ConfigError
from flyspec.flags import Flag, flags_of
from flyspec.rules import Rule
from flyspec.speculation_length import SpeculationLength
from flyspec.values.requests import SERVERS, request_flag
from flyspec.values.tokens import SamplingParams
from flyspec_lab.report import PageResults
from loadtest.load import METRICS, Control, Metric, Transport, prompts_in_turn
from loadtest.protocols import TRANSPORTS, ProtocolName

DEFAULT_ADDRESSES: Mapping[ProtocolName, str] = {
    "grpc": DEFAULT_ADDRESS,
    "http": f"127.0.0.1:{HTTP_PORT}",
}
Limits = Mapping[Metric, float]
"""Times, ms, that a request may take."""


def list_of(read_one: Callable[[str], Any], form: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return a parser of texts, each by `read_one`; an error says the `form`."""

    def read(texts: Any) -> tuple[Any, ...]:
        found = []
        for text in texts.split(",") if isinstance(texts, str) else texts:
            try:
                found.append(read_one(text))
            except (KeyError, ValueError):
                raise ValueError(f"{text}: not {form}") from None
        return tuple(found)

    return read


def _process(text: str) -> tuple[str, int]:
    name, _, pid = text.partition("=")
    if not name:
        raise ValueError
    return name, int(pid)


def _limit(text: str) -> tuple[Metric, float]:
    name, _, ms = text.partition(":")
    return {metric: metric for metric in METRICS}[name], float(ms)  # type: ignore[index]


_limits = list_of(_limit, "METRIC:MS with METRIC ttft, tpot or e2e, such as ttft:200")
_flag = partial(Flag, group="Requests")
_asked = partial(request_flag, group="Requests")
_goal = partial(Flag, group="Goals (the exit code is 1 if one is missed)")
_bounds = partial(_goal, metavar="METRIC:MS,...", read=lambda text: dict(_limits(text)))


# fmt: off
@dataclass(frozen=True)
class Requests:
    """The requests."""

    protocol: Annotated[ProtocolName, _flag("gRPC, or OpenAI's API over HTTP.")] = "grpc"
    prompt_file: Annotated[tuple[str, ...], _flag(
        "Prompt file, in any format of `flyspec generate`; repeatable.",
        metavar="FILE", default="fresh word problems",
    )] = ()
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
class Goals:
    """Bounds. `latency` defines goodput; the others decide the exit code."""

    latency: Annotated[Limits | None, _bounds(
        "Latency goals in ms of ttft, tpot or e2e: requests that meet all of them are goodput.",
        name="--goodput",
    )] = None
    min_goodput: Annotated[float | None, _goal(
        "Minimum share of requests that meet --goodput.",
    )] = None
    max_p99: Annotated[Limits | None, _bounds("Maximum p99 in ms of ttft, tpot or e2e.")] = None


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
        metavar="NAME=PID", read=list_of(_process, "NAME=PID"),
    )] = ()
    # fmt: on
    credentials: Credentials = field(default_factory=Credentials)
    requests: Requests = field(default_factory=Requests)
    goals: Goals = field(default_factory=Goals)
    results: PageResults = field(default_factory=PageResults)

    def validate(self) -> None:
        """Refuse what cannot work before anything runs. Raises `ConfigError`."""
        self.results.check()
        if self.goals.min_goodput is not None and not self.goals.latency:
            raise ConfigError("--min-goodput: needs --goodput, the latency goals")

    @property
    def addresses(self) -> list[str]:
        return (self.address or DEFAULT_ADDRESSES[self.requests.protocol]).split(",")

    def transport(self) -> Transport:
        """Return connections to the addresses. Raises `ConfigError` for those that cannot be."""
        return TRANSPORTS[self.requests.protocol](self.addresses, self.credentials)

    def control(self) -> Control:
        """Return what the users share. Raises `ConfigError`, also for prompts."""
        asked = self.requests
        prompts = prompts_in_turn(asked.prompt_file, asked.seed)
        return Control(self.transport(), prompts, asked.seed)

    def shown(self, own: Any) -> dict[str, str]:
        """Return the flags that a report repeats: no secrets, addresses or names of files."""
        found = {"seconds": str(self.seconds)}
        for part in (self.requests, self.goals, own):
            for name in flags_of(type(part)):
                value = getattr(part, name)
                if value not in (None, "", ()):
                    several = isinstance(value, Sequence) and not isinstance(value, str)
                    found[name] = ", ".join(map(str, value)) if several else str(value)
        return found

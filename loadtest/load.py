"""A load: prompts, phases, their requests and the records of these, and what users share."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Literal, Protocol, get_args

from flyspec.client import GenerateOptions, Prompt
from flyspec.prompts import read_prompts
from flyspec.values.admin import ModelInfo
from flyspec_lab.word_problems import word_problems

PROBLEMS = 2000
Outcome = Literal["complete", "refused", "cancelled", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Metric = Literal["ttft", "tpot", "e2e"]
METRICS: tuple[Metric, ...] = get_args(Metric)
"""Time to first token, time per output token, end to end."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The end of a complete generation: its output tokens and rounds."""

    tokens: int
    rounds: int


TokenStream = Generator[Sequence[int] | StreamEnd, None, None]
"""The tokens of each message as they arrive, then the end; closing it cancels the generation."""


class Transport(Protocol):
    """Connections to the servers over one protocol, shared by all users."""

    def stream(self, prompt: Prompt, options: GenerateOptions) -> TokenStream:
        """Generate at each of the addresses in turn, within `options.timeout_s`.

        Raises `FlyspecError`: `ResourceExhaustedError` if the server has no room.
        """

    def target(self) -> ModelInfo:
        """Return the target at the first address; empty or 0 is what the protocol does not say.

        Raises `FlyspecError` with the address if it does not answer.
        """

    def close(self) -> None:
        """Close the connections."""


def prompts_in_turn(files: Sequence[str], seed: int) -> Callable[[], Prompt]:
    """Return a function that gives the next prompt of all these files, in an order of the seed.

    Without files, they are word problems as in the bundled models' training data. Questions are
    sent as chats, code is continued. Raises `ConfigError` for a file that cannot be read.
    """
    found = [prompt for file in files for prompt in read_prompts(file)]
    prompts = found if files else word_problems(PROBLEMS, f"loadtest-{seed}")
    random.Random(seed).shuffle(prompts)
    turn = cycle(prompts)
    return lambda: next(turn).to_request()


# --- phases -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: each user sends its next request when the previous one has ended."""

    users: int

    def __str__(self) -> str:
        return f"{self.users} users" if self.users != 1 else "1 user"


@dataclass(frozen=True, slots=True)
class Open:
    """An open loop: requests arrive at random, `rate` per second on average (Poisson)."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:.3g} requests/s"

    def arrivals(self, seconds: float, rng: random.Random) -> Iterator[float]:
        """Yield times of arrival in [0, seconds), ascending."""
        now = rng.expovariate(self.rate)
        while now < seconds:
            yield now
            now += rng.expovariate(self.rate)


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """A part of a test with one load.

    Its requests have the `options`; the lengths of their outputs `vary` from half to one and a half
    times `max_tokens`. A share `cancelled` of them is cancelled by its client after a random time,
    `cancel_after_s` on average. `series` names the curve that the phase is a point of. Goals apply
    if it is `judged`: not to warm-up and overload. With `drain`, the next phase begins when the
    last request of this one has ended.
    """

    name: str
    load: Closed | Open
    seconds: float
    options: GenerateOptions
    series: str = ""
    judged: bool = True
    vary: bool = False
    cancelled: float = 0.0
    cancel_after_s: float = 1.0
    drain: bool = True

    def draw(self, rng: random.Random) -> tuple[GenerateOptions, float | None]:
        """Return the options of a request, and after how long its client leaves, if it does."""
        options, mean = self.options, self.options.max_tokens or 1
        if self.vary:
            options = replace(options, max_tokens=rng.randint(max(1, mean // 2), 3 * mean // 2))
        leaves = rng.random() < self.cancelled
        return options, rng.expovariate(1 / self.cancel_after_s) if leaves else None


# --- requests ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Record:
    """A request. Times are in seconds since the test began.

    `planned` is when it was due and `sent` when it was sent; they differ in an open loop whose
    generator is late. `first` is when its first tokens came. It was `refused` if the server had no
    room (`retry_after_s` as the refusal said, if it did), `cancelled` if its client gave it up on
    purpose, `failed` if it did not complete for any other reason.
    """

    phase: str
    planned: float
    sent: float
    ended: float = 0.0
    outcome: Outcome = "failed"
    first: float | None = None
    tokens: int = 0
    rounds: int = 0
    retry_after_s: float | None = None
    error: str = ""

    def metric(self, name: Metric) -> float | None:
        """Return a time of a completed request in ms; None if it has none.

        `ttft` and `e2e` count from when the request was due. `tpot` is the time from the first
        tokens to the end, divided by the tokens minus one: a mean, since a message may have
        several.
        """
        if self.outcome != "complete":
            return None
        if name == "e2e":
            return 1e3 * (self.ended - self.planned)
        if self.first is None:
            return None
        if name == "ttft":
            return 1e3 * (self.first - self.planned)
        return 1e3 * (self.ended - self.first) / (self.tokens - 1) if self.tokens > 1 else None


class Control:
    """The state that users share. They make requests of the phase and keep their records.

    Does not use locust: events are those of the standard library, which gevent makes cooperative.
    """

    def __init__(self, transport: Transport, next_prompt: Callable[[], Prompt], seed: int) -> None:
        self.transport, self.next_prompt = transport, next_prompt
        self.records: list[Record] = []
        self.in_flight = 0
        self.opened = threading.Event()
        """Set while a phase is on: requests may begin."""
        self.phase: LoadPhase | None = None
        self.phase_began = 0.0
        self._seed, self.rng = seed, random.Random(seed)
        self._begin = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since the test began."""
        return time.perf_counter() - self._begin

    def open_phase(self, phase: LoadPhase) -> None:
        self.phase, self.phase_began = phase, self.now()
        self.opened.set()

    def arrivals(self, phase: LoadPhase, load: Open) -> Iterator[float]:
        """Return the times of an open phase's requests, the same for the same seed."""
        return load.arrivals(phase.seconds, random.Random(f"{self._seed} {phase.name}"))

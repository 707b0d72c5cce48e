"""The parts of a load: phases, arrivals, and requests. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flyspec.client import GenerateOptions, Prompt


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: each user sends its next request when the previous one has ended.

    A slow server is asked less often.
    """

    users: int

    def __str__(self) -> str:
        return f"{self.users} users" if self.users != 1 else "1 user"


@dataclass(frozen=True, slots=True)
class Open:
    """An open loop: requests arrive at random, `rate` per second on average (Poisson).

    A slow server is asked as often as a fast one.
    """

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:.3g} requests/s"

    def arrivals(self, seconds: float, rng: random.Random) -> Iterator[float]:
        """Times of arrival in [0, seconds), ascending."""
        if self.rate <= 0:
            return
        now = rng.expovariate(self.rate)
        while now < seconds:
            yield now
            now += rng.expovariate(self.rate)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to ask, and its weight among the others of a phase.

    `vary` draws the options of each request from `options`.
    """

    name: str
    options: GenerateOptions
    weight: float = 1.0
    vary: Callable[[random.Random, GenerateOptions], GenerateOptions] | None = None


@dataclass(slots=True)
class Text:
    """A text that is requested again and again, and its tokens without faults."""

    prompt: Prompt = field(repr=False)
    options: GenerateOptions
    expected: Sequence[int] | None = None

    def differs(self, token_ids: Sequence[int]) -> bool:
        """Return whether the tokens differ from those of the first time."""
        if self.expected is None:
            self.expected = token_ids
        return self.expected != token_ids


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """A part of a test with one load.

    Its requests draw from `variants`, or ask for `texts` in turn. A share `cancelled` of them
    is cancelled by its client after a random time, `cancel_after_s` on average. `series` names the
    curve that the phase is a point of. Goals apply if it is `judged`: not to warm-up and overload.
    With `drain`, the next phase begins when the last request of this one has ended. `meanwhile`
    runs beside the load.
    """

    name: str
    load: Closed | Open
    seconds: float
    variants: Sequence[Variant]
    series: str = ""
    judged: bool = True
    cancelled: float = 0.0
    cancel_after_s: float = 0.3
    drain: bool = True
    texts: Sequence[Text] = ()
    meanwhile: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A request to make. `leave_after_s`: when its client cancels it, if it does."""

    phase: str
    variant: str
    prompt: Prompt = field(repr=False)
    options: GenerateOptions
    planned: float = 0.0
    leave_after_s: float | None = None
    text: Text | None = None

"""What a load consists of: phases, how requests come in them, and what they ask for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flyspec.client import GenerateOptions, Prompt


@dataclass(frozen=True, slots=True)
class Closed:
    """So many users, each with one request after the other (a closed loop).

    A slow server is asked less often.
    """

    users: int

    def __str__(self) -> str:
        return f"{self.users} users" if self.users != 1 else "1 user"


@dataclass(frozen=True, slots=True)
class Open:
    """Requests come by themselves, `rate` a second on average, independently (Poisson).

    A slow server is asked as often as a fast one.
    """

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:.3g} requests/s"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to ask, and its weight among the others of a phase."""

    name: str
    options: GenerateOptions
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a test with one load.

    Its requests are asked in ways drawn from `variants`. A share `cancelled` of them is given up by
    its client after a random time, `cancel_after_s` on average. `series` names the curve that it is
    a point of, `judged` says whether goals are about it: warm-up and overload are not. With `drain`
    the next phase begins when its last request has ended.
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


@dataclass(frozen=True, slots=True)
class Job:
    """A request to make. `leave_after_s`: when its client gives it up, if it does."""

    phase: str
    variant: Variant
    prompt: Prompt = field(repr=False)
    planned: float = 0.0
    leave_after_s: float | None = None

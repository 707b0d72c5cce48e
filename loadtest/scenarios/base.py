"""What a scenario is: phases of load, what is done beside them, what must hold."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flyspec.client import GenerateOptions
from loadtest.admin import Admin
from loadtest.goals import Check
from loadtest.record import Record
from loadtest.sampler import Memory
from loadtest.summary import PhaseResult
from loadtest.work import Closed, Phase, Variant

DEFAULT_USERS = 8
"""Where nobody says how many generations an installation holds."""


@dataclass
class World:
    """What a scenario works with beside the load, and what was seen when it is over.

    `slots` are the generations that the installation runs at once, None if unknown. `note` marks a
    moment in the report. `running` is whether the load is on, `sleep` lets others go on.
    """

    admin: Admin | None = None
    slots: int | None = None
    note: Callable[[str], None] = lambda _: None
    running: Callable[[], bool] = lambda: True
    sleep: Callable[[float], None] = lambda _: None
    records: Sequence[Record] = ()
    memory: Sequence[Memory] = field(default_factory=list)


class Scenario(ABC):
    """A load test. `options` is how requests ask, unless the scenario says otherwise."""

    name: ClassVar[str]
    about: ClassVar[str]
    needs_admin: ClassVar[bool] = False

    def __init__(self, args: argparse.Namespace, options: GenerateOptions, world: World) -> None:
        self.args, self.options, self.world = args, options, world
        self.seconds: float = args.seconds
        self.users: int = getattr(args, "users", None) or world.slots or DEFAULT_USERS

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add its own flags."""
        return

    @abstractmethod
    def phases(self, done: Sequence[PhaseResult]) -> Iterator[Phase]:
        """The load, a phase after the other; `done` grows as they end."""

    def beside(self) -> None:
        """What happens meanwhile, in a greenlet of its own. Errors of it fail the test."""
        return

    def checks(self, done: Sequence[PhaseResult]) -> list[Check]:
        """What must have held, besides goals and what every scenario checks."""
        return []

    def found(self, done: Sequence[PhaseResult]) -> dict[str, Any]:
        """Figures of its own, for the report."""
        return {}

    # --- what several have in common ----------------------------------------------------------

    @staticmethod
    def add_users(parser: argparse.ArgumentParser, default: int, help_: str) -> None:
        """`--users`, of a closed loop."""
        parser.add_argument("--users", type=int, default=default, help=f"{help_} ({default})")

    @staticmethod
    def add_rate(parser: argparse.ArgumentParser, rate: str, load: str) -> None:
        """A rate, or how the sustainable one is measured and what share of it is asked for."""
        parser.add_argument("--rate", type=float, help=f"requests a second {rate}")
        parser.add_argument("--users", type=int, help="to measure it with (default: all slots)")
        parser.add_argument("--load", type=float, default=0.5, help=f"share of it {load} (0.5)")

    @property
    def plain_variants(self) -> tuple[Variant, ...]:
        """One way to ask: as the flags say."""
        return (variant_of(self.options),)

    def sustainable(
        self, done: Sequence[PhaseResult], seconds: float
    ) -> Generator[Phase, None, tuple[float, float]]:
        """Requests a second that `--rate` says or a phase finds, and the seconds that are left.

        In that phase are as many users as there are slots, each with one request after the other.
        """
        if self.args.rate is not None:
            return max(self.args.rate, 0.01), self.seconds
        yield Phase("capacity", Closed(self.users), seconds, self.plain_variants, judged=False)
        return max(done[-1].figures.requests_per_s, 0.01), self.seconds - seconds

    def served_after(self, done: Sequence[PhaseResult], what: str) -> Check:
        """That requests were completed in the phase `after`."""
        after = self.by_name(done, "after")
        served = after.figures.complete if after else 0
        return Check("after", served > 0, f"{served} requests were completed after the {what}")

    def by_name(self, done: Sequence[PhaseResult], name: str) -> PhaseResult | None:
        """The phase of that name, if it took place."""
        return next((r for r in done if r.phase.name == name), None)


def describe(options: GenerateOptions) -> str:
    """How requests ask, in a few words."""
    k = options.num_speculative_tokens
    if k == 0:
        return "K = 0"
    rule = options.rule.name if options.rule else "default rule"
    return f"{rule}, K = {k}" if k is not None else rule


def variant_of(options: GenerateOptions) -> Variant:
    """A way to ask, by its own name."""
    return Variant(describe(options), options)


def number_list(text: str) -> list[float]:
    """Numbers more than 0 with commas between, ascending; for argparse."""
    numbers = sorted(float(part) for part in text.split(","))
    if not numbers or numbers[0] <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: not a list of numbers more than 0")
    return numbers

"""What a scenario is: phases of load, what is done beside them, what must hold."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
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

    @property
    def plain_variants(self) -> tuple[Variant, ...]:
        """One way to ask: as the flags say."""
        return (Variant(describe(self.options), self.options),)

    def calibration(self, seconds: float) -> Phase:
        """As many users as there are slots, each with one request after the other."""
        return Phase("capacity", Closed(self.users), seconds, self.plain_variants, judged=False)

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


def number_list(text: str) -> list[float]:
    """Numbers more than 0 with commas between, ascending; for argparse."""
    numbers = sorted(float(part) for part in text.split(","))
    if not numbers or numbers[0] <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: not a list of numbers more than 0")
    return numbers

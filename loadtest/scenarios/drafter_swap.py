"""Drafters take turns while streams run: no request may fail, none may be held up for long."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flyspec.client import GenerateOptions
from flyspec.errors import FlyspecError
from loadtest.admin import Admin
from loadtest.goals import Check
from loadtest.scenarios.base import Scenario, World
from loadtest.summary import PhaseResult
from loadtest.work import Closed, Phase

CANARY_SHARE = 0.2
DRAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter to swap to; `kind` empty is its service's default."""

    name: str
    address: str
    kind: str = ""

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """NAME=HOST:PORT or NAME=HOST:PORT,KIND; for argparse."""
        name, separator, where = text.partition("=")
        address, _, kind = where.partition(",")
        if not (name and separator and address):
            raise argparse.ArgumentTypeError(f"{text!r}: not NAME=HOST:PORT[,KIND]")
        return cls(name, address, kind)


@dataclass(frozen=True, slots=True)
class Turn:
    """A swap: how long its steps took, ms; `left` are generations that did not leave in time."""

    drafter: str
    probe_ms: float
    activate_ms: float
    drain_ms: float
    left: int


class DrafterSwap(Scenario):
    """Each turn: register, canary, activate, drain and remove the one before.

    At the end the drafter that was active before the test is registered again and takes over.
    """

    name = "drafter-swap"
    about = "drafters are swapped in mid-test; no request may fail"
    needs_admin = True

    def __init__(self, args: argparse.Namespace, options: GenerateOptions, world: World) -> None:
        super().__init__(args, options, world)
        self.turns: list[Turn] = []

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Who takes turns."""
        cls.add_users(parser, 8, "streams at once")
        parser.add_argument(
            "--swap-to", type=Candidate.parse, action="append", required=True,
            metavar="NAME=HOST:PORT[,KIND]",
            help="a further drafter; several take turns",
        )  # fmt: skip
        parser.add_argument("--turns", type=int, default=4, help="swaps (default 4)")

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[Phase]:
        """One load all the time."""
        yield Phase("swapping", Closed(self.users), self.seconds, self.plain_variants)

    def beside(self) -> None:
        """The swaps."""
        admin = self.world.admin
        assert admin is not None, "needs the admin port"
        before = admin.drafters()
        mine = {c.name for c in self.args.swap_to}
        if taken := mine & {d.name for d in before}:
            raise FlyspecError(f"--swap-to {', '.join(taken)}: that drafter is registered already")
        first = next((d for d in before if d.active), None)
        if first is None:
            raise FlyspecError("no drafter is active, so none can be swapped")
        active = first.name
        pause = self.seconds / (self.args.turns + 2)
        try:
            self.world.sleep(pause)
            for index in range(self.args.turns):
                if not self.world.running():
                    break
                candidate = self.args.swap_to[index % len(self.args.swap_to)]
                if candidate.name == active:
                    continue
                self._turn(admin, candidate, active, pause)
                active = candidate.name
        finally:
            self._restore(admin, first)

    def _turn(self, admin: Admin, candidate: Candidate, active: str, pause: float) -> None:
        probe_ms = admin.register(candidate.name, candidate.address, candidate.kind)
        admin.activate(candidate.name, CANARY_SHARE)
        self.world.note(f"{candidate.name} is a canary")
        self.world.sleep(0.3 * pause)
        began = time.perf_counter()
        admin.activate(candidate.name)
        activated = time.perf_counter()
        self.world.note(f"{candidate.name} is active")
        left = admin.drain(active, DRAIN_S)
        ended = time.perf_counter()
        admin.remove(active, force=bool(left))
        self.turns.append(
            Turn(candidate.name, probe_ms, 1e3 * (activated - began), 1e3 * (ended - activated),
                 left)
        )  # fmt: skip
        self.world.sleep(max(0.0, 0.7 * pause))

    def _restore(self, admin: Admin, first: Any) -> None:
        """What was active before the test is active again, and nothing of the test is left."""
        names = {d.name for d in admin.drafters()}
        if first.name not in names:
            for address in dict.fromkeys(r.address for r in first.replicas) or [first.address]:
                admin.register(first.name, address, first.kind)
        admin.activate(first.name)
        self.world.note(f"{first.name} is active again")
        for candidate in self.args.swap_to:
            if candidate.name in names:
                left = admin.drain(candidate.name, DRAIN_S)
                admin.remove(candidate.name, force=bool(left))

    def checks(self, done: Sequence[PhaseResult]) -> list[Check]:
        """Swaps took place, and generations left the old drafters."""
        left = sum(turn.left for turn in self.turns)
        return [
            Check("swaps", bool(self.turns), f"{len(self.turns)} swaps"),
            Check("drained", left == 0, f"{left} generations did not leave a drained drafter"),
        ]

    def found(self, done: Sequence[PhaseResult]) -> dict[str, Any]:
        """The turns."""
        return {"turns": [asdict(turn) for turn in self.turns]}

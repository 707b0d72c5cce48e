"""Drafters are swapped while streams run: no text may change, no stream may stall."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Annotated, Any

from flyspec.client import DrafterStatus
from flyspec.errors import FlyspecError
from loadtest.admin import Admin
from loadtest.goals import Check
from loadtest.measures import duration
from loadtest.scenarios.base import FIXED, Scenario, ScenarioVerdict, UserFlags, own_flag
from loadtest.summary import PhaseResult
from loadtest.work import Closed, LoadPhase

CANARY_SHARE = 0.2
DRAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter to swap to; if `kind` is empty, its service's default.

    Without an `address` it is one that the stack has already, such as a head of its target.
    """

    name: str
    address: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return self.name


def _candidates(texts: Sequence[str]) -> tuple[Candidate, ...]:
    """Parse NAME, NAME=HOST:PORT or NAME=HOST:PORT,KIND each. Raises `ValueError`."""
    found = []
    for text in texts:
        name, separator, where = text.partition("=")
        address, _, kind = where.partition(",")
        if not name or bool(separator) != bool(address):
            raise ValueError(f"{text}: not NAME or NAME=HOST:PORT[,KIND]")
        found.append(Candidate(name, address, kind))
    return tuple(found)


# fmt: off
@dataclass(frozen=True)
class SwapFlags(UserFlags):
    """The drafters, and the swaps."""

    swap_to: Annotated[tuple[Candidate, ...], own_flag(
        "Draft service to swap to, or a drafter that is there already; repeatable, used in turn.",
        metavar="NAME[=HOST:PORT[,KIND]]", read=_candidates,
    )] = ()
    turns: Annotated[int, own_flag("Number of swaps.", min=1)] = 4
    texts: Annotated[int, own_flag("Number of different texts, with the rule exact.", min=1)] = 24
    # fmt: on


class DrafterSwap(Scenario[SwapFlags]):
    """Each turn registers a drafter, gives it some traffic, activates it and removes the last one.

    With the rule exact, every text must equal the one generated before the swaps, token for token.
    At the end, the drafter that was active before the test is registered and activated again.
    """

    name = "drafter-swap"
    about = "Drafters are swapped during streams; no text may change and no request may fail."
    needs_admin = True
    load = replace(FIXED, seconds=120.0)
    defaults = SwapFlags()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turns: list[dict[str, Any]] = []
        # Candidates that stay registered: removing a head would lose it.
        self.resident = [c.name for c in self.own.swap_to if not c.address]

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[LoadPhase]:
        texts = self.exact_texts(self.own.texts)
        yield LoadPhase("swapping", Closed(self.users), self.seconds, self.plain_variants,
                        texts=texts, meanwhile=self._swap)  # fmt: skip

    def _swap(self) -> None:
        admin = self.world.operator
        before = admin.drafters()
        if not self.own.swap_to:
            raise FlyspecError("there is nothing to swap to: give --swap-to")
        known = {d.name for d in before}
        for candidate in self.own.swap_to:
            if bool(candidate.address) == (candidate.name in known):
                wrong = "registered already" if candidate.address else "not registered"
                raise FlyspecError(f"--swap-to {candidate.name}: that drafter is {wrong}")
        first = next((d for d in before if d.active), None)
        if first is None:
            raise FlyspecError("no drafter is active, so none can be swapped")
        active, pause = first.name, self.seconds / (self.own.turns + 2)
        try:
            time.sleep(pause)
            for candidate in islice(cycle(self.own.swap_to), self.own.turns):
                if self.world.control.opened.is_set() and candidate.name != active:
                    self._turn(admin, candidate, active, pause)
                    active = candidate.name
        finally:
            self._restore(admin, first)

    def _turn(self, admin: Admin, candidate: Candidate, active: str, pause: float) -> None:
        now, note, probe_ms = self.world.control.now, self.world.note, 0.0
        if candidate.address:
            probe_ms = admin.register(candidate.name, candidate.address, candidate.kind)
        admin.activate(candidate.name, CANARY_SHARE)
        note(f"{candidate.name} is a canary")
        time.sleep(0.3 * pause)
        began = now()
        admin.activate(candidate.name)
        activated = now()
        note(f"{candidate.name} is active")
        left = admin.drain(active, DRAIN_S)
        self.turns.append({
            "drafter": candidate.name, "probe_ms": probe_ms,
            "activate_ms": 1e3 * (activated - began), "drain_ms": 1e3 * (now() - activated),
            "left": left,
        })  # fmt: skip
        if active not in self.resident:
            admin.remove(active, force=bool(left))
        time.sleep(0.7 * pause)

    def _restore(self, admin: Admin, first: DrafterStatus) -> None:
        """Activate again what was active before the test, and remove what the test added."""
        names = {d.name for d in admin.drafters()}
        if first.name not in names:
            for address in dict.fromkeys(r.address for r in first.replicas):
                admin.register(first.name, address, first.kind)
        for name in (*self.resident, first.name):
            admin.activate(name)  # which ends its draining
        self.world.note(f"{first.name} is active again")
        for candidate in self.own.swap_to:
            if candidate.address and candidate.name in names:
                left = admin.drain(candidate.name, DRAIN_S)
                admin.remove(candidate.name, force=bool(left))

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        turns, figures = self.turns, phases["swapping"].figures
        left = sum(turn["left"] for turn in turns)
        activate, drain = (
            duration(max((turn[what] for turn in turns), default=0.0))
            for what in ("activate_ms", "drain_ms")
        )
        line = (
            f"{len(turns)} swaps moved {figures.moves} generations mid-stream, the longest pause "
            f"{duration(figures.longest_pause_ms)}; activating took at most {activate}, "
            f"draining {drain}"
        )
        return ScenarioVerdict({"turns": turns}, [line], [
            Check("swaps", bool(turns), f"{len(turns)} swaps"),
            Check("drained", left == 0, f"{left} generations did not leave a drained drafter"),
            *self.same_texts(),
        ])  # fmt: skip

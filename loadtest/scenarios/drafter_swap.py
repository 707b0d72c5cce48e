"""Drafters are swapped while streams run: no text may change, no stream may stall."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from flyspec.client import DrafterStats, DrafterStatus
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


@dataclass(frozen=True, slots=True)
class Turn:
    """A swap and its times in ms; `left` are generations that did not leave in time."""

    drafter: str
    probe_ms: float
    activate_ms: float
    drain_ms: float
    left: int


# fmt: off
@dataclass(frozen=True)
class SwapFlags(UserFlags):
    """What is swapped."""

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
        self.turns: list[Turn] = []
        self.stats: dict[str, DrafterStats] = {}

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
        active = first.name
        pause = self.seconds / (self.own.turns + 2)
        try:
            self.world.sleep(pause)
            for index in range(self.own.turns):
                if not self.world.running():
                    break
                candidate = self.own.swap_to[index % len(self.own.swap_to)]
                if candidate.name == active:
                    continue
                self._turn(admin, candidate, active, pause)
                active = candidate.name
        finally:
            self._restore(admin, first)

    def _turn(self, admin: Admin, candidate: Candidate, active: str, pause: float) -> None:
        probe_ms = 0.0
        if candidate.address:
            probe_ms = admin.register(candidate.name, candidate.address, candidate.kind)
        admin.activate(candidate.name, CANARY_SHARE)
        self.world.note(f"{candidate.name} is a canary")
        self.world.sleep(0.3 * pause)
        began = self.world.now()
        admin.activate(candidate.name)
        activated = self.world.now()
        self.world.note(f"{candidate.name} is active")
        left = admin.drain(active, DRAIN_S)
        ended = self.world.now()
        self._keep_stats(admin)
        if active not in self._resident:
            admin.remove(active, force=bool(left))
        self.turns.append(
            Turn(candidate.name, probe_ms, 1e3 * (activated - began), 1e3 * (ended - activated),
                 left)
        )  # fmt: skip
        self.world.sleep(max(0.0, 0.7 * pause))

    @property
    def _resident(self) -> list[str]:
        """Candidates that stay registered: removing a head would lose it."""
        return [candidate.name for candidate in self.own.swap_to if not candidate.address]

    def _keep_stats(self, admin: Admin) -> None:
        """Keep each drafter's statistics at their highest: removing it forgets them."""
        for drafter in admin.drafters():
            kept = self.stats.get(drafter.name)
            if kept is None or drafter.stats.num_spec_steps > kept.num_spec_steps:
                self.stats[drafter.name] = drafter.stats

    def _restore(self, admin: Admin, first: DrafterStatus) -> None:
        """Activate again what was active before the test, and remove what the test added."""
        self._keep_stats(admin)
        names = {d.name for d in admin.drafters()}
        if first.name not in names:
            for address in dict.fromkeys(r.address for r in first.replicas):
                admin.register(first.name, address, first.kind)
        for name in self._resident:
            admin.activate(name)  # which ends its draining
        admin.activate(first.name)
        self.world.note(f"{first.name} is active again")
        for candidate in self.own.swap_to:
            if candidate.address and candidate.name in names:
                left = admin.drain(candidate.name, DRAIN_S)
                admin.remove(candidate.name, force=bool(left))

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        turns, figures = self.turns, phases["swapping"].figures
        left = sum(turn.left for turn in turns)
        activate, drain = (
            max((getattr(t, what) for t in turns), default=0.0)
            for what in ("activate_ms", "drain_ms")
        )
        drafters = [
            {
                "drafter": name,
                "rounds": stats.num_spec_steps,
                "accepted share": stats.draft_acceptance_rate,
                "tokens/round": stats.mean_accepted_tokens,
                "proposal ms": stats.mean_proposal_ms,
                "failures": stats.failures_total,
            }
            for name, stats in sorted(self.stats.items())
            if stats.num_spec_steps
        ]
        line = (
            f"{len(turns)} swaps moved {figures.moves} generations mid-stream, the longest pause "
            f"{duration(figures.longest_pause_ms)}; activating took at most {duration(activate)}, "
            f"draining {duration(drain)}"
        )
        details = {"turns": [asdict(turn) for turn in turns], "drafters": drafters}
        return ScenarioVerdict(details, [line], [
            Check("swaps", bool(turns), f"{len(turns)} swaps"),
            Check("drained", left == 0, f"{left} generations did not leave a drained drafter"),
            *self.same_texts(),
        ])  # fmt: skip

"""Scenarios: phases of load, what happens during them, and checks."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from flyspec.client import GenerateOptions, UpstreamStatus
from flyspec.errors import ConfigError, FlyspecError
from flyspec.flags import Flag
from flyspec.values.tokens import SamplingParams
from loadtest.admin import Admin
from loadtest.control import Control
from loadtest.goals import Check
from loadtest.options import LoadOptions, Requests
from loadtest.prompts import FRESH, Source
from loadtest.record import Record
from loadtest.sampler import Sampler
from loadtest.summary import PhaseResult
from loadtest.work import Closed, LoadPhase, Text, Variant

DEFAULT_USERS = 8
"""If it is unknown how many generations an installation holds."""
TARGET, DRAFTER = "verify", "draft"
RESTART_S = 120.0
"""So long may a service take to be restarted by whoever watches over it."""

own_flag = partial(Flag, group="Scenario")
FIXED = LoadOptions(
    seconds=300.0,
    requests=Requests(rule="exact", num_speculative_tokens=8, max_tokens=160, ignore_eos=True),
)
"""Requests whose cost does not depend on what they say."""


@dataclass(frozen=True, slots=True)
class ScenarioVerdict:
    """Findings: figures for the report, of which lists of records become tables, the same in
    sentences, and checks besides goals and those of every test.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    checks: Sequence[Check] = ()


@dataclass
class World:
    """The installation and the load, for a scenario.

    `slots` are the generations that the installation runs at once, None if unknown. `note` marks a
    moment in the report. `ask` generates a text, unmeasured. `killed` are addresses of services
    that the scenario killed.
    """

    control: Control
    sampler: Sampler
    admin: Admin | None = None
    slots: int | None = None
    vocab_size: int = 0
    note: Callable[[str], None] = lambda _: None
    ask: Callable[[Text], None] = lambda _: None
    killed: set[str] = field(default_factory=set)

    @property
    def operator(self) -> Admin:
        """The admin port, for scenarios that need it."""
        assert self.admin is not None, "needs the admin port"
        return self.admin

    def process_of(self, name: str) -> UpstreamStatus:
        """Return the service of that name in `--watch`, as the orchestrator sees it.

        Raises `ConfigError`. Only named processes are ever killed: one on another machine may have
        the same id.
        """
        for upstream in self._upstreams(name):
            if upstream.process.process_id == self.sampler.pids.get(name):
                return upstream
        raise ConfigError(f"--watch {name}=PID: needed, with the process id of a {name} service")

    def kill(self, name: str) -> tuple[float, float]:
        """Kill a service; return when, and when its successor at the same address was ready."""
        before, killed = self.process_of(name), self.control.now()
        self.killed.add(before.address)
        os.kill(before.process.process_id, signal.SIGKILL)
        self.note(f"{name} is killed")
        while self.control.now() < killed + RESTART_S:
            time.sleep(0.1)
            for after in self._upstreams(name):
                again = after.process.instance_id not in ("", before.process.instance_id)
                if after.address == before.address and after.ready and again:
                    self.sampler.pids[name] = after.process.process_id
                    self.note(f"{name} is back")
                    return killed, self.control.now()
        raise FlyspecError(f"the killed {name} service was not restarted within {RESTART_S:g} s")

    def _upstreams(self, name: str) -> Sequence[UpstreamStatus]:
        status = self.operator.status()
        return status.targets if name == TARGET else status.drafters


# fmt: off
@dataclass(frozen=True)
class UserFlags:
    """A closed loop."""

    users: Annotated[int, own_flag("Users, each with one request at a time.", min=1)] = 8


@dataclass(frozen=True)
class LoadFlags:
    """A share of the rate that the installation sustains, which is given or measured."""

    rate: Annotated[float | None, own_flag(
        "Sustainable requests per second.", default="measured first",
    )] = None
    users: Annotated[int | None, own_flag(
        "Users while that rate is measured.", min=1, default="one per slot",
    )] = None
    load: Annotated[float, own_flag("Normal load, as a share of the sustainable rate.")] = 0.5
    # fmt: on


F = TypeVar("F")


class Scenario(ABC, Generic[F]):
    """A load test. `load` and `defaults` are the defaults of its flags."""

    name: ClassVar[str]
    about: ClassVar[str]
    needs_admin: ClassVar[bool] = False
    load: ClassVar[LoadOptions] = LoadOptions()
    defaults: ClassVar[Any]

    def __init__(self, load: LoadOptions, own: F, world: World) -> None:
        self.own, self.world = own, world
        self.options = load.requests.options()
        self.plain_variants = (variant_of(self.options),)
        self.seconds = load.seconds
        self.users: int = getattr(own, "users", None) or world.slots or DEFAULT_USERS

    @abstractmethod
    def phases(self, done: Sequence[PhaseResult]) -> Iterator[LoadPhase]:
        """The load, phase by phase; `done` grows as they end."""

    def excuses(self, record: Record) -> bool:
        """True if the scenario itself is to blame for a failed request."""
        return False

    @abstractmethod
    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        """Judge the phases, by name; raises KeyError if one did not take place."""

    @classmethod
    def sources(cls, own: F) -> Sequence[Source]:
        """The prompts, unless there are prompt files."""
        return (Source(FRESH),)

    # --- shared by several scenarios ----------------------------------------------------------

    def sustainable(
        self: Scenario[Any], done: Sequence[PhaseResult], seconds: float
    ) -> Generator[LoadPhase, None, tuple[float, float]]:
        """Requests per second from `--rate` or measured by a phase, and the seconds that remain.

        That phase has as many users as there are slots, each with one request at a time.
        """
        if self.own.rate is not None:
            return max(self.own.rate, 0.01), self.seconds
        users = Closed(self.users)
        yield LoadPhase("capacity", users, seconds, self.plain_variants, judged=False)
        return max(done[-1].figures.requests_per_s, 0.01), self.seconds - seconds

    def exact_texts(self, number: int) -> list[Text]:
        """Generate texts undisturbed that have to come out the same again; none if not `exact`.

        Every other one is sampled.
        """
        if self.options.rule is None or self.options.rule.name != "exact":
            return []
        self.world.note(f"generating {number} texts undisturbed")
        texts = []
        for seed in range(number):
            sampling = SamplingParams(0.8, 0.95) if seed % 2 else self.options.sampling
            options = replace(self.options, seed=seed, sampling=sampling)
            texts.append(Text(self.world.control.next_prompt(), options))
            self.world.ask(texts[-1])
        return texts

    def same_texts(self) -> list[Check]:
        """Return a check of the requests for fixed texts, if there were any."""
        texts = [r for r in self.world.control.records if r.outcome == "complete" and r.arrivals]
        wrong = sum(r.differs for r in texts)
        said = f"{wrong} of {len(texts)} differ from those generated undisturbed"
        return [Check("texts", not wrong, said)] if texts else []


def bounded(what: str, shares: Mapping[str, float], bound: float) -> list[Check]:
    """Check that each of these grew by no more than a share."""
    return [
        Check(f"{what} of {name}", share <= bound, f"{share:+.1%}, bound {bound:+.0%}")
        for name, share in shares.items()
    ]


def describe(options: GenerateOptions) -> str:
    """Return the options of requests in a few words."""
    k = options.num_speculative_tokens
    if k == 0:
        return "K = 0"
    rule = options.rule.name if options.rule else "default rule"
    return f"{rule}, K = {k}" if k is not None else rule


def variant_of(options: GenerateOptions) -> Variant:
    """A way to ask, named after its options."""
    return Variant(describe(options), options)

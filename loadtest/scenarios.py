"""Scenarios: phases of load, what happens during them, what must hold; a program of them all."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, Signature, getdoc
from itertools import cycle, islice, pairwise
from typing import Annotated, Any, TypeVar

import typer

from flyspec.cli.help import HelpCommand
from flyspec.cli.options import with_flags
from flyspec.cli.program import program
from flyspec.client import DrafterStatus, GenerateOptions
from flyspec.drafter_names import DRAFTER_KINDS, NEED_DATASTORE
from flyspec.errors import FlyspecError
from flyspec.flags import Flag
from flyspec.rules import Rule
from flyspec.values.generation import RecoveryKind
from flyspec.values.tokens import SamplingParams
from loadtest.figures import Check, PhaseResult, knee, number, percentile, times
from loadtest.load import Closed, LoadPhase, Open, Text
from loadtest.options import LoadOptions, Requests, list_of
from loadtest.prompts import FRESH, VARIED
from loadtest.run import MAX_LATE_MS, Scenario, ScenarioVerdict, describe

MAX_MEMORY_GROWTH = 0.05
"""Maximum growth of each --watch process, once warm, as a share."""
DRAFTER, TARGET = "draft", "verify"
"""Names of services in --watch."""
_own = partial(Flag, group="Scenario")
FIXED = LoadOptions(
    seconds=300.0,
    requests=Requests(rule="exact", num_speculative_tokens=8, max_tokens=160, ignore_eos=True),
)
"""Requests whose cost does not depend on what they say."""


# fmt: off
@dataclass(frozen=True)
class UserFlags:
    """A closed loop."""

    users: Annotated[int, _own("Users, each with one request at a time.", min=1)] = 8


@dataclass(frozen=True)
class LoadFlags:
    """A share of the rate that the installation sustains, which is given or measured."""

    rate: Annotated[float | None, _own(
        "Sustainable requests per second.", default="measured first", min=0.01,
    )] = None
    users: Annotated[int | None, _own(
        "Users while that rate is measured.", min=1, default="one per slot",
    )] = None
    load: Annotated[float, _own("Normal load, as a share of the sustainable rate.")] = 0.5
    # fmt: on


L = TypeVar("L", bound=LoadFlags)
U = TypeVar("U", bound=UserFlags)


class Arrivals(Scenario[L]):
    """Requests at a rate that the installation sustains, or a multiple of it."""

    def sustainable(self, seconds: float) -> Generator[LoadPhase, None, tuple[float, float]]:
        """Return requests per second from `--rate` or measured, and the seconds that remain.

        The phase that measures has as many users as there are slots.
        """
        if self.own.rate is not None:
            return self.own.rate, self.seconds
        yield LoadPhase("capacity", Closed(self.users), seconds, self.plain, judged=False)
        rate = self.test.done[-1].figures.requests_per_s
        return max(rate, 0.01), self.seconds - seconds

    def memory(self, phase: PhaseResult) -> tuple[dict[str, float], list[Check]]:
        """Return the growth of each process's memory in a phase as a share, and its checks."""
        growth = self.test.sampler.growth(phase.began, phase.sent_until)
        shares = {name: of.share for name, of in growth.items()}
        return shares, bounded("memory", shares, MAX_MEMORY_GROWTH)


class FixedTexts(Scenario[U]):
    """Texts that are asked for again and again, and have to come out the same."""

    def exact_texts(self, number: int) -> list[Text]:
        """Generate texts undisturbed, every other one sampled; none if the rule is not `exact`."""
        if self.options.rule is None or self.options.rule.name != "exact":
            return []
        self.test.say(f"generating {number} texts undisturbed")
        texts = []
        for seed in range(number):
            sampling = SamplingParams(0.8, 0.95) if seed % 2 else self.options.sampling
            options = replace(self.options, seed=seed, sampling=sampling)
            texts.append(Text(self.test.control.next_prompt(), options))
            self.test.ask(texts[-1])
        return texts

    def same_texts(self) -> list[Check]:
        """Return a check of the requests for fixed texts, if there were any."""
        texts = [r for r in self.test.control.records if r.outcome == "complete" and r.arrivals]
        wrong = sum(r.differs for r in texts)
        said = f"{wrong} of {len(texts)} differ from those generated undisturbed"
        return [Check("texts", not wrong, said)] if texts else []

def bounded(what: str, shares: Mapping[str, float], bound: float) -> list[Check]:
    """Check that each of these grew by no more than a share."""
    return [
        Check(f"{what} of {name}", share <= bound, f"{share:+.1%}, bound {bound:+.0%}")
        for name, share in shares.items()
    ]


# --- ramp -------------------------------------------------------------------------------------

WARM_UP = 0.05
"""Share of the time."""


def _positive(text: str) -> float:
    if (number := float(text)) <= 0:
        raise ValueError
    return number


_steps = partial(_own, read=lambda text: tuple(
    sorted(list_of(_positive, "a number greater than 0")(text))
))  # fmt: skip


# fmt: off
@dataclass(frozen=True)
class RampFlags:
    """The steps."""

    steps: Annotated[Sequence[float] | None, _steps(
        "Users at each step (closed loop).", metavar="N,...", default="1,2,4,8,16,32",
    )] = None
    rates: Annotated[Sequence[float] | None, _steps(
        "Instead of --steps: requests per second at each step (Poisson arrivals).",
        metavar="RATE,...",
    )] = None
    against: Annotated[int | None, _own(
        "Also measure a curve with this K; 0 is plain decoding.", metavar="K",
    )] = None
    # fmt: on


class Ramp(Scenario[RampFlags]):
    """Increase the load in steps; with --against, every step is run with either K."""

    name = "ramp"
    about = "Load that grows in steps; finds the knee of throughput against latency."
    defaults = RampFlags()

    def phases(self) -> Iterator[LoadPhase]:
        ways = [self.options]
        if self.own.against is not None:
            ways.append(replace(self.options, num_speculative_tokens=self.own.against))
        loads: list[Closed | Open] = (
            [Open(rate) for rate in self.own.rates]
            if self.own.rates
            else [Closed(round(users)) for users in self.own.steps or (1, 2, 4, 8, 16, 32)]
        )
        few = loads[len(loads) // 2]
        yield LoadPhase("warm-up", few, WARM_UP * self.seconds, self.plain, judged=False)
        each = (1 - WARM_UP) * self.seconds / (len(loads) * len(ways))
        for step, load in enumerate(loads):
            # Whichever is second in one step is first in the next.
            for options in ways if step % 2 == 0 else ways[::-1]:
                series = describe(options)
                name = f"{load}, {series}" if len(ways) > 1 else str(load)
                yield LoadPhase(name, load, each, {series: options}, series)

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        curves, lines = [], []
        for series in dict.fromkeys(p.series for p in phases.values() if p.series):
            steps = [p for p in phases.values() if p.series == series]
            most = max(p.figures.tokens_per_s for p in steps)
            said = f"knee not reached by {steps[-1].load}, ramp further"
            if (at := knee(steps)) is not None:
                figures = steps[at].figures
                said = (
                    f"knee at {steps[at].load}, {number(figures.tokens_per_s)} tokens/s with "
                    f"{number(figures.e2e.p50)} ms end to end (p50), {number(figures.e2e.p99)} ms "
                    "(p99)"
                )
            lines.append(f"{series}: {said}; at most {number(most)} tokens/s")
            curves.append({"series": series, "knee": None if at is None else steps[at].load,
                           "most_tokens_per_s": most})  # fmt: skip
        return ScenarioVerdict({"curves": curves}, lines)


# --- soak -------------------------------------------------------------------------------------

CALIBRATE_S, CALIBRATE = 60.0, 0.1
"""Time to measure the sustainable rate: a share of the whole test, at most so many seconds."""
MAX_LATENCY_GROWTH = 0.25
"""Maximum growth of p50 and p99 latency from the middle third to the last."""
RULES = ("exact", "fly", "fly-paper", "margin", "fuzzy", "typical", "rejection", "random")
DRAFTERS = ("", *(kind for kind in DRAFTER_KINDS if kind not in NEED_DATASTORE))


# fmt: off
@dataclass(frozen=True)
class SoakFlags(LoadFlags):
    """The load and its disturbances."""

    cancelled: Annotated[float, _own("Share of requests that are cancelled.")] = 0.05
    cancel_after: Annotated[float, _own(
        "Mean seconds until they are cancelled, unless they end before.", min=0.001,
    )] = 1.0
    varied: Annotated[bool, _own(
        "Draw every request's rule, drafter, K, sampling and length (up to --max-tokens), and ask "
        f"for {VARIED} prompts.",
    )] = False
    # fmt: on


class Soak(Arrivals[SoakFlags]):
    """Poisson arrivals at a share of the sustainable rate; some clients cancel mid-stream."""

    name = "soak"
    about = "Steady load for a long time; neither memory nor latency may grow."
    defaults = SoakFlags()

    @classmethod
    def prompts(cls, own: SoakFlags) -> str:
        return VARIED if own.varied else FRESH

    def phases(self) -> Iterator[LoadPhase]:
        rate, seconds = yield from self.sustainable(min(CALIBRATE_S, CALIBRATE * self.seconds))
        rate *= self.own.load if self.own.rate is None else 1.0
        variants = {"varied": self.options} if self.own.varied else self.plain
        yield LoadPhase(
            "soak", Open(rate), seconds, variants,
            vary=vary_everything if self.own.varied else None, cancelled=self.own.cancelled,
            cancel_after_s=self.own.cancel_after,
        )  # fmt: skip

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        soak, growth = phases["soak"], dict[str, float]()
        third, records = (soak.sent_until - soak.began) / 3, self.test.control.records
        middle, last = (
            times([r for r in records if r.phase == "soak" and begin <= r.planned < begin + third],
                  "e2e") for begin in (soak.began + third, soak.began + 2 * third)
        )  # fmt: skip
        if middle and last:
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                growth[name] = percentile(last, share) / percentile(middle, share) - 1
        memory, checks = self.memory(soak)
        checks += bounded("latency", growth, MAX_LATENCY_GROWTH)
        return ScenarioVerdict({"memory_growth": memory, "latency_growth": growth}, checks=checks)


def vary_everything(rng: random.Random, options: GenerateOptions) -> GenerateOptions:
    """Draw every option of a request."""
    return replace(
        options,
        sampling=SamplingParams(rng.choice([0.0, 0.0, 0.8]), rng.choice([1.0, 0.9])),
        seed=rng.randrange(1 << 30),
        max_tokens=rng.randint(1, options.max_tokens or 1),
        ignore_eos=rng.random() < 0.5,
        drafter=rng.choice(DRAFTERS),
        rule=Rule(rng.choice(RULES)),
        num_speculative_tokens=rng.choice([0, 2, 4, 8, 15]),
        logprobs=rng.choice([None, None, 2]),
    )


# --- overload ---------------------------------------------------------------------------------

CAPACITY, OVERLOAD = 0.15, 0.5
"""Shares of the time: to measure the sustainable rate; of the overload, of what is then left."""
MAX_P99_RATIO = 2.0
"""Maximum p99 latency of accepted requests, as a multiple of that under normal load."""
MAX_REFUSAL_MS = 500.0
"""Maximum p99 time to a refusal."""
MAX_RECOVERY_S = 5.0
"""Maximum time from the end of the overload to a request with a normal latency."""


# fmt: off
@dataclass(frozen=True)
class OverloadFlags(LoadFlags):
    """The overload."""

    factor: Annotated[float, _own("Overload, as a multiple of the sustainable rate.")] = 10.0
    # fmt: on


class Overload(Arrivals[OverloadFlags]):
    """Poisson arrivals at 80 % of the sustainable rate, at ten times that rate, at 80 % again.

    Accepted requests must stay within twice the p99 latency at 80 %, the others must be refused
    at once with a time to retry after, memory must not grow, and soon after the overload a
    request must have a normal latency again. Output lengths vary by half around --max-tokens.
    Goals apply before and after the overload.
    """

    name = "overload"
    about = "Ten times the sustainable load: accepted requests stay fast, the others are refused."
    load = FIXED
    defaults = OverloadFlags(load=0.8)

    def phases(self) -> Iterator[LoadPhase]:
        rate, seconds = yield from self.sustainable(CAPACITY * self.seconds)
        phase = LoadPhase("before", Open(self.own.load * rate), (1 - OVERLOAD) / 2 * seconds,
                          self.plain, vary=vary_length)  # fmt: skip
        yield phase
        yield replace(phase, name="burst", load=Open(self.own.factor * rate),
                      seconds=OVERLOAD * seconds, judged=False, drain=False)  # fmt: skip
        yield replace(phase, name="after")

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        burst, after = phases["burst"], phases["after"]
        normal, records = phases["before"].figures.e2e.p99, self.test.control.records
        again = min((r.planned - burst.sent_until for r in records if r.phase == "after"
                     and (r.metric("e2e") or math.inf) <= normal), default=math.inf)  # fmt: skip
        settled = after.began + MAX_RECOVERY_S
        calm = [r for r in records
                if r.phase == "before" or (r.phase == "after" and r.planned > settled)]  # fmt: skip
        ratio = burst.figures.e2e.p99 / percentile(times(calm, "e2e"), 0.99)
        late, refusal = burst.figures.late_p99_ms, burst.figures.refusal.p99
        refused = [r for r in records if r.outcome == "refused"]
        silent = sum(r.retry_after_s is None for r in refused)
        growth, memory = self.memory(burst)
        found = {"normal_e2e_ms": normal, "normal_again_after_s": again, "p99_ratio": ratio,
                 "memory_growth": growth}  # fmt: skip
        line = f"a latency is normal up to {number(normal)} ms, p99 before the burst"
        return ScenarioVerdict(found, [line], [
            Check("refusals", silent == 0, f"{silent} of {len(refused)} did not say when to retry"),
            Check("after", after.figures.complete > 0,
                  f"{after.figures.complete} requests completed after the burst"),
            Check("overload", burst.figures.refused > 0,
                  f"{burst.figures.refused} requests were refused"),
            Check("p99 of accepted requests", ratio <= MAX_P99_RATIO,
                  f"{ratio:.2f} times that under normal load, bound {MAX_P99_RATIO:g}"),
            Check("time to a refusal", not refusal > MAX_REFUSAL_MS,
                  f"{refusal:.0f} ms (p99), bound {MAX_REFUSAL_MS:g} ms"),
            Check("normal latency", again <= MAX_RECOVERY_S,
                  f"after {again:.1f} s, bound {MAX_RECOVERY_S:g} s"),
            Check("generator", late <= MAX_LATE_MS,
                  f"{late:.0f} ms late (p99), bound {MAX_LATE_MS:g} ms"),
            *memory,
        ])  # fmt: skip


def vary_length(rng: random.Random, options: GenerateOptions) -> GenerateOptions:
    """Draw an output's length from half to one and a half times `max_tokens`."""
    mean = options.max_tokens or 1
    return replace(options, max_tokens=rng.randint(max(1, mean // 2), max(1, 3 * mean // 2)))


# --- mixed rules ------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixFlags(UserFlags):
    """The rules."""

    rules: Annotated[
        str, _own("Rules, comma-separated; plain is K = 0.", metavar="NAME,...")
    ] = "plain, exact, fly, fly-paper, margin, fuzzy, typical, rejection"


class MixedRules(Scenario[MixFlags]):
    """A closed loop in which every request draws its rule at random; `plain` is K = 0."""

    name = "mixed-rules"
    about = "Concurrent requests with different acceptance rules, and with plain decoding."
    defaults = MixFlags()

    def phases(self) -> Iterator[LoadPhase]:
        variants, loop = {}, Closed(self.users)
        for name in map(str.strip, self.own.rules.split(",")):
            rule = {"num_speculative_tokens": 0} if name == "plain" else {"rule": Rule(name)}
            variants[name] = replace(self.options, **rule)
        yield LoadPhase("warm-up", loop, 0.1 * self.seconds, variants, judged=False)
        yield LoadPhase("mix", loop, 0.9 * self.seconds, variants)

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        starved = [n for n, f in phases["mix"].by_variant.items() if f.sent and not f.complete]
        said = f"never completed: {', '.join(starved) or 'none'}"
        return ScenarioVerdict(checks=[Check("rules", not starved, said)])


# --- drafter swap -----------------------------------------------------------------------------

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


def _candidate(text: str) -> Candidate:
    name, separator, where = text.partition("=")
    address, _, kind = where.partition(",")
    if not name or bool(separator) != bool(address):
        raise ValueError
    return Candidate(name, address, kind)


# fmt: off
@dataclass(frozen=True)
class SwapFlags(UserFlags):
    """The drafters, and the swaps."""

    swap_to: Annotated[tuple[Candidate, ...], _own(
        "Draft service to swap to, or a drafter that is there already; repeatable, used in turn.",
        metavar="NAME[=HOST:PORT[,KIND]]",
        read=list_of(_candidate, "NAME or NAME=HOST:PORT[,KIND]"),
    )] = ()
    turns: Annotated[int, _own("Number of swaps.", min=1)] = 4
    texts: Annotated[int, _own("Number of different texts, with the rule exact.", min=1)] = 24
    # fmt: on


class DrafterSwap(FixedTexts[SwapFlags]):
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

    def phases(self) -> Iterator[LoadPhase]:
        texts = self.exact_texts(self.own.texts)
        yield LoadPhase("swapping", Closed(self.users), self.seconds, self.plain, texts=texts,
                        meanwhile=self._swap)  # fmt: skip

    def _swap(self) -> None:
        before = {drafter.name: drafter for drafter in self.test.operator.drafters()}
        first = next((drafter for drafter in before.values() if drafter.active), None)
        if first is None or not self.own.swap_to:
            missing = "no drafter is active" if first is None else "give --swap-to"
            raise FlyspecError(f"there is nothing to swap: {missing}")
        for candidate in self.own.swap_to:
            if bool(candidate.address) == (candidate.name in before):
                wrong = "registered already" if candidate.address else "not registered"
                raise FlyspecError(f"--swap-to {candidate.name}: that drafter is {wrong}")
        active, pause = first.name, self.seconds / (self.own.turns + 2)
        try:
            time.sleep(pause)
            for candidate in islice(cycle(self.own.swap_to), self.own.turns):
                if self.test.control.opened.is_set() and candidate.name != active:
                    self._turn(candidate, active, pause)
                    active = candidate.name
        finally:
            self._restore(first)

    def _turn(self, candidate: Candidate, active: str, pause: float) -> None:
        admin, now, note = self.test.operator, self.test.control.now, self.test.say
        turn: dict[str, Any] = {"drafter": candidate.name, "probe_ms": 0.0}
        if candidate.address:
            probed = admin.ask("RegisterDrafter", name=candidate.name, address=candidate.address,
                               kind=candidate.kind)  # fmt: skip
            turn["probe_ms"] = probed.probe_ns / 1e6
        admin.ask("ActivateDrafter", name=candidate.name, share=CANARY_SHARE)
        note(f"{candidate.name} is a canary")
        time.sleep(0.3 * pause)
        began = now()
        admin.ask("ActivateDrafter", name=candidate.name)
        turn["activate_ms"], began = 1e3 * (now() - began), now()
        note(f"{candidate.name} is active")
        left = admin.drain(active, DRAIN_S)
        self.turns.append({**turn, "drain_ms": 1e3 * (now() - began), "left": left})
        if active not in self.resident:
            admin.ask("RemoveDrafter", name=active, force=bool(left))
        time.sleep(0.7 * pause)

    def _restore(self, first: DrafterStatus) -> None:
        """Activate again what was active before the test, and remove what the test added."""
        admin = self.test.operator
        names = {drafter.name for drafter in admin.drafters()}
        if first.name not in names:
            for address in dict.fromkeys(r.address for r in first.replicas):
                admin.ask("RegisterDrafter", name=first.name, address=address, kind=first.kind)
        for name in (*self.resident, first.name):
            admin.ask("ActivateDrafter", name=name)  # which ends its draining
        self.test.say(f"{first.name} is active again")
        for candidate in self.own.swap_to:
            if candidate.address and candidate.name in names:
                left = admin.drain(candidate.name, DRAIN_S)
                admin.ask("RemoveDrafter", name=candidate.name, force=bool(left))

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        left = sum(turn["left"] for turn in self.turns)
        pauses = [
            recovery.delay_ns / 1e6 for record in self.test.control.records
            for recovery in record.recoveries if recovery.kind is RecoveryKind.DRAFTER_SWAPPED
        ]  # fmt: skip
        activate, drain = (
            number(max((turn[what] for turn in self.turns), default=0.0))
            for what in ("activate_ms", "drain_ms")
        )
        line = (
            f"{len(self.turns)} swaps moved {len(pauses)} generations mid-stream, the longest "
            f"pause {number(max(pauses, default=0.0))} ms; activating took at most {activate} "
            f"ms, draining {drain} ms"
        )
        return ScenarioVerdict({"turns": self.turns}, [line], [
            Check("swaps", bool(self.turns), f"{len(self.turns)} swaps"),
            Check("drained", left == 0, f"{left} generations did not leave a drained drafter"),
            *self.same_texts(),
        ])  # fmt: skip


# --- recovery ---------------------------------------------------------------------------------

ALLOWANCE_S = 1.0
"""Cost of a target's absence beyond its duration that is allowed."""
HOLD_S = 3.0
FAULT_AT = 0.7
"""The fault comes after this share of a phase; streams begun before continue after its end."""
CASES = {
    "drafter killed": (DRAFTER, True),
    "drafter hangs": (DRAFTER, False),
    "target killed and restarted": (TARGET, True),
    f"target hangs for {HOLD_S:g} s": (TARGET, False),
}
"""The service that is killed, or else hangs."""


# fmt: off
@dataclass(frozen=True)
class RecoveryFlags(UserFlags):
    """The streams and the installation."""

    draft_timeout: Annotated[float, _own(
        "The installation's --draft-timeout-s, which bounds the loss of a drafter.",
    )] = 1.0
    # fmt: on


class KillRecovery(FixedTexts[RecoveryFlags]):
    """Long texts with rule exact; in each phase a service is killed, or stopped so that it hangs.

    Measures each stream's longest pause from then on, minus its median pause before. The loss of a
    drafter may cost --draft-timeout plus the time to open that many sessions, which is measured
    first; the loss of a target may cost the time it was away plus 1 s. Every text must equal the
    one generated without faults. Needs --watch draft=PID and verify=PID, and something that
    restarts killed services.
    """

    name = "recovery"
    about = "Services are killed or hang during streams; measures how long the streams stall."
    needs_admin = True
    load = replace(
        FIXED,
        seconds=120.0,
        requests=replace(FIXED.requests, num_speculative_tokens=15, max_tokens=800),
    )
    defaults = RecoveryFlags()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.faults: dict[str, tuple[float, float]] = {}

    def phases(self) -> Iterator[LoadPhase]:
        texts, streams, rng = self.exact_texts(self.users), Closed(self.users), random.Random(0)
        ids, length = range(8, self.test.vocab_size), self.options.max_tokens or 1
        brief = replace(self.options, max_tokens=2, num_speculative_tokens=1)
        opened = [Text(rng.choices(ids, k=length), brief) for _ in range(self.users)]
        phase = LoadPhase("opening", streams, 0.01, self.plain, judged=False, texts=opened)
        yield phase
        seconds = self.seconds / len(CASES)
        for name in CASES:
            yield replace(phase, name=name, seconds=seconds, texts=texts,
                          meanwhile=partial(self._hurt, name, FAULT_AT * seconds))  # fmt: skip

    def _hurt(self, case: str, after_s: float) -> None:
        time.sleep(after_s)
        service, kills = CASES[case]
        test = self.test
        self.faults[case] = test.kill(service) if kills else test.hang(service, HOLD_S)

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        opened = [r.ended - r.sent for r in self.test.control.records if r.phase == "opening"]
        rows = [self._row(case, *fault, max(opened, default=0.0))
                for case, fault in self.faults.items()]  # fmt: skip
        return ScenarioVerdict({"cases": rows}, checks=[
            *(Check(row["case"], row["streams"] > 0 and row["added max s"] <= row["bound s"],
                    f"a stream stood still for {row['added max s']:.2f} s, "
                    f"bound {row['bound s']:.2f} s ({row['bound of']})") for row in rows),
            Check("cases", len(rows) == len(CASES), f"{len(rows)} of {len(CASES)}"),
            *self.same_texts(),
        ])  # fmt: skip

    def _row(self, case: str, hurt: float, healed: float, open_s: float) -> dict[str, Any]:
        added, recoveries = list[float](), Counter[str]()
        streams = [r for r in self.test.control.records
                   if r.phase == case and r.sent < hurt < r.ended]  # fmt: skip
        for stream in streams:
            gaps = list(pairwise(stream.arrivals))
            recoveries.update(r.kind.name.lower().replace("_", " ") for r in stream.recoveries)
            if before := [b - a for a, b in gaps if b <= hurt]:
                longest = max((b - a for a, b in gaps if b > hurt), default=0.0)
                added.append(longest - statistics.median(before))
        bound = self.own.draft_timeout + open_s
        bound_of = f"deadline {self.own.draft_timeout:g} s, opening {open_s:.2f} s"
        if CASES[case][0] == TARGET:
            bound = healed - hurt + ALLOWANCE_S
            bound_of = f"{healed - hurt:.2f} s without it, {ALLOWANCE_S:g} s more"
        return {
            "case": case, "streams": len(added), "added p50 s": statistics.median(added or [0.0]),
            "added max s": max(added, default=0.0), "bound s": bound, "bound of": bound_of,
            "recoveries": ", ".join(f"{n} {kind}" for kind, n in recoveries.items()),
        }  # fmt: skip


# --- all of them ------------------------------------------------------------------------------

SCENARIOS: dict[str, type[Scenario[Any]]] = {
    scenario.name: scenario
    for scenario in (Ramp, Soak, Overload, DrafterSwap, MixedRules, KillRecovery)
}


def scenario_app(about: str, start: Callable[..., int], **more: Any) -> typer.Typer:
    """Return a program with a command for each scenario, which runs `start` for its exit code.

    `start` gets the scenario, its `LoadOptions` as `load`, its own flags as `own`, and `more` by
    name: dataclasses of further flags, with their defaults.
    """
    app = program(no_args_is_help=True, help=about)
    for name, scenario in SCENARIOS.items():

        def command(scenario: type[Scenario[Any]] = scenario, **given: Any) -> None:
            raise typer.Exit(start(scenario, **given))

        defaults = {"own": scenario.defaults, "load": scenario.load, **more}
        command.__annotations__ = {key: type(value) for key, value in defaults.items()}
        command.__signature__ = Signature([  # type: ignore[attr-defined]
            Parameter(key, Parameter.KEYWORD_ONLY, default=value) for key, value in defaults.items()
        ])  # fmt: skip
        app.command(name, cls=HelpCommand, help=getdoc(scenario), short_help=scenario.about)(
            with_flags(command)
        )
    return app

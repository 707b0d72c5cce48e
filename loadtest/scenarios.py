"""Scenarios: phases of load, and the bounds that must hold; a program of them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, Signature, getdoc
from typing import Annotated, Any

import typer

from flyspec.cli.help import HelpCommand
from flyspec.cli.options import with_flags
from flyspec.cli.program import program
from flyspec.flags import Flag
from loadtest.figures import Check, PhaseResult, knee, number, percentile, times
from loadtest.load import Closed, LoadPhase, Open
from loadtest.options import LoadOptions, Requests, list_of
from loadtest.run import LoadTest, describe

MAX_MEMORY_GROWTH = 0.05
"""Maximum growth of each --watch process, once warm, as a share."""
DEFAULT_USERS = 8
"""If it is unknown how many generations an installation holds."""
_own = partial(Flag, group="Scenario")


CALIBRATE_S, CALIBRATE = 60.0, 0.1
"""Time to measure the sustainable rate: a share of the whole test, at most so many seconds."""


@dataclass(frozen=True)
class RateFlags:
    """The rate that the installation sustains."""

    rate: Annotated[
        float | None, _own("Sustainable requests/s.", default="measured first", min=0.01)
    ] = None


class Arrivals(LoadTest):
    """Requests at a rate that the installation sustains, or a multiple of it."""

    def sustainable(self) -> Generator[LoadPhase, None, tuple[float, float]]:
        """Return requests per second from `--rate` or measured, and the seconds that remain.

        The phase that measures has as many users as there are slots.
        """
        if self.own.rate is not None:
            return self.own.rate, self.seconds
        users, seconds = self.slots or DEFAULT_USERS, min(CALIBRATE_S, CALIBRATE * self.seconds)
        yield LoadPhase("capacity", Closed(users), seconds, self.options, judged=False)
        rate = self.done[-1].figures.requests_per_s
        return max(rate, 0.01), self.seconds - seconds

    def check_memory(self, phase: PhaseResult) -> None:
        """Bound the growth of each process's memory in a phase, as a share."""
        grown, memory = self.sampler.growth(phase.began, phase.sent_until), self.sampler.memory
        shares = {name: mib / memory[name][-1].mib for name, mib in grown.items()}
        self.bound("memory", shares, MAX_MEMORY_GROWTH)

    def bound(self, what: str, shares: Mapping[str, float], bound: float) -> None:
        """Check that each of these grew by no more than a share."""
        self.found[f"{what}_growth"] = shares
        self.checks += [
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


class Ramp(LoadTest):
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
        yield LoadPhase("warm-up", few, WARM_UP * self.seconds, self.options, judged=False)
        each = (1 - WARM_UP) * self.seconds / (len(loads) * len(ways))
        for step, load in enumerate(loads):
            # Whichever is second in one step is first in the next.
            for options in ways if step % 2 == 0 else ways[::-1]:
                series = describe(options)
                name = f"{load}, {series}" if len(ways) > 1 else str(load)
                yield LoadPhase(name, load, each, options, series)

    def judge(self, phases: Mapping[str, PhaseResult]) -> None:
        curves = []
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
            self.lines.append(f"{series}: {said}; at most {number(most)} tokens/s")
            curves.append({"series": series, "knee": None if at is None else steps[at].load,
                           "most_tokens_per_s": most})  # fmt: skip
        self.found["curves"] = curves


# --- soak -------------------------------------------------------------------------------------

SOAK_LOAD = 0.5
"""Share of the sustainable rate."""
MAX_LATENCY_GROWTH = 0.25
"""Maximum growth of p50 and p99 latency from the middle third to the last."""


# fmt: off
@dataclass(frozen=True)
class SoakFlags(RateFlags):
    """The load and its disturbances."""

    cancelled: Annotated[float, _own("Share of requests that are cancelled.")] = 0.05
    cancel_after: Annotated[float, _own(
        "Mean seconds until they are cancelled, unless they end before.", min=0.001,
    )] = 1.0
    # fmt: on


class Soak(Arrivals):
    """Poisson arrivals at a share of the sustainable rate; some clients cancel mid-stream."""

    name = "soak"
    about = "Steady load for a long time; neither memory nor latency may grow."
    defaults = SoakFlags()

    def phases(self) -> Iterator[LoadPhase]:
        rate, seconds = yield from self.sustainable()
        rate *= SOAK_LOAD if self.own.rate is None else 1.0
        yield LoadPhase("soak", Open(rate), seconds, self.options, cancelled=self.own.cancelled,
                        cancel_after_s=self.own.cancel_after)  # fmt: skip

    def judge(self, phases: Mapping[str, PhaseResult]) -> None:
        soak, growth = phases["soak"], dict[str, float]()
        third, records = (soak.sent_until - soak.began) / 3, self.control.records
        middle, last = (
            times([r for r in records if r.phase == "soak" and begin <= r.planned < begin + third],
                  "e2e") for begin in (soak.began + third, soak.began + 2 * third)
        )  # fmt: skip
        if middle and last:
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                growth[name] = percentile(last, share) / percentile(middle, share) - 1
        self.check_memory(soak)
        self.bound("latency", growth, MAX_LATENCY_GROWTH)


# --- overload ---------------------------------------------------------------------------------

NORMAL_LOAD, OVERLOAD = 0.8, 10.0
"""Multiples of the sustainable rate."""
OVERLOADED = 0.5
"""Share of the time, once the sustainable rate is known."""
MAX_P99_RATIO = 2.0
"""Maximum p99 latency of accepted requests, as a multiple of that under normal load."""
MAX_REFUSAL_MS = 500.0
"""Maximum p99 time to a refusal."""
MAX_RECOVERY_S = 5.0
"""Maximum time from the end of the overload to a request with a normal latency."""
ALONE_S = 0.5
"""Time in which, once all others have ended, one user sends requests, the first of which has to
complete: however slow the machine is, and however short the phase after the overload."""


class Overload(Arrivals):
    """Poisson arrivals at 80 % of the sustainable rate, at ten times that rate, at 80 % again.

    Accepted requests must stay within twice the p99 latency at 80 %, the others must be refused
    at once with a time to retry after, memory must not grow, and soon after the overload a
    request must have a normal latency again. Output lengths vary by half around --max-tokens.
    In the end a user who is alone must be served. Goals apply before and after the overload.
    """

    name = "overload"
    about = "Ten times the sustainable load: accepted requests stay fast, the others are refused."
    # Their cost does not depend on what they say.
    defaults_of_load = LoadOptions(
        seconds=300.0,
        requests=Requests(rule="exact", num_speculative_tokens=8, max_tokens=160, ignore_eos=True),
    )
    defaults = RateFlags()

    def phases(self) -> Iterator[LoadPhase]:
        rate, seconds = yield from self.sustainable()
        phase = LoadPhase("before", Open(NORMAL_LOAD * rate), (1 - OVERLOADED) / 2 * seconds,
                          self.options, vary=True)  # fmt: skip
        yield phase
        yield replace(phase, name="burst", load=Open(OVERLOAD * rate),
                      seconds=OVERLOADED * seconds, judged=False, drain=False)  # fmt: skip
        yield replace(phase, name="after")
        yield LoadPhase("alone", Closed(1), ALONE_S, self.options, judged=False)

    def judge(self, phases: Mapping[str, PhaseResult]) -> None:
        burst, after, alone = phases["burst"], phases["after"], phases["alone"]
        normal, records = phases["before"].figures.e2e.p99, self.control.records
        again = min((r.planned - burst.sent_until for r in records if r.phase == "after"
                     and (r.metric("e2e") or math.inf) <= normal), default=math.inf)  # fmt: skip
        settled = after.began + MAX_RECOVERY_S
        calm = [r for r in records
                if r.phase == "before" or (r.phase == "after" and r.planned > settled)]  # fmt: skip
        ratio = burst.figures.e2e.p99 / percentile(times(calm, "e2e"), 0.99)
        refusal = burst.figures.refusal.p99
        refused = [r for r in records if r.outcome == "refused"]
        silent = sum(r.retry_after_s is None for r in refused)
        served = after.figures.complete + alone.figures.complete
        self.found |= {"normal_e2e_ms": normal, "normal_again_after_s": again, "p99_ratio": ratio}
        self.lines.append(f"a latency is normal up to {number(normal)} ms, p99 before the burst")
        self.checks += [
            Check("refusals", silent == 0, f"{silent} of {len(refused)} did not say when to retry"),
            Check("after", served > 0, f"{served} requests completed after the burst"),
            Check("overload", burst.figures.refused > 0,
                  f"{burst.figures.refused} requests were refused"),
            Check("p99 of accepted requests", ratio <= MAX_P99_RATIO,
                  f"{ratio:.2f} times that under normal load, bound {MAX_P99_RATIO:g}"),
            Check("time to a refusal", not refusal > MAX_REFUSAL_MS,
                  f"{refusal:.0f} ms (p99), bound {MAX_REFUSAL_MS:g} ms"),
            Check("normal latency", again <= MAX_RECOVERY_S,
                  f"after {again:.1f} s, bound {MAX_RECOVERY_S:g} s"),
        ]  # fmt: skip
        self.check_memory(burst)


# --- all of them ------------------------------------------------------------------------------

SCENARIOS: dict[str, type[LoadTest]] = {
    scenario.name: scenario for scenario in (Ramp, Soak, Overload)
}


def scenario_app(about: str, start: Callable[..., int], **more: Any) -> typer.Typer:
    """Return a program with a command for each scenario, which runs `start` for its exit code.

    `start` gets the scenario, its `LoadOptions` as `load`, its own flags as `own`, and `more` by
    name: dataclasses of further flags, with their defaults.
    """
    app = program(no_args_is_help=True, help=about)
    for name, scenario in SCENARIOS.items():

        def command(scenario: type[LoadTest] = scenario, **given: Any) -> None:
            raise typer.Exit(start(scenario, **given))

        defaults = {"own": scenario.defaults, "load": scenario.defaults_of_load, **more}
        command.__annotations__ = {key: type(value) for key, value in defaults.items()}
        command.__signature__ = Signature([  # type: ignore[attr-defined]
            Parameter(key, Parameter.KEYWORD_ONLY, default=value) for key, value in defaults.items()
        ])  # fmt: skip
        app.command(name, cls=HelpCommand, help=getdoc(scenario), short_help=scenario.about)(
            with_flags(command)
        )
    return app

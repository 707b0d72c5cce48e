"""`python -m bench.plan`: is `flyspec plan` right? Eight configurations that it was not fitted on.

One stack of the bundled models on this machine. The plan is calculated from single requests at
K = 15; configurations differ from that in K, in concurrent requests, in the distance to the
drafter, and in the drafter (which has a measurement at K = 15 of its own). What a prediction is
calculated from is measured again right before each configuration, so a machine whose speed drifts
slows both alike; how much it drifts is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Annotated

from flyspec.bench.conditions import PLAIN
from flyspec.bench.machine import this_machine
from flyspec.bench.modes import FlyspecMode, Item, Sample
from flyspec.bench.options import Problems, ProblemSeed
from flyspec.bench.planning import measured_modes, step_costs_of
from flyspec.bench.prompts import fresh_requests
from flyspec.bench.speed import rotated, run_batch
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.cli.results import BenchReport, Results, notes
from flyspec.cli.runtime import open_server, run_async
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import LOOPBACK, StackOptions
from flyspec.client import AdminClient, AsyncClient, GenerateOptions
from flyspec.flags import Flag
from flyspec.planning.plan import Deployment, rate
from flyspec.process import available_cores
from flyspec.progress import progress
from flyspec.rules import Rule
from flyspec.tables import record_table
from flyspec.values.admin import MeasuredStep
from loadtest.proxy import Proxy

MEASURED_K = 15
FAR = "far"
"""The drafter `model` behind the proxy."""
WITHIN = 0.15
"""How far a prediction may be from what is measured."""
_REQUESTS_PER_CLIENT = 6
_CALLS = 50
"""Calls whose median is a round trip."""


@dataclass(frozen=True)
class Configuration:
    """What is predicted.

    The proxy delays messages to the drafter and back by `delay_ms` each, and a little more; the
    prediction is for the round trip that calls then show.
    """

    name: str
    num_speculative_tokens: int
    clients: int = 1
    drafter: str = "model"
    delay_ms: float = 0.0


CONFIGURATIONS = (
    Configuration("K 2", 2),
    Configuration("K 4", 4),
    Configuration("K 8", 8),
    Configuration("K 8, 2 requests", 8, 2),
    Configuration("K 8, 4 requests", 8, 4),
    Configuration("K 4, 8 requests", 4, 8),
    Configuration("K 8, drafter 1 ms away", 8, delay_ms=1.0),
    Configuration("K 8, multi_level", 8, drafter="multi_level"),
)


# fmt: off
@dataclass(frozen=True)
class ValidationOptions:
    """How long to measure."""

    problems: Problems = 16
    problem_seed: ProblemSeed = 7
    repeats: Annotated[int, Flag("Runs of each configuration.", min=1)] = 5
# fmt: on


@dataclass(frozen=True)
class PlanCheck:
    """Tokens per second, medians over repeats; `ratio` is predicted to measured in a repeat."""

    configuration: str
    predicted: float
    measured: float
    ratio: float
    lowest: float
    highest: float

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1.0) <= WITHIN


@with_flags
def validate(options: ValidationOptions, results: Results) -> None:
    """Compare the tokens per second that `flyspec plan` calculates with measured ones."""
    results.of(lambda: run_async(_validate(options)))


async def _validate(o: ValidationOptions) -> BenchReport:
    most = max(c.clients for c in CONFIGURATIONS)
    # With a slot for each prompt, all openings find their prompt cached, whatever ran before.
    stack_options = StackOptions(log_level="warning", max_sessions=2 * (o.problems + most))
    async with open_server(stack_options, None) as (client, stack):
        assert stack is not None
        return await stack.guard(_measure(o, client, stack))


async def _measure(o: ValidationOptions, client: AsyncClient, stack: Stack) -> BenchReport:
    items = [
        Item("word problems", i, prompt)
        for i, prompt in enumerate(fresh_requests(o.problems, o.problem_seed))
    ]
    drafters = list(dict.fromkeys(c.drafter for c in CONFIGURATIONS))
    plain = _mode(client, PLAIN, 0, "")
    basis = [plain, *(_mode(client, d, MEASURED_K, d) for d in drafters)]
    costs = await step_costs_of(stack.options.verify_address)
    rates: dict[str, list[tuple[float, float]]] = {c.name: [] for c in CONFIGURATIONS}
    speeds: dict[str, list[float]] = {mode.name: [] for mode in basis}
    steps = (o.repeats + 1) * len(CONFIGURATIONS)
    async with _far_drafter(stack) as proxy:
        rtt_ms = {
            delay: await _rtt_ms(stack.options.draft_address, proxy, delay)
            for delay in {c.delay_ms for c in CONFIGURATIONS}
        }
        with progress("measuring", steps) as advance:
            for repeat in range(o.repeats + 1):  # the first one warms up
                for c in rotated(CONFIGURATIONS, repeat):
                    samples: list[Sample] = []
                    for mode in basis:
                        done = (await run_batch(mode, items, 1))[1]
                        samples += done
                        if repeat:
                            speeds[mode.name].append(_rate(done, 1))
                    measured = await _run(client, c, items, proxy)
                    if repeat:
                        predicted = _predict(c, basis, samples, costs, rtt_ms[c.delay_ms])
                        rates[c.name].append((predicted, measured))
                    advance()
    reports = [_report(name, of) for name, of in rates.items()]
    drift = {name: max(of) / min(of) for name, of in speeds.items()}
    return BenchReport(
        {
            **vars(o), "kind": "plan validation", "machine": this_machine(),
            "within": WITHIN, "configurations": [asdict(c) for c in CONFIGURATIONS],
            "reports": reports, "drift": drift, "speeds": speeds, "rtt_ms": rtt_ms,
        },
        [
            record_table(
                [
                    ("configuration", "{.configuration}"),
                    ("predicted", "{.predicted:.0f}"),
                    ("measured", "{.measured:.0f}"),
                    ("ratio", "{.ratio:.2f}"),
                    ("in repeats", "{0.lowest:.2f}-{0.highest:.2f}"),
                    ("holds", lambda r: "yes" if r.holds else "no"),
                ],
                reports,
                f"tokens/s, {o.problems} word problems, {o.repeats} repeats",
            ),
            notes(
                f"ratio: predicted to measured; holds: within {WITHIN:.0%}. What it is calculated "
                "from, fastest to slowest: "
                + ", ".join(f"{name} {ratio:.2f}" for name, ratio in drift.items())
                + "".join(
                    f". The round trip of {delay:g} ms each way took {rtt:.1f} ms"
                    for delay, rtt in rtt_ms.items() if delay
                )
                + "."
            ),
        ],
        {"rates": rates},
        passed=all(r.holds for r in reports),
    )  # fmt: skip


def _mode(client: AsyncClient, name: str, k: int, drafter: str) -> FlyspecMode:
    options = GenerateOptions(
        rule=Rule("exact"), num_speculative_tokens=k, drafter=drafter, max_tokens=128
    )
    return FlyspecMode(name, client, options)


async def _run(client: AsyncClient, c: Configuration, items: Sequence[Item], proxy: Proxy) -> float:
    """Return the tokens per second while all of the configuration's clients have a request."""
    proxy.delay_s = c.delay_ms / 1e3
    drafter = FAR if c.delay_ms else c.drafter
    mode = _mode(client, c.name, c.num_speculative_tokens, drafter)
    number = max(len(items), _REQUESTS_PER_CLIENT * c.clients)
    requests = [items[i % len(items)] for i in range(number)]
    return _rate((await run_batch(mode, requests, c.clients))[1], c.clients)


def _rate(samples: Sequence[Sample], clients: int) -> float:
    return clients * sum(s.tokens for s in samples) / sum(s.seconds for s in samples)


def _predict(
    c: Configuration,
    basis: Sequence[FlyspecMode],
    samples: Sequence[Sample],
    costs: Sequence[MeasuredStep],
    rtt_ms: float,
) -> float:
    modes = measured_modes(basis, samples, costs)
    measured = next(m for m in modes if m.mode == c.drafter)
    deployment = Deployment(clients=c.clients, cores=available_cores(), draft_rtt_ms=rtt_ms)
    return rate(measured, deployment, c.num_speculative_tokens).tokens_per_s


@asynccontextmanager
async def _far_drafter(stack: Stack) -> AsyncIterator[Proxy]:
    """Register the draft model a second time, behind a proxy that can delay."""
    host, port = stack.options.draft_address.rsplit(":", 1)
    assert host == LOOPBACK
    proxy = Proxy(host, int(port))
    await proxy.start()
    try:
        async with AdminClient(stack.admin_address) as admin:
            await admin.register_drafter(FAR, proxy.address, "model")
            yield proxy
    finally:
        await proxy.close()


async def _rtt_ms(direct: str, proxy: Proxy, delay_ms: float) -> float:
    """Return by how many ms the proxy lengthens a call; 0 without a delay."""
    if not delay_ms:
        return 0.0
    proxy.delay_s = delay_ms / 1e3
    return await _call_ms(proxy.address) - await _call_ms(direct)


async def _call_ms(address: str) -> float:
    async with AsyncClient(address, max_retries=0) as client:
        times = []
        for _ in range(_CALLS):
            began = time.perf_counter()
            await client.check_health()
            times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def _report(name: str, rates: Sequence[tuple[float, float]]) -> PlanCheck:
    ratios = [predicted / measured for predicted, measured in rates]
    return PlanCheck(
        name,
        statistics.median(predicted for predicted, _ in rates),
        statistics.median(measured for _, measured in rates),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


if __name__ == "__main__":
    run(single(validate), failed=1)

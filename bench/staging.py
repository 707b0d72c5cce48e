"""`python -m bench.staging`: what staging wins back of the time that a distance costs.

The services of one stack behind proxies that delay every message, and two orchestrators over them,
one that stages rounds and one that does not. Word problems, one request at a time. The draft model
has further layers, which leave its texts as they are, so that a proposal takes about as long as a
step of the target.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Annotated

from flyspec.bench.machine import this_machine
from flyspec.bench.options import Problems, ProblemSeed, numbers_flag
from flyspec.bench.pair_checkpoints import pad_layers
from flyspec.bench.prompts import fresh_requests
from flyspec.bench.speed import rotated
from flyspec.bundled import DRAFT
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.cli.results import BenchReport, Results, notes
from flyspec.cli.runtime import open_server, run_async
from flyspec.cli.service import Child
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import LOOPBACK, StackOptions
from flyspec.client import AsyncClient, Completion, GenerateOptions, Prompt
from flyspec.errors import FlyspecError
from flyspec.flags import Dtype, Flag
from flyspec.progress import progress
from flyspec.rules import Rule
from flyspec.tables import record_table
from loadtest.proxy import Proxy

NEAR, FAR, STAGED, AUTO = "near", "far", "far, staged", "far, auto"
WAYS = {NEAR: "off", FAR: "off", STAGED: "on", AUTO: "auto"}
"""How requests run, and the orchestrator's `--staging` for it; all but the first are delayed."""
WON_BACK = 0.4
"""Share of the delay's cost that staging should win back at least."""


# fmt: off
@dataclass(frozen=True)
class StagingOptions:
    """What to measure."""

    problems: Problems = 12
    problem_seed: ProblemSeed = 11
    repeats: Annotated[int, Flag("Runs of each way.", min=1)] = 5
    delay_ms: Annotated[float, Flag("Delay of every message between services, in ms.", min=0)] = 2.0
    num_speculative_tokens: Annotated[tuple[int, ...], numbers_flag("K")] = (3, 5, 8)
    rules: Annotated[str, Flag("Rules, comma-separated.")] = "exact,fly"
    draft_layers: Annotated[int, Flag("Layers to add to the draft model.", min=0)] = 10
    dtype: Annotated[Dtype, Flag("Data type of the models.")] = "auto"
    max_tokens: Annotated[int, Flag("Maximum output tokens.", min=1)] = 128
    # fmt: on


@dataclass(frozen=True)
class Run:
    """One request. `first_ns` is the time until its first token."""

    total_ns: int
    tokens: int
    completion: Completion


@dataclass(frozen=True)
class StagingResult:
    """One rule and K: tokens per second of each way, medians of all repeats, and what staging did.

    `won_back` is (far, staged - far) / (near - far) in time per token, the median over repeats.
    `proposal_ms` and `step_ms` are the models' times per round, without delay.
    """

    rule: str
    k: int
    tokens_per_round: float
    proposal_ms: float
    step_ms: float
    near: float
    far: float
    staged: float
    auto: float
    won_back: float
    hit_rate: float


@with_flags
def staging(options: StagingOptions, results: Results) -> None:
    """Measure what staging wins back of the time that a distance costs."""
    results.of(lambda: run_async(_run(options)))


async def _run(o: StagingOptions) -> BenchReport:
    with TemporaryDirectory() as folder:
        draft = pad_layers(DRAFT, Path(folder), o.draft_layers)
        stack_options = StackOptions(
            log_level="warning", draft_model=str(draft), dtype=o.dtype, draft_dtype=o.dtype,
            threads=1,
        )  # fmt: skip
        async with open_server(stack_options, None) as (_, stack):
            assert stack is not None
            return await stack.guard(_measure(o, stack))


async def _measure(o: StagingOptions, stack: Stack) -> BenchReport:
    prompts = fresh_requests(o.problems, o.problem_seed)
    cases = [(rule, k) for rule in o.rules.split(",") for k in o.num_speculative_tokens]
    runs: dict[tuple[str, int], dict[str, list[list[Run]]]] = {
        case: {way: [] for way in WAYS} for case in cases
    }
    async with _orchestrators(stack) as (clients, proxies):
        with progress("measuring", (o.repeats + 1) * len(cases) * len(WAYS)) as advance:
            for repeat in range(o.repeats + 1):  # the first one warms up
                for case in cases:
                    for way in rotated([*WAYS], repeat):
                        for proxy in proxies:
                            proxy.delay_s = 0.0 if way == NEAR else o.delay_ms / 1e3
                        done = [await _generate(clients[way], p, *case, o) for p in prompts]
                        if repeat:
                            runs[case][way].append(done)
                        advance()
    reports = [_result(*case, of) for case, of in runs.items()]
    return BenchReport(
        {
            **vars(o), "kind": "staging", "machine": this_machine(), "won_back": WON_BACK,
            "results": [asdict(report) for report in reports],
        },
        [
            record_table(
                [
                    ("rule", "{.rule}"),
                    ("K", "{.k}"),
                    ("tokens a round", "{.tokens_per_round:.2f}"),
                    ("proposal, ms", "{.proposal_ms:.1f}"),
                    ("step, ms", "{.step_ms:.1f}"),
                    (NEAR, "{.near:.0f}"),
                    (FAR, "{.far:.0f}"),
                    (STAGED, "{.staged:.0f}"),
                    (AUTO, "{.auto:.0f}"),
                    ("won back", "{.won_back:.0%}"),
                    ("hits", "{.hit_rate:.0%}"),
                ],
                reports,
                f"tokens/s, {o.problems} word problems, {o.repeats} repeats, "
                f"{o.delay_ms:g} ms a message",
            ),
            notes(
                "won back: share of the time that the delay costs. hits: rounds that the target "
                "began by itself, of those after rounds for which others were staged."
            ),
        ],
        {},
        passed=all(r.won_back >= WON_BACK for r in reports),
    )  # fmt: skip


@asynccontextmanager
async def _orchestrators(
    stack: Stack,
) -> AsyncIterator[tuple[dict[str, AsyncClient], list[Proxy]]]:
    """Start an orchestrator for each way of staging over the services, behind proxies."""
    o = stack.options
    async with AsyncExitStack() as ending:
        proxies = []
        for address in (o.verify_address, o.draft_address):
            proxy = Proxy(LOOPBACK, int(address.rsplit(":", 1)[1]))
            await proxy.start()
            ending.push_async_callback(proxy.close)
            proxies.append(proxy)
        verify, draft = (proxy.address for proxy in proxies)
        by_staging: dict[str, AsyncClient] = {}
        for way in dict.fromkeys(WAYS.values()):
            flags = [
                "--port", "0", "--admin-port", "0", "--http-port", "-1", "--metrics-port", "0",
                "--verify-address", verify, "--draft-address", draft, "--staging", way,
                "--log-level", "warning",
            ]  # fmt: skip
            child = await Child.start("orchestrator", "orchestrator", flags, 1, lambda _: None)
            ending.push_async_callback(child.ended)
            ending.callback(child.send, signal.SIGTERM)
            await child.ready()
            client = AsyncClient(f"{LOOPBACK}:{child.facts['port']}", max_retries=0)
            by_staging[way] = await ending.enter_async_context(client)
        yield {way: by_staging[staging] for way, staging in WAYS.items()}, proxies


async def _generate(
    client: AsyncClient, prompt: Prompt, rule: str, k: int, o: StagingOptions
) -> Run:
    options = GenerateOptions(
        rule=Rule(rule), num_speculative_tokens=k, drafter="model", max_tokens=o.max_tokens
    )
    began = perf_counter_ns()
    async for event in client.generate(prompt, options):
        if isinstance(event, Completion):
            return Run(perf_counter_ns() - began, event.completion_tokens, event)
    raise FlyspecError("a generation ended without a completion")


def _result(rule: str, k: int, runs: dict[str, list[list[Run]]]) -> StagingResult:
    token_ns = {way: [_token_ns(done) for done in of] for way, of in runs.items()}
    won_back = [
        (far - staged) / (far - near)
        for near, far, staged in zip(
            token_ns[NEAR], token_ns[FAR], token_ns[STAGED], strict=True
        )
    ]
    near = [run.completion for done in runs[NEAR] for run in done]
    rounds = sum(c.speculation.num_spec_steps for c in near)
    staged = [run.completion.speculation for done in runs[STAGED] for run in done]
    speed = {way: 1e9 / statistics.median(of) for way, of in token_ns.items()}
    return StagingResult(
        rule=rule,
        k=k,
        tokens_per_round=sum(c.completion_tokens for c in near) / rounds,
        proposal_ms=sum(c.timings.draft_model_ns for c in near) / rounds / 1e6,
        step_ms=sum(c.timings.target_model_ns for c in near) / rounds / 1e6,
        near=speed[NEAR],
        far=speed[FAR],
        staged=speed[STAGED],
        auto=speed[AUTO],
        won_back=statistics.median(won_back),
        hit_rate=sum(m.num_staged_hits for m in staged)
        / max(1, sum(m.num_staging_rounds for m in staged)),
    )


def _token_ns(runs: Sequence[Run]) -> float:
    return sum(run.total_ns for run in runs) / sum(run.tokens for run in runs)


if __name__ == "__main__":
    run(single(staging), failed=1)

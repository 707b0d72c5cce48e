"""Does a text depend on the batch it was made in? `python -m bench.invariance`."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import torch

from bench.exactness import EXACT, Data, prompt_sets
from flyspec.bundled import TARGET
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, say, single
from flyspec.cli.runtime import run_async
from flyspec.client import Chat
from flyspec.concurrency import all_or_first_error
from flyspec.engine.loading import load_model
from flyspec.engine.model import Step
from flyspec.engine.runner import ModelRunner
from flyspec.flags import Dtype, Flag
from flyspec.tables import table_of
from flyspec.tokenizer import Tokenizer
from flyspec.values.admin import TokenizerBundle
from flyspec.values.rounds import VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.options import MaxTokens, Repeats, names_of, numbers_flag
from flyspec_lab.report import Report, Results
from verify_service.engine import VerifyEngine

WRONG_DRAFTS = 0.15
"""Share of drafted tokens that differ from the plain text."""
CONTEXT_LENGTH = 1024
CONTEXTS = range(40, 600, 17)
"""Tokens of the sequences in the step times, in turn."""
PREFILL = 512
"""Tokens of the prompt that is timed, in one step."""


# fmt: off
@dataclass(frozen=True)
class InvarianceOptions:
    """What to compare and to time."""

    model: Annotated[str, Flag(
        "Model: a directory.", default="the bundled target model",
    )] = str(TARGET)
    data: Data = Path("../shared/data")
    dtypes: Annotated[tuple[str, ...], Flag(
        "Data types of the weights, comma-separated.", name="--dtype", metavar="DTYPE,...",
        listed=True, read=names_of(get_args(Dtype)[1:]),
    )] = ("bfloat16", "float32")
    threads: Annotated[int, Flag("CPU threads; 1 for fair costs.", min=1)] = 1
    texts: Annotated[int, Flag("Number of texts to compare.", min=1)] = 32
    max_tokens: MaxTokens = 48
    ks: Annotated[tuple[int, ...], numbers_flag(
        "Drafted tokens per round", name="--k",
    )] = (1, 4, 8, 15)
    batches: Annotated[tuple[int, ...], numbers_flag(
        "Texts generated at the same time", name="--batch",
    )] = (1, 8, 32)
    repeats: Repeats = 15
    no_agreement: Annotated[bool, Flag("Measure costs only.")] = False
    no_cost: Annotated[bool, Flag("Compare texts only.")] = False
    # fmt: on


@dataclass(frozen=True)
class Agreement:
    """Texts that differ from plain decoding's; K 0 is plain decoding in a batch."""

    dtype: str
    batch_invariant: bool
    k: int
    batch: int
    texts: int
    different: int


@dataclass(frozen=True)
class Cost:
    """Median processor time of a step in ms, without the mode and with it, and of their ratio."""

    dtype: str
    step: str
    off_ms: float
    on_ms: float
    ratio: float


def prompts(data: Path, count: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Return token ids of `count` prompts, half of them code if there is any."""
    code = prompt_sets(data, ["humaneval"], count // 2).get("humaneval", [])
    found = [*code, *prompt_sets(data, ["problems"], count - len(code))["problems"]]
    return [
        (tokenizer.encode_chat(p) if isinstance(p, Chat) else tokenizer.encode(str(p)))[
            : CONTEXT_LENGTH // 2
        ]
        for p in found
    ]


async def generate(
    runner: ModelRunner,
    tokenizer: TokenizerBundle,
    prompts: Sequence[list[int]],
    plain: Sequence[Sequence[int]],
    k: int,
    batch: int,
    max_tokens: int,
) -> list[list[int]]:
    """Generate greedily, `batch` texts at a time, with `k` drafts per round."""
    # OpenMP keeps the number of threads per calling thread.
    prepare = partial(torch.set_num_threads, torch.get_num_threads())
    engine = VerifyEngine(runner, tokenizer, 4096, prepare)
    gate = asyncio.Semaphore(batch)

    async def one(index: int, ids: list[int]) -> list[int]:
        rng = random.Random(f"{k} {index}")
        text: list[int] = []
        async with gate:
            session = engine.open(VerifyOpen(ids, len(ids), EXACT, SamplingParams(), seed=0))
            try:
                while (at := len(text)) < max_tokens:
                    drafts = [
                        rng.randrange(engine.info.vocab_size) if rng.random() < WRONG_DRAFTS else t
                        for t in (plain[index][at : at + k] if k else ())
                    ]
                    round_ = VerifyRound(at + 1, len(ids) + at, [], drafts)
                    verdict = await engine.submit(session, round_).get()
                    if isinstance(verdict, Exception):
                        raise verdict
                    text += [*drafts[: verdict.num_accepted], verdict.next_token_id]
            finally:
                engine.close(session)
        return text[:max_tokens]

    engine.start()
    try:
        return await all_or_first_error(one(i, ids) for i, ids in enumerate(prompts))
    finally:
        engine.stop()
        runner.cache.forget()


async def agreement(
    runner: ModelRunner,
    tokenizer: TokenizerBundle,
    ids: Sequence[list[int]],
    options: InvarianceOptions,
    dtype: str,
) -> list[Agreement]:
    """Compare every K and batch with plain decoding, one text at a time."""
    make = partial(generate, runner, tokenizer, ids)
    plain = await make((), 0, 1, options.max_tokens)
    found = []
    for batch in options.batches:
        for k in (0, *options.ks):
            if (k, batch) != (0, 1):
                texts = await make(plain, k, batch, options.max_tokens)
                different = sum(text != own for text, own in zip(texts, plain, strict=True))
                row = Agreement(dtype, runner.batch_invariant, k, batch, len(ids), different)
                say(str(row))
                found.append(row)
    return found


def context(slot: int) -> int:
    """Return the tokens of a slot's sequence in the step times, in no order."""
    return CONTEXTS[(slot * 13 + 15) % len(CONTEXTS)]


def costs(off: ModelRunner, on: ModelRunner, repeats: int, dtype: str) -> list[Cost]:
    cases = {
        f"batch {batch}, K {k}": [
            Step(slot, context(slot), [7] * (k + 1), k + 1) for slot in range(batch)
        ]
        for batch in (1, 8, 32)
        for k in (0, 4, 8, 15)
    }
    cases[f"prefill of {PREFILL}"] = [Step(0, 0, [7] * PREFILL, 1)]
    cases["batch 8, K 4, and 256 of a prefill"] = [
        *(Step(slot, context(slot), [7] * 5, 5) for slot in range(8)),
        Step(8, 0, [7] * 256, 0),
    ]
    found = []
    for name, steps in cases.items():
        times: dict[ModelRunner, list[float]] = {off: [], on: []}
        for repeat in range(repeats + 2):
            for runner in (off, on) if repeat % 2 else (on, off):
                started = time.process_time_ns()
                runner.forward(steps)
                if repeat >= 2:  # kernels are compiled on first use
                    times[runner].append((time.process_time_ns() - started) / 1e6)
        ratios = [b / a for a, b in zip(times[off], times[on], strict=True)]
        cost = Cost(dtype, name, *map(statistics.median, (times[off], times[on], ratios)))
        say(str(cost))
        found.append(cost)
    for runner in (off, on):
        runner.cache.forget()  # the steps' contexts were never computed
    return found


async def measure(o: InvarianceOptions) -> Report:
    torch.set_num_threads(o.threads)
    rows: list[Agreement] = []
    steps: list[Cost] = []
    for dtype in o.dtypes:
        runners = []
        for invariant in (False, True):
            loaded = load_model(o.model, "cpu", dtype, CONTEXT_LENGTH)
            slots = max(32, *o.batches)
            runners.append(ModelRunner(loaded, slots, batch_invariant=invariant))
            runners[-1].warm_up()
        if not o.no_cost:
            off, on = runners
            steps += costs(off, on, o.repeats, dtype)
        if not o.no_agreement:
            ids = prompts(o.data, o.texts, Tokenizer(loaded.tokenizer))
            for runner in runners:
                rows += await agreement(runner, loaded.tokenizer, ids, o, dtype)
    wrong = sum(row.different for row in rows if row.batch_invariant)
    tables = [table_of(list(map(vars, records)), left=2) for records in (rows, steps) if records]
    return Report(
        {**vars(o), "agreement": rows, "cost": steps},
        [*tables, f"with the mode, {wrong} texts differ"],
        passed=not wrong,
    )


@with_flags
def invariance(options: InvarianceOptions, results: Results) -> None:
    """Check that texts do not depend on their batch, and measure what that costs.

    Runs transformers' modules in this process, greedy, with rule exact, with and without
    batch-invariant mode. Texts made with K drafts per round, several at a time, are compared with
    the same texts made one token per step, one at a time. Drafts are the plain text with a fixed
    probability of error per token, so that rounds of every length occur.

    Then steps are timed with and without the mode, in turn: processor time, which a busy machine
    does not change, and the median of the pairs' ratios.

    The exit code is 1 if a text differs with the mode on. Prompts: fresh word problems, and
    HumanEval if its file is in --data.
    """
    results.of(lambda: run_async(measure(options)))


if __name__ == "__main__":
    run(single(invariance))

"""How a long prompt delays decoding sessions: step times before, during and after its prefill.

`VerifyEngine` in this process: sessions send rounds of K drafts without pause; then a new prompt
arrives, cut into chunks as configured or, for comparison, in one. Runs with each chunk size take
turns. A step is a turn of the engine's loop including judging: what each session in it waits for.
"""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial

import torch
from transformers.utils.logging import disable_progress_bar

from flyspec.concurrency import check_reached, until_interrupted
from flyspec.engine.loading import LoadedModel, load_model
from flyspec.engine.runner import ModelRunner
from flyspec.engine.scheduler import StepBudget
from flyspec.errors import ConfigError
from flyspec.progress import progress
from flyspec.rules import Rule
from flyspec.values.rounds import VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.engine.stall_report import Arrival, StallReport, StepRecord, report_chunk
from flyspec_lab.bench.engine.steps import context_limit
from flyspec_lab.bench.options import STALL_GROWTH, StallOptions
from verify_service.engine import VerifyEngine
from verify_service.sessions import TargetSession

_POLL_S = 0.005
_WARM_UP_STEPS = 10


class RecordingEngine(VerifyEngine):
    """Records when each step began and ended, and what it ran."""

    def __init__(self, runner: ModelRunner, loaded: LoadedModel, budget: StepBudget) -> None:
        # OpenMP keeps the number of threads per calling thread.
        prepare = partial(torch.set_num_threads, torch.get_num_threads())
        super().__init__(runner, loaded.tokenizer, 4096, prepare, budget, self._ran)
        self._last = 0, 0
        self.records: list[StepRecord] = []

    def _ran(self, _: int, sequences: int, tokens: int, __: int) -> None:
        self._last = sequences, tokens

    def step(self) -> None:
        begin = time.perf_counter_ns()
        super().step()
        self.records.append(StepRecord(begin, time.perf_counter_ns(), *self._last))


async def measure(options: StallOptions) -> StallReport:
    """Let the prompt arrive `repeats` times per chunk size. Raises `ConfigError`.

    If interrupted, returns what was measured with all chunk sizes until then.
    """
    limit = context_limit(options.model)
    if options.max_model_len > limit:
        raise ConfigError(
            f"--prompt-tokens {options.prompt_tokens}, --context {options.context}: sequences "
            f"reach {options.max_model_len} tokens, the model's limit is {limit}"
        )
    if options.threads:
        torch.set_num_threads(options.threads)
    disable_progress_bar()
    loaded = load_model(options.model, options.device, options.dtype, options.max_model_len)
    runner = ModelRunner(loaded, options.sessions + 1)
    runner.warm_up()
    rng = random.Random(0)
    chunks = options.all_chunks
    arrivals: dict[int, list[Arrival]] = {chunk: [] for chunk in chunks}
    total = options.repeats * len(chunks)
    with progress("measuring", total) as advance, until_interrupted():
        for repeat in range(options.repeats):
            turn = repeat % len(chunks)
            for chunk in [*chunks[turn:], *chunks[:turn]]:
                engine = RecordingEngine(runner, loaded, _budget(options, chunk))
                engine.start()
                try:
                    arrivals[chunk].append(await _arrive(engine, options, chunk, rng))
                finally:
                    engine.stop()
                advance()
    times = min(map(len, arrivals.values()))
    check_reached(times)
    info = loaded.info
    reports = [report_chunk(chunk, of[:times], options) for chunk, of in arrivals.items()]
    return StallReport(
        info.name, info.dtype, info.device, torch.get_num_threads(), options, reports
    )


def _budget(options: StallOptions, chunk: int) -> StepBudget:
    if chunk < options.prompt_tokens:
        return StepBudget(options.max_num_batched_tokens, chunk)
    # `StepBudget.reserved` is at most a quarter of a step.
    return StepBudget(max(options.max_num_batched_tokens, 4 * chunk), chunk)


async def _time_alone(
    engine: RecordingEngine, options: StallOptions, chunk: int, rng: random.Random
) -> float:
    """Time the step of a prompt's last whole chunk while nothing else runs, in ms."""
    for _ in range(2):  # the first one fills caches of programs and of memory
        first = len(engine.records)
        prompt = _random_ids(rng, options.prompt_tokens, engine.info.vocab_size)
        await _read(engine, prompt)
        await _read(engine, prompt[:1])  # answered once the steps before are recorded
    whole = [record for record in engine.records[first:] if record.tokens == chunk]
    return whole[-1].milliseconds


async def _read(engine: RecordingEngine, prompt: list[int]) -> None:
    """Open a session, compute its prompt and the next token, and close it."""
    session = _open(engine, prompt)
    try:
        answer = await engine.submit(session, VerifyRound(1, len(prompt), [], [])).get()
        if isinstance(answer, Exception):
            raise answer
    finally:
        engine.close(session)


async def _arrive(
    engine: RecordingEngine, options: StallOptions, chunk: int, rng: random.Random
) -> Arrival:
    """Let the prompt arrive and be answered while sessions decode; then end them."""
    chunk_ms = await _time_alone(engine, options, chunk, rng)
    crowd = Crowd(engine, options.sessions, options.context, options.num_speculative_tokens)
    try:
        await crowd.start(rng)
        await crowd.steps(_WARM_UP_STEPS)
        first = await crowd.steps(options.steps)
        prompt = _random_ids(rng, options.prompt_tokens, engine.info.vocab_size)
        arrived = time.perf_counter_ns()
        await _read(engine, prompt)
        answered = time.perf_counter_ns()
        await crowd.steps(options.steps)
    finally:
        await crowd.end()
    records = engine.records[first:]
    begin = records[0].begin_ns
    return Arrival(records, [r for r in crowd.rounds if r[0] >= begin], arrived, answered, chunk_ms)


class Crowd:
    """Sessions that send a round of `k` drafts as soon as the one before is answered."""

    def __init__(self, engine: RecordingEngine, sessions: int, context: int, k: int) -> None:
        self._engine, self._sessions, self._context, self._k = engine, sessions, context, k
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []
        self.rounds: list[tuple[int, float]] = []
        self._begun: set[int] = set()

    async def start(self, rng: random.Random) -> None:
        """Open the sessions and wait for each one's first round."""
        for index in range(self._sessions):
            prompt = _random_ids(rng, self._context, self._engine.info.vocab_size)
            self._tasks.append(asyncio.create_task(self._decode(index, prompt)))
        while len(self._begun) < self._sessions:
            await self.steps(1)

    async def steps(self, number: int) -> int:
        """Wait for `number` more steps of the engine; return the index of the first."""
        first = len(self._engine.records)
        while len(self._engine.records) < first + number:
            await asyncio.sleep(_POLL_S)
            if ended := next((task for task in self._tasks if task.done()), None):
                ended.result()  # raises: only errors end them
        return first

    async def end(self) -> None:
        """Close the sessions after their current rounds."""
        self._stopped = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _decode(self, index: int, prompt: list[int]) -> None:
        """Send rounds of any drafts: they do not affect a step's time. Roll back now and then."""
        engine, rng = self._engine, random.Random(index)
        session = _open(engine, prompt)
        length, round_id = len(prompt), 0
        try:
            while not self._stopped:
                round_id += 1
                drafts = _random_ids(rng, self._k, engine.info.vocab_size)
                round_ = VerifyRound(round_id, length, [], drafts)
                answer = await engine.submit(session, round_).get()
                if isinstance(answer, Exception):
                    raise answer
                self.rounds.append((time.perf_counter_ns(), answer.timings.service_ns / 1e6))
                self._begun.add(index)
                length = answer.keep_length + 1
                if length >= len(prompt) + STALL_GROWTH:
                    length = len(prompt)
        finally:
            engine.close(session)


def _open(engine: RecordingEngine, token_ids: list[int]) -> TargetSession:
    return engine.open(
        VerifyOpen(token_ids, len(token_ids), Rule("exact"), SamplingParams(), seed=0)
    )


def _random_ids(rng: random.Random, number: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(number)]

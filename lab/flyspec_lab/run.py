"""Makes the samples of a run: every problem under every arm, those that are not there yet."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flyspec.client import AsyncClient, GenerateOptions
from flyspec.concurrency import all_or_first_error, until_interrupted
from flyspec.errors import ConfigError, FlyspecError, UnavailableError
from flyspec.progress import error_console, progress
from flyspec.values.admin import ModelInfo
from flyspec.values.tokens import SamplingParams
from flyspec_lab.arms import Arm
from flyspec_lab.options import EvalOptions
from flyspec_lab.problems import TaskProblems
from flyspec_lab.row_files import RowFiles
from flyspec_lab.samples import TaskSample, describe, key_of, made
from flyspec_lab.settings import code_version
from flyspec_lab.tasks import Problem, Score

_LOST_AFTER = 20
"""So many samples in a row that no server answered: it is gone."""
_REPEAT_STRIDE = 1 << 32
"""Seeds between two repeats of a problem, so that neither depends on the number of problems."""


@dataclass(frozen=True)
class ServedModel:
    """A stack to generate with, and the model that is its target."""

    client: AsyncClient
    model: ModelInfo


@dataclass(frozen=True)
class Unit:
    """A sample to be made: `problem` is number `index` of the task."""

    task: TaskProblems
    problem: Problem
    index: int
    arm: Arm
    repeat: int

    def seed(self, o: EvalOptions) -> int:
        return o.seed + self.index + self.repeat * _REPEAT_STRIDE


@dataclass
class Progressed:
    """How the making of samples went: how many were there before, were made, failed, are left."""

    found: int = 0
    made: int = 0
    failed: int = 0
    left: int = 0
    first_error: str = ""
    lost: str = ""
    """Why no server answered any more; empty if one did."""
    in_a_row: int = field(default=0, repr=False)


def sampling_of(o: EvalOptions) -> SamplingParams:
    return SamplingParams(temperature=o.temperature, top_p=o.top_p)


Wanted = Mapping[tuple[Any, ...], Unit]
"""The samples of a run by key."""


def wanted_samples(
    o: EvalOptions,
    tasks: Sequence[TaskProblems],
    arms: Sequence[Arm],
    target: ModelInfo,
    rival: ModelInfo | None,
) -> Wanted:
    """Return the samples of a run, in an order in which any beginning compares all arms.

    The arms of each problem are shuffled, so that none is always timed beside the same others.
    Raises `ConfigError` if two of them would have the same key.
    """
    if rival is not None and rival.weights_fingerprint == target.weights_fingerprint:
        raise ConfigError(
            f"--rival {rival.name}: has the weights of the target; give another model"
        )
    found: dict[tuple[Any, ...], Unit] = {}
    for repeat, task in itertools.product(range(o.seeds), tasks):
        for index, problem in enumerate(task.problems):
            order = random.Random(f"{repeat} {index}")
            for arm in order.sample(arms, len(arms)):
                model = rival if arm.rival and rival is not None else target
                unit = Unit(task, problem, index, arm, repeat)
                key = key_of(vars(_blank(unit, o, model)))
                if key in found:
                    raise ConfigError(f"{task.name}: two problems are {problem.prompt_id!r}")
                found[key] = unit
    return found


def _blank(unit: Unit, o: EvalOptions, model: ModelInfo) -> TaskSample:
    """Return a sample without what generating it tells."""
    return TaskSample(
        task=unit.task.name,
        prompt_id=unit.problem.prompt_id,
        rule=unit.arm.rule_json,
        num_speculative_tokens=unit.arm.k,
        drafter=unit.arm.drafter,
        seed=unit.seed(o),
        weights_fingerprint=model.weights_fingerprint,
        condition=unit.arm.name,
        repeat=unit.repeat,
        category=unit.problem.category,
        model=model.name,
        version=code_version(),
    )


async def make_samples(
    o: EvalOptions, wanted: Wanted, target: ServedModel, rival: ServedModel | None, files: RowFiles
) -> Progressed:
    """Make what is wanted and not in `files`, `concurrency` at a time, and append it there.

    A sample that fails is a row with its error, and is made again the next time. Ends early after
    Ctrl-C, or when no server answers any more.
    """
    there = made(files)
    maker = _Maker(o, target, rival)
    rest = [unit for key, unit in wanted.items() if key not in there]
    outcome = Progressed(found=len(wanted) - len(rest), left=len(rest))
    if outcome.found:
        error_console().print(f"{outcome.found} of {len(wanted)} texts are there already")
    queue = iter(rest)

    async def work(advance: Callable[[], None]) -> None:
        for unit in queue:
            if outcome.lost:
                return
            sample, lost = await maker.make(unit)
            files.append(sample.row())
            _count(outcome, sample, lost)
            advance()

    with progress("generating", len(rest)) as advance, until_interrupted():
        await all_or_first_error(work(advance) for _ in range(o.concurrency))
    return outcome


def _count(outcome: Progressed, sample: TaskSample, lost: bool) -> None:
    outcome.left -= 1
    outcome.in_a_row = outcome.in_a_row + 1 if lost else 0
    if sample.error is None:
        outcome.made += 1
        return
    outcome.failed += 1
    outcome.first_error = outcome.first_error or f"{sample.condition}: {sample.error}"
    if outcome.in_a_row >= _LOST_AFTER:
        outcome.lost = sample.error


class _Maker:
    """Makes one sample at a time, or several at once."""

    def __init__(self, o: EvalOptions, target: ServedModel, rival: ServedModel | None) -> None:
        self._o, self._target, self._rival = o, target, rival
        self._likelihoods: dict[tuple[tuple[int, ...], tuple[int, ...]], asyncio.Task[float]] = {}

    async def make(self, unit: Unit) -> tuple[TaskSample, bool]:
        """Return the sample, or a failed one, and whether it failed for lack of a server."""
        blank = _blank(unit, self._o, self._served(unit).model)
        try:
            return replace(blank, **await self._facts(unit)), False
        except UnavailableError as error:
            return replace(blank, error=str(error)), True
        except FlyspecError as error:
            return replace(blank, error=str(error)), False

    def _served(self, unit: Unit) -> ServedModel:
        if not unit.arm.rival:
            return self._target
        assert self._rival is not None
        return self._rival

    async def _facts(self, unit: Unit) -> Mapping[str, Any]:
        o, task, arm = self._o, unit.task.task, unit.arm
        request = GenerateOptions(
            sampling=sampling_of(o),
            seed=unit.seed(o),
            max_tokens=o.max_tokens or task.max_tokens,
            stop=tuple(task.stop),
            drafter=arm.drafter,
            rule=arm.condition.rule,
            phases=arm.condition.phases,
            num_speculative_tokens=arm.num_speculative_tokens,
            return_rounds=True,
        )
        generation = await self._served(unit).client.complete(
            unit.problem.prompt, request, math.inf
        )
        facts = describe(generation)
        score = await scored(task, unit.problem, generation.text)
        if score is not None:
            facts |= {"score": score.value, "answer": score.answer, "detail": score.detail}
        if score is None or o.log_likelihood:
            facts["log_likelihood"] = await self._likelihood(
                facts["prompt_token_ids"], facts["token_ids"]
            )
        return facts

    async def _likelihood(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """Return the target's log-likelihood; equal texts are scored once."""
        key = tuple(prompt), tuple(output)
        if key not in self._likelihoods:
            self._likelihoods[key] = asyncio.ensure_future(
                log_likelihood(self._target.client, prompt, output)
            )
        try:
            return await asyncio.shield(self._likelihoods[key])
        except FlyspecError:
            self._likelihoods.pop(key, None)
            raise


async def scored(task: Any, problem: Problem, text: str) -> Score | None:
    """Score a text in a thread. Raises `FlyspecError` if that fails, whatever the task raises."""
    try:
        score: Score | None = await asyncio.to_thread(task.score, problem, text)
    except FlyspecError:
        raise
    except Exception as error:
        raise FlyspecError(f"scoring failed: {type(error).__name__}: {error}") from error
    return score


async def log_likelihood(
    client: AsyncClient, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> float:
    """Return raw log p(output | prompt) under the target, in nats. Raises `FlyspecError`."""
    if not output_token_ids:
        return 0.0
    found: list[float] = []
    async for piece in client.score([*prompt_token_ids, *output_token_ids]):
        found += [entry.logprob for entry in piece.logprobs]
    return math.fsum(found[-len(output_token_ids) :])

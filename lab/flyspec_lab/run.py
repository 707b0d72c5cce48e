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
from flyspec.concurrency import all_or_first_error
from flyspec.errors import ConfigError, FlyspecError, UnavailableError
from flyspec.progress import error_console, progress
from flyspec.values.admin import ModelInfo
from flyspec.values.tokens import SamplingParams
from flyspec.version import __version__
from flyspec_lab.arms import Arm
from flyspec_lab.interrupting import until_interrupted
from flyspec_lab.options import EvalOptions
from flyspec_lab.problems import TaskProblems
from flyspec_lab.run_directory import RowFile
from flyspec_lab.samples import KEY, TaskSample, describe, latest
from flyspec_lab.tasks import Problem

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
    """Counts of samples: found from before, made, failed, left.

    `lost` is why no server answers any more; empty if one does.
    """

    found: int = 0
    made: int = 0
    failed: int = 0
    left: int = 0
    first_error: str = ""
    lost: str = ""
    in_a_row: int = field(default=0, repr=False)

    def count(self, sample: TaskSample, unavailable: bool) -> None:
        """Count a sample, and whether it failed for lack of a server."""
        self.left -= 1
        self.in_a_row = self.in_a_row + 1 if unavailable else 0
        if sample.error is None:
            self.made += 1
            return
        self.failed += 1
        self.first_error = self.first_error or f"{sample.condition}: {sample.error}"
        if self.in_a_row >= _LOST_AFTER:
            self.lost = sample.error


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
                blank = _blank(unit, o, model)
                key = tuple(getattr(blank, name) for name in KEY)
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
        version=__version__,
    )


async def make_samples(
    o: EvalOptions, wanted: Wanted, target: ServedModel, rival: ServedModel | None, rows: RowFile
) -> Progressed:
    """Make what is wanted and not in `rows`, `concurrency` at a time, and append it there.

    A sample that fails is a row with its error, and is made again the next time. Ends early after
    Ctrl-C, or when no server answers any more.
    """
    there = {key for key, row in latest(rows.read()).items() if row["error"] is None}
    rest = [unit for key, unit in wanted.items() if key not in there]
    outcome = Progressed(found=len(wanted) - len(rest), left=len(rest))
    if outcome.found:
        error_console().print(f"{outcome.found} of {len(wanted)} texts are there already")
    queue = iter(rest)

    async def work(advance: Callable[[], None]) -> None:
        for unit in queue:
            if outcome.lost:
                return
            served = rival if unit.arm.rival and rival is not None else target
            sample = _blank(unit, o, served.model)
            unavailable = False
            try:
                sample = replace(sample, **await _facts(o, unit, served.client, target.client))
            except FlyspecError as error:
                sample = replace(sample, error=str(error))
                unavailable = isinstance(error, UnavailableError)
            rows.append(sample.row())
            outcome.count(sample, unavailable)
            advance()

    with progress("generating", len(rest)) as advance, until_interrupted():
        await all_or_first_error(work(advance) for _ in range(o.concurrency))
    return outcome


async def _facts(
    o: EvalOptions, unit: Unit, client: AsyncClient, target: AsyncClient
) -> Mapping[str, Any]:
    """Generate a text and score it. Raises `FlyspecError`."""
    task, arm = unit.task.task, unit.arm
    request = GenerateOptions(
        sampling=SamplingParams(temperature=o.temperature, top_p=o.top_p),
        seed=unit.seed(o),
        max_tokens=o.max_tokens or task.max_tokens,
        stop=tuple(task.stop),
        drafter=arm.drafter,
        rule=arm.condition.rule,
        phases=arm.condition.phases,
        num_speculative_tokens=arm.num_speculative_tokens,
    )
    generation = await client.complete(unit.problem.prompt, request, math.inf)
    facts = describe(generation)
    try:
        score = await asyncio.to_thread(task.score, unit.problem, generation.text)
    except FlyspecError:
        raise
    except Exception as error:  # whatever the task raises
        raise FlyspecError(f"scoring failed: {type(error).__name__}: {error}") from error
    if score is not None:
        facts |= {"score": score.value, "answer": score.answer, "detail": score.detail}
    if score is None or o.log_likelihood:
        facts["log_likelihood"] = await log_likelihood(
            target, facts["prompt_token_ids"], facts["token_ids"]
        )
    return facts


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

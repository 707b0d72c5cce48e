"""The study of batch sizes: the gain of rules over plain decoding with several requests at once.

It is no run of `flyspec eval`, whose conditions share the target's steps: here all requests that
run at any time are of one condition. They are measured as `flyspec bench --batch` does it, in sets
of one run of each condition, so that a machine whose speed drifts slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from flyspec.cli.conditions import Condition
from flyspec.client import AsyncClient
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO
from flyspec.tables import Column, make_table, record_table
from flyspec.values.admin import DrafterStatus, ModelInfo
from flyspec_lab.bench.conditions import EXACT, PLAIN
from flyspec_lab.bench.conditions import FLY as FLY_CONDITION
from flyspec_lab.bench.machine import this_machine
from flyspec_lab.bench.modes import Item, Noise
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.bench.report import batch_ratio, report_batches
from flyspec_lab.bench.speed import BatchSample, flyspec_modes, measure_batches
from flyspec_lab.bench.summaries import grouped
from flyspec_lab.drawing import COLORS, MARKERS, draw_intervals, powers_of_two
from flyspec_lab.options import StudyOptions
from flyspec_lab.problems import TaskProblems, read_problems
from flyspec_lab.report import Plot, Report, Section
from flyspec_lab.run_directory import RunSettings, fingerprints, model_facts, open_run
from flyspec_lab.statistics import Interval, wins_more
from flyspec_lab.studies.fuzzy import TOTAL_VARIATION
from flyspec_lab.studies.study import CLAIMS_HEADING, VERDICTS, facts_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLY = "FLy, arXiv 2511.22972"
_PROMPTS = 64
"""Requests of a run: twice the largest batch, lest most of it is its end, where fewer run."""
_SPARE_SLOTS = 8
"""So that a request that begins finds a slot before those of the last ones are free."""
_CLAIMS = (
    (2, PLAIN, "2.39", f"{FLY}, Table 10"),
    (4, PLAIN, "2.09", f"{FLY}, Table 10"),
    (8, PLAIN, "1.96", f"{FLY}, Table 10"),
    (16, PLAIN, "1.78", f"{FLY}, Table 10"),
    (32, EXACT.name, "1.15 to 1.47", "vLLM pull request 53987, on MI355X"),
)
"""FLy's output tokens per second over a base at a batch size, and the source. Table 10 is HumanEval
on Llama 3.1 70B; vLLM's are nine data sets with a draft model."""
_COLUMNS: tuple[Column, ...] = (
    ("task", "{.group}"),
    ("rule", "{.mode}"),
    ("requests", "{.batch}"),
    ("tok/s", "{.tokens_per_second:.0f}"),
    (f"x {PLAIN}", "{.ratio_to_plain:.2f}"),
    ("95 %", "{0.low:.2f} to {0.high:.2f}"),
)
_TEXT = (
    "Output tokens per second of all requests together. A ratio is taken between two runs of the "
    "same requests, one after the other; shown is the median, and the 95 % interval over the "
    "repeats. A claim is decided by a sign test, which takes six of them."
)


@dataclass(frozen=True)
class BatchStudy:
    """Conditions at several batch sizes: concurrent requests, in ascending order."""

    name: str
    title: str
    question: str
    conditions: tuple[Condition, ...]
    batches: tuple[int, ...]

    @property
    def slots(self) -> int:
        """The sessions that the stack needs."""
        return self.batches[-1] + _SPARE_SLOTS

    def problems(self, o: StudyOptions) -> list[TaskProblems]:
        """Return the prompts of a run. Raises `ConfigError`."""
        most = _PROMPTS if o.limit is None else min(o.limit, _PROMPTS)
        return read_problems(replace(o, problems=min(o.problems, _PROMPTS), limit=most))


BATCHES = BatchStudy(
    name="batch",
    title="Concurrent requests",
    question="What do rules gain over plain decoding while several requests run at once?",
    conditions=(
        EXACT,
        FLY_CONDITION,
        Condition("margin", Rule("margin")),
        TOTAL_VARIATION,
        Condition("fly, K = auto", Rule("fly"), AUTO),
    ),
    batches=(1, 2, 4, 8, 16, 32),
)


async def measure(
    study: BatchStudy,
    tasks: Sequence[TaskProblems],
    client: AsyncClient,
    target: ModelInfo,
    drafters: Sequence[DrafterStatus],
    o: StudyOptions,
    directory: Path,
) -> list[BatchSample]:
    """Measure what is not yet in `directory`, and return all of it.

    If interrupted, returns what was measured until then. Raises `ConfigError` if what is there was
    measured otherwise.
    """
    settings: RunSettings = {
        "sampling": {"num_speculative_tokens": o.num_speculative_tokens},
        "models": {"target": model_facts(target)},
        "drafters": fingerprints(drafters),
        "tasks": {t.name: {**t.facts(o), "prompts": len(t.problems)} for t in tasks},
    }
    options = SpeedOptions(
        rules=study.conditions,
        num_speculative_tokens=(o.num_speculative_tokens,),
        max_tokens=o.max_tokens or max(task.task.max_tokens for task in tasks),
    )
    modes = flyspec_modes(client, options)
    items = [
        [Item(task.name, i, problem.prompt) for i, problem in enumerate(task.problems)]
        for task in tasks
    ]
    noise = Noise(client, target.vocab_size, study.slots)
    with open_run(directory, settings, resume=True, rows="batches.jsonl") as rows:
        known = [BatchSample(**row) for row in rows.read()]

        def keep(samples: Sequence[BatchSample]) -> None:
            for sample in samples:
                rows.append(vars(sample))

        return await measure_batches(
            modes, items, study.batches, o.repeats, noise,
            _whole_sets(known, [mode.name for mode in modes]), keep,
        )  # fmt: skip


def _whole_sets(samples: Sequence[BatchSample], modes: Sequence[str]) -> list[BatchSample]:
    """Return the samples of sets that have each mode once; one cut off while written has not."""
    sets = grouped(samples, lambda s: (s.group, s.batch, s.repeat)).values()
    return [s for of in sets if sorted(s.mode for s in of) == sorted(modes) for s in of]


def batch_report(
    study: BatchStudy,
    samples: Sequence[BatchSample],
    tasks: Sequence[TaskProblems],
    target: ModelInfo,
    drafters: Sequence[DrafterStatus],
    o: StudyOptions,
    command: str,
) -> Report:
    """Return the report of what was measured."""
    machine = this_machine()
    prompts = "; ".join(f"{len(task.problems)} of {task.name}" for task in tasks)
    repeats = len({s.repeat for s in samples})
    facts = {
        "requests": f"{prompts} per run, seed {o.problem_seed}, {repeats} repeats, "
        f"K {o.num_speculative_tokens}",
        "command": f"`{command}`",
        "machine": machine["accelerator"] or f"{machine['processor']}, {machine['cores']} cores",
        **facts_of(target, [drafter for drafter in drafters if drafter.active]),
    }
    reports = report_batches(samples)

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        for ((group, mode), of), color, marker in zip(
            grouped(reports, lambda r: (r.group, r.mode)).items(), cycle(COLORS), cycle(MARKERS),
            strict=False,
        ):  # fmt: skip
            points = [(r.batch, Interval(r.ratio_to_plain, r.low, r.high)) for r in of]
            draw_intervals(ax, points, label=f"{group}, {mode}", color=color, marker=marker)
        ax.set_ylabel(f"tokens per second, relative to {PLAIN}")
        powers_of_two(ax, study.batches, "concurrent requests")
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    plot = Plot(
        "axis",
        "Speed relative to plain decoding over the number of concurrent requests.",
        draw,
        (9.0, 4.0),
    )
    rows = [_claim_row(samples, *claim) for claim in _CLAIMS]
    claims = make_table(["claim", "source", "holds", "figures here"], rows, left=4)
    figures = record_table(_COLUMNS, reports, "speed by concurrent requests", left=2)
    sections = [
        Section(CLAIMS_HEADING, [], [claims]),
        Section("Figures", [_TEXT], [figures], [plot]),
    ]
    return Report(
        {"study": study.name}, sections, title=study.title, subtitle=study.question, facts=facts
    )


def _claim_row(
    samples: Sequence[BatchSample], batch: int, base: str, theirs: str, source: str
) -> list[str]:
    """Return a claim about FLy's speed with the ratio found, by a sign test over the runs.

    It stays open at the level of 5 %, as it always does with fewer than six repeats.
    """
    of = grouped([s for s in samples if s.batch == batch], lambda s: s.mode)
    name = "plain decoding" if base == PLAIN else f"{base} speculation"
    claim = f"FLy is faster than {name} with {batch} requests: {theirs} times"
    fly, other = of.get(FLY_CONDITION.name, []), of.get(base, [])
    if not fly or not other:
        return [claim, source, VERDICTS[None], "unknown"]
    rates = {(s.group, s.repeat): s.rate for s in other}
    won = sum(s.rate > rates[s.group, s.repeat] for s in fly)
    value, low, high = (f"{ratio:.2f}" for ratio in batch_ratio(fly, other))
    shown = f"{value} ({low} to {high})" if low != high else value
    return [claim, source, VERDICTS[wins_more(won, len(fly) - won)], shown]

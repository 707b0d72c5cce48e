"""The study of batch sizes: what rules gain over plain decoding while several requests run at once.

It is no run of `flyspec eval`, whose conditions share the target's steps: here all requests that
run at any time are of one condition. They are measured as `flyspec bench --batch` does it, in sets
of one run of each condition, so that a machine whose speed drifts slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from flyspec.cli.conditions import Condition
from flyspec.client import AsyncClient
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO
from flyspec.tables import FittedTable, make_table
from flyspec.values.admin import DrafterStatus, ModelInfo
from flyspec_lab.bench.conditions import EXACT, FLY, PLAIN
from flyspec_lab.bench.machine import this_machine
from flyspec_lab.bench.modes import Item, Noise
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.bench.report import BatchReport, batch_ratio, report_batches
from flyspec_lab.bench.speed import BatchSample, flyspec_modes, measure_batches
from flyspec_lab.bench.summaries import grouped
from flyspec_lab.bench.tables import batch_table
from flyspec_lab.drawing import GREY, powers_of_two
from flyspec_lab.plots import COLORS, MARKERS
from flyspec_lab.problems import TaskProblems, read_problems
from flyspec_lab.row_files import RowFiles
from flyspec_lab.run_directory import (
    SETTINGS,
    RunSettings,
    code_version,
    continued,
    fingerprints,
)
from flyspec_lab.run_directory import model_facts as settings_of_model
from flyspec_lab.samples import schema_of
from flyspec_lab.statistics import wins_more
from flyspec_lab.studies.fuzzy import TOTAL_VARIATION
from flyspec_lab.studies.options import StudyOptions
from flyspec_lab.studies.page import Page, PagePlot, PageSection
from flyspec_lab.studies.report import CLAIMS_HEADING, VERDICTS, facts_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ratio = tuple[float, float, float]
"""A median of ratios within a repeat, and its 95 % interval over the repeats."""

_PROMPTS = 64
"""Requests of a run: twice the largest batch, lest most of it is its end, where fewer run."""
_SPARE_SLOTS = 8
"""So that a request that begins finds a slot before those of the last ones are free."""
_VLLM = "vLLM pull request 53987, on MI355X"
_OF_VLLM = {32: "1.15 to 1.47"}
"""Output tokens per second of FLy over exact speculation, on nine data sets with a draft model."""
_UNKNOWN = "not at hand"


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
        FLY,
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
    settings = RunSettings(
        code_version(),
        {"num_speculative_tokens": o.num_speculative_tokens},
        {"target": settings_of_model(target)},
        fingerprints(drafters),
        {t.name: {**t.facts(o), "prompts": len(t.problems)} for t in tasks},
    )
    settings = continued(directory, settings, True, o.mixed_versions)
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
    with RowFiles(directory / "batches", schema_of(BatchSample)) as rows:
        settings.write(directory / SETTINGS)
        known = [BatchSample(**row) for row in rows.read().to_pylist()]

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


def page_of_batches(
    study: BatchStudy,
    samples: Sequence[BatchSample],
    tasks: Sequence[TaskProblems],
    target: ModelInfo,
    drafters: Sequence[DrafterStatus],
    o: StudyOptions,
    command: str,
) -> Page:
    """Return the report."""
    reports = report_batches(samples)
    figures = [
        "Output tokens per second of all requests together. A ratio is taken between two runs of "
        "the same requests, one after the other; shown is the median, in brackets the 95 % "
        "interval over the repeats. A claim is decided by a sign test, which takes six of them."
    ]
    sections = [
        PageSection(CLAIMS_HEADING, [_NOT_AT_HAND], [_claims(samples)]),
        PageSection("FLy beside other measurements", [], [_beside_others(samples)]),
        PageSection(
            "Figures",
            figures,
            [batch_table(reports), _ratio_table(reports)],
            [PagePlot(
                f"{study.name}-axis",
                "Speed relative to plain decoding, and tokens per second, over the number of "
                "concurrent requests.",
                lambda figure: _draw(figure, reports),
                (10.5, 4.0),
            )],
        ),
    ]  # fmt: skip
    machine = this_machine()
    prompts = "; ".join(f"{len(task.problems)} of {task.name}" for task in tasks)
    default = [drafter for drafter in drafters if drafter.active]
    facts = {
        "requests": f"{prompts} per run, seed {o.problem_seed}, "
        f"{len({s.repeat for s in samples})} repeats, K {o.num_speculative_tokens}",
        "machine": machine["accelerator"] or f"{machine['processor']}, {machine['cores']} cores",
        **facts_of(target, default),
    }
    return Page(study.title, study.question, command, facts, sections)


_NOT_AT_HAND = (
    "FLy's Table 10 (arXiv 2511.22972) has its speed over plain decoding by batch size; the table "
    "was not at hand, so its figures are left out."
)


def ratios(samples: Sequence[BatchSample], mode: str, base: str) -> Mapping[int, Ratio]:
    """Return the speed of one mode over that of another by batch, over all tasks' runs."""
    by_batch = grouped(samples, lambda s: s.batch)
    return {
        batch: batch_ratio([s for s in of if s.mode == mode], [s for s in of if s.mode == base])
        for batch, of in sorted(by_batch.items())
    }


def _claims(samples: Sequence[BatchSample]) -> FittedTable:
    """Return what vLLM's measurements say of the largest batch, with what was found."""
    rows = []
    found = ratios(samples, FLY.name, EXACT.name)
    for batch, theirs in _OF_VLLM.items():
        claim = f"FLy is faster than exact speculation at batch {batch}: {theirs} times"
        shown = _shown(found[batch]) if batch in found else "unknown"
        rows.append([claim, _VLLM, VERDICTS[_is_faster(samples, batch)], shown])
    return make_table(["claim", "source", "holds", "figures here"], rows, left=4)


def _is_faster(samples: Sequence[BatchSample], batch: int) -> bool | None:
    """Return whether FLy is faster than exact speculation, by a sign test over the runs.

    None if it leaves that open at the level of 5 %, as it always does with fewer than six.
    """
    rates = {(s.group, s.repeat, s.mode): s.rate for s in samples if s.batch == batch}
    won = [
        rate > rates[group, repeat, EXACT.name]
        for (group, repeat, mode), rate in rates.items()
        if mode == FLY.name
    ]
    return wins_more(sum(won), len(won) - sum(won))


def _beside_others(samples: Sequence[BatchSample]) -> FittedTable:
    over_plain = ratios(samples, FLY.name, PLAIN)
    over_exact = ratios(samples, FLY.name, EXACT.name)
    rows = [
        [str(batch), _shown(over_plain[batch]), _UNKNOWN, _shown(over_exact[batch]),
         _OF_VLLM.get(batch, _UNKNOWN)]
        for batch in over_plain
    ]  # fmt: skip
    columns = ["requests", "fly over plain", "FLy, Table 10", "fly over exact", _VLLM]
    return make_table(columns, rows, left=1)


def _ratio_table(reports: Sequence[BatchReport]) -> FittedTable:
    batches = sorted({r.batch for r in reports})
    modes = dict.fromkeys((r.group, r.mode) for r in reports if r.mode != PLAIN)
    rows = []
    for group, mode in modes:
        of = {r.batch: r for r in reports if (r.group, r.mode) == (group, mode)}
        rows.append([group, mode, *(
            _shown((of[b].ratio_to_plain, of[b].low, of[b].high)) for b in batches
        )])  # fmt: skip
    columns = ["task", "rule", *map(str, batches)]
    return make_table(columns, rows, f"x {PLAIN} by concurrent requests", left=2)


def _shown(ratio: Ratio) -> str:
    value, low, high = (f"{number:.2f}" for number in ratio)
    return f"{value} ({low} to {high})" if low != high else value  # as of a single run


def _draw(figure: Figure, reports: Sequence[BatchReport]) -> None:
    left, right = figure.subplots(1, 2)
    batches = sorted({r.batch for r in reports})
    lines = grouped(reports, lambda r: (r.group, r.mode))
    colors, markers = cycle(COLORS), cycle(MARKERS)
    several = len({group for group, _ in lines}) > 1
    for (group, mode), of in lines.items():
        name = f"{group}, {mode}" if several else mode
        if mode == PLAIN:
            _line(right, of, name, GREY, ":", "x")
            continue
        color, marker = next(colors), next(markers)
        left.errorbar(
            [r.batch for r in of], [r.ratio_to_plain for r in of],
            yerr=[[max(0.0, r.ratio_to_plain - r.low) for r in of],
                  [max(0.0, r.high - r.ratio_to_plain) for r in of]],
            label=name, color=color, marker=marker, capsize=2, linewidth=1.2, elinewidth=0.8,
        )  # fmt: skip
        _line(right, of, name, color, "-", marker)
    left.axhline(1.0, color=GREY, linewidth=0.8, zorder=0)
    left.set_ylabel(f"tokens per second, relative to {PLAIN}")
    right.set_ylabel("tokens per second")
    for ax in (left, right):
        powers_of_two(ax, batches, "concurrent requests")
    right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _line(
    ax: Axes, of: Sequence[BatchReport], name: str, color: str, style: str, marker: str
) -> None:
    ax.plot(
        [r.batch for r in of], [r.tokens_per_second for r in of],
        label=name, color=color, linestyle=style, marker=marker, linewidth=1.2,
    )  # fmt: skip

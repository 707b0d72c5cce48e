"""The study of batch sizes: the gain of rules over plain decoding with several requests at once.

It is no run of `flyspec eval`, whose conditions share the target's steps: here all requests that
run at any time are of one condition. They are measured as `flyspec bench --batch` does it, in sets
of one run of each condition, so that a machine whose speed drifts slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from flyspec.cli.conditions import Condition
from flyspec.client import AsyncClient
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO
from flyspec.values.admin import ModelInfo
from flyspec_lab.bench.conditions import EXACT, PLAIN
from flyspec_lab.bench.conditions import FLY as FLY_CONDITION
from flyspec_lab.bench.modes import Item, Noise
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.bench.report import batch_ratio, batch_table, report_batches
from flyspec_lab.bench.speed import BatchSample, flyspec_modes, measure_batches
from flyspec_lab.bench.summaries import grouped
from flyspec_lab.options import StudyOptions
from flyspec_lab.problems import TaskProblems
from flyspec_lab.report import Section
from flyspec_lab.statistics import wins_more
from flyspec_lab.studies.fuzzy import TOTAL_VARIATION
from flyspec_lab.studies.study import ClaimFinding, PaperClaim, Study

FLY = "FLy, arXiv 2511.22972"
SPARE_SLOTS = 8
"""Sessions beyond a batch, so that a request finds a slot before that of one that ended is free."""
_TEXT = (
    "Output tokens per second of all requests together. A ratio is taken between two runs of the "
    "same requests, one after the other; shown is the median. A claim is decided by a sign test, "
    "which takes six of them."
)


def _faster(batch: int, base: str, theirs: str, source: str) -> PaperClaim:
    """Claim that FLy is so much faster than a base at a batch size: by a sign test over the runs.

    It stays open at the level of 5 %, as it always does with fewer than six repeats.
    """

    def check(samples: Sequence[BatchSample]) -> ClaimFinding:
        of = grouped([s for s in samples if s.batch == batch], lambda s: s.mode)
        fly, other = of[FLY_CONDITION.name], of[base]
        rates = {(s.group, s.repeat): s.rate for s in other}
        won = sum(s.rate > rates[s.group, s.repeat] for s in fly)
        value, low, high = (f"{ratio:.2f}" for ratio in batch_ratio(fly, other))
        shown = f"{value} ({low} to {high})" if low != high else value
        return ClaimFinding(wins_more(won, len(fly) - won), shown)

    name = "plain decoding" if base == PLAIN else f"{base} speculation"
    text = f"FLy is faster than {name} with {batch} requests: {theirs} times"
    return PaperClaim(text, source, check)


BATCHES = Study(
    name="batch",
    question="What do rules gain over plain decoding while several requests run at once?",
    rules=(
        EXACT,
        FLY_CONDITION,
        Condition("margin", Rule("margin")),
        TOTAL_VARIATION,
        Condition("fly, K = auto", Rule("fly"), AUTO),
    ),
    batches=(1, 2, 4, 8, 16, 32),
    max_problems=64,  # twice the largest batch, lest most of a run is its end, where fewer run
    # Table 10 is HumanEval on Llama 3.1 70B; vLLM's are nine data sets with a draft model.
    claims=(
        *(
            _faster(batch, PLAIN, theirs, f"{FLY}, Table 10")
            for batch, theirs in ((2, "2.39"), (4, "2.09"), (8, "1.96"), (16, "1.78"))
        ),
        _faster(32, EXACT.name, "1.15 to 1.47", "vLLM pull request 53987, on MI355X"),
    ),
)


async def measure(
    study: Study,
    tasks: Sequence[TaskProblems],
    client: AsyncClient,
    target: ModelInfo,
    o: StudyOptions,
) -> list[BatchSample]:
    """Measure all batch sizes; if interrupted, return what was measured until then."""
    options = SpeedOptions(
        rules=tuple(study.rules),
        num_speculative_tokens=(o.num_speculative_tokens,),
        max_tokens=o.max_tokens or max(task.task.max_tokens for task in tasks),
    )
    items = [
        [Item(task.name, i, problem.prompt) for i, problem in enumerate(task.problems)]
        for task in tasks
    ]
    noise = Noise(client, target.vocab_size, study.batches[-1] + SPARE_SLOTS)
    modes = flyspec_modes(client, options)
    return await measure_batches(modes, items, study.batches, o.repeats, noise)


def section_of(samples: Sequence[BatchSample]) -> Section:
    """Return the figures of what was measured."""
    return Section("Figures", [_TEXT], [batch_table(report_batches(samples))])

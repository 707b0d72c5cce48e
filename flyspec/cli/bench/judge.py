"""`flyspec bench judge`: the cost of judging drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyspec.bench.options import JudgeOptions
from flyspec.cli.bench.common import Results
from flyspec.cli.options import with_flags

if TYPE_CHECKING:
    from flyspec.bench.results import Report


@with_flags
def bench_judge(options: JudgeOptions, results: Results) -> None:
    """Compare the time to judge a round with the forward pass of the target's output layer."""
    results.of(lambda: _measure(options))


def _measure(options: JudgeOptions) -> Report:
    from flyspec.bench import judging
    from flyspec.bench.results import Report, notes

    found = judging.measure(options)
    goal = {"target_share": judging.TARGET_SHARE, "worst_share": found.worst_share}
    return Report(
        {**vars(found), **goal},
        [
            *judging.judge_tables(found),
            judging.judge_summary(found),
            notes(
                f"Medians of {found.repeats} runs, {found.threads} CPU threads; shares are "
                "relative to the layer's time measured just before. After a mismatch: what became "
                "of the draft."
            ),
        ],
    )

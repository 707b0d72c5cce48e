"""`flyspec bench prediction`: rounds and time that a predicted output saves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec_lab.bench.options import PredictionOptions
from flyspec_lab.report import Report, Results

if TYPE_CHECKING:
    from flyspec.client import AsyncClient

_SESSIONS, _PROBLEMS = 4, 6
_NOTES = (
    "x rounds, x time: relative to the same prompt without a prediction, median over prompts of "
    "medians over runs; worst: of the prompt with the highest ratio\n"
    "same: prompts whose text is that of plain decoding in every run"
)


@with_flags
def bench_prediction(models: ModelFlags, options: PredictionOptions, results: Results) -> None:
    """Measure what a prediction of the output saves, and what a useless one costs."""
    results.of(lambda: _measure(models, options))


def _measure(models: ModelFlags, o: PredictionOptions) -> Report:
    from flyspec.cli.runtime import run_async, with_server
    from flyspec.tables import record_table
    from flyspec_lab.bench.machine import this_machine
    from flyspec_lab.bench.modes import Item, Noise
    from flyspec_lab.bench.predicted import measure, report
    from flyspec_lab.bench.prompts import groups
    from flyspec_lab.commands.bench.common import models_of

    found = groups(o.prompt_file, o.problems, o.problem_seed, o.limit, _PROBLEMS)
    prompts = [(group.name, prompt.to_request()) for group in found for prompt in group.prompts]
    items = [Item(group, index, prompt) for index, (group, prompt) in enumerate(prompts)]
    stack = StackOptions(**vars(models), log_level="warning", max_sessions=_SESSIONS)

    async def use(client: AsyncClient, running: Stack | None) -> Report:
        target = (await client.list_models()).target
        noise = Noise(client, target.vocab_size, _SESSIONS)
        samples = await measure(client, items, noise, o)
        reports = report(samples)
        table = record_table(
            [
                ("prediction", "{.prediction}"),
                ("rounds", "{.rounds:,.0f}"),
                ("most", "{.most_rounds:,}"),
                ("x rounds", "{.rounds_ratio:.2f}"),
                ("worst", "{.worst_rounds_ratio:.2f}"),
                ("x time", "{.time_ratio:.2f}"),
                ("worst", "{.worst_time_ratio:.2f}"),
                ("same", lambda r: f"{r.same_text} of {r.prompts}"),
            ],
            reports,
            f"{o.max_tokens} tokens by {o.rule.name}, {len(items)} prompts",
        )
        document = {
            **vars(o), "rule": o.rule.name, "models": models_of(target, running),
            "machine": this_machine(), "predictions": [asdict(r) for r in reports],
        }  # fmt: skip
        return Report(document, [table, _NOTES], {"samples": samples})

    return run_async(with_server(stack, None, use))

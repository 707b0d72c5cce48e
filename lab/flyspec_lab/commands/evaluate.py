"""`flyspec eval`: the quality of each rule's outputs."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.credentials import Credentials
from flyspec.errors import ConfigError
from flyspec_lab.commands.bench.common import Address, Local, models_of
from flyspec_lab.commands.other_models import (
    Drafts,
    drafters_of,
    is_address,
    served_rival,
    with_added_drafters,
)
from flyspec_lab.options import EvalOptions
from flyspec_lab.results import BenchReport, RunResults, notes

if TYPE_CHECKING:
    from flyspec.client import AsyncClient
    from flyspec_lab.evaluation import Evaluation


@with_flags
def evaluate(
    models: ModelFlags,
    connection: Credentials,
    options: EvalOptions,
    results: RunResults,
    draft: Drafts = (),
    address: Address = None,
    local: Local = False,
) -> None:
    """Compare the outputs of plain decoding and acceptance rules on tasks; record every text."""
    from flyspec.cli.runtime import refuse_model_flags, run_async, with_server
    from flyspec_lab.problems import read_problems

    refuse_model_flags(models, local or address is None, address)
    rival = options.rival
    if rival is not None and address is not None and not is_address(rival):
        raise ConfigError(
            f"--rival {rival}: a model is started beside a stack that this command starts; with "
            "--address, give the HOST:PORT of a stack that serves it"
        )
    if draft and address is not None:
        raise ConfigError(
            "--draft: a draft model is added to a stack that this command starts; with --address, "
            "`flyspec drafters register` adds one"
        )
    tasks = read_problems(options)

    async def use(client: AsyncClient, stack: Stack | None) -> BenchReport:
        work = evaluated(client, stack)
        return await (work if stack is None else with_added_drafters(stack, draft, work))

    async def evaluated(client: AsyncClient, stack: Stack | None) -> BenchReport:
        from flyspec_lab.evaluation import run_evaluation
        from flyspec_lab.run import ServedModel
        from flyspec_lab.run_directory import fingerprints

        served = await client.list_models()
        async with AsyncExitStack() as resources:
            found = await run_evaluation(
                options,
                tasks,
                served,
                ServedModel(client, served.target),
                await served_rival(resources, rival, stack, connection),
                fingerprints(await drafters_of(stack)),
                results.output,
                results.resume,
                results.mixed_versions,
            )
        return _report(options, found, {**models_of(served.target, stack)}, results)

    stack = StackOptions(**vars(models), log_level="warning") if address is None else None
    results.of(lambda: run_async(with_server(stack, address, use, connection)))


def _report(
    o: EvalOptions, found: Evaluation, models: dict[str, Any], results: RunResults
) -> BenchReport:
    from flyspec_lab import plots, tables

    shown: list[Any] = []
    explained: dict[str, None] = {}  # once, below all tables
    for task, reports in found.conditions.items():
        if not reports:
            shown.append(notes(f"{task}: no problem has an answer under every condition yet"))
            continue
        answered = reports[0].accuracy is not None
        if o.rules is None and answered and not o.grid:
            shown.append(tables.accuracy_table(task, reports))
        else:
            shown.append(tables.rules_table(task, reports))
            explained[tables.RULES_NOTES] = None
        if len(reports) > 1 and any(r.flips for r in reports):
            shown.append(tables.flips_table(reports))
            explained[tables.FLIPS_NOTES] = None
        if any(r.versus for r in reports):
            shown.append(tables.versus_table(reports))
        if equal := found.equal_costs[task]:
            shown.append(tables.equal_table(equal))
            explained[tables.EQUAL_NOTES] = None
        if leads := found.allocations[task]:
            shown.append(tables.allocation_table(leads))
            explained[tables.ALLOCATION_NOTES] = None
    shown += [notes(line) for line in [*explained, *_remarks(found, results)]]
    document = {
        **vars(o),
        **models,
        "samples": vars(found.progressed),
        "conditions": found.reports,
        "equal_costs": [cost for of in found.equal_costs.values() for cost in of],
        "allocations": [lead for of in found.allocations.values() for lead in of],
        "missing": found.missing,
    }
    return BenchReport(
        document,
        shown,
        plot=lambda path: plots.plot_quality(path, found.arms, found.conditions),
        passed=not (found.progressed.failed or found.progressed.lost),
    )


def _remarks(found: Evaluation, results: RunResults) -> list[str]:
    """Say what is missing, and how to get it."""
    progressed = found.progressed
    again = (
        "--resume makes them" if results.output else "with --output RUN, --resume would make them"
    )
    lines = [
        f"{task}: no texts of {', '.join(names)}; left out" for task, names in found.missing.items()
    ]
    if progressed.failed:
        lines.append(
            f"{progressed.failed} texts failed and are left out; {again} again. The first: "
            f"{progressed.first_error}"
        )
    if progressed.lost:
        lines.append(f"ended early, since no server answers: {progressed.lost}")
    if progressed.left:
        lines.append(f"{progressed.left} texts are left; {again}")
    return lines

"""`flyspec eval`: the quality of each rule's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.credentials import Credentials
from flyspec.errors import ConfigError
from flyspec_lab.commands import Address
from flyspec_lab.commands.other_models import (
    Drafts,
    drafters_of,
    served_rival,
    with_added_drafters,
)
from flyspec_lab.options import EvalOptions
from flyspec_lab.report import Part, Report, RunResults

if TYPE_CHECKING:
    from flyspec.client import AsyncClient
    from flyspec_lab.evaluation import Found
    from flyspec_lab.problems import TaskProblems
    from flyspec_lab.run import Progressed


@with_flags
def evaluate(
    models: ModelFlags,
    connection: Credentials,
    options: EvalOptions,
    results: RunResults,
    draft: Drafts = (),
    address: Address = None,
) -> None:
    """Compare the outputs of plain decoding and acceptance rules on tasks; record every text."""
    from flyspec.cli.runtime import refuse_model_flags, run_async, with_server
    from flyspec_lab.problems import read_problems

    refuse_model_flags(models, address is None, address)
    if address is not None and (options.rival or draft):
        raise ConfigError(
            f"--{'rival' if options.rival else 'draft'}: is started beside a stack that this "
            "command starts; remove --address (`flyspec drafters register` adds a draft model "
            "to a running stack)"
        )
    tasks = read_problems(options)

    async def use(client: AsyncClient, stack: Stack | None) -> Report:
        work = measured(client, stack)
        return await (work if stack is None else with_added_drafters(stack, draft, work))

    async def measured(client: AsyncClient, stack: Stack | None) -> Report:
        target = (await client.list_models()).target  # before the server may be gone
        progressed, found = await evaluate_on(
            client, stack, options, tasks, results.output, results.resume
        )
        models = {"target": target, "stack": stack.options if stack else None}
        return _report(options, progressed, found, models, results)

    stack = StackOptions(**vars(models), log_level="warning") if address is None else None
    results.of(lambda: run_async(with_server(stack, address, use, connection)))


async def evaluate_on(
    client: AsyncClient,
    stack: Stack | None,
    o: EvalOptions,
    tasks: Sequence[TaskProblems],
    output: Path | None,
    resume: bool,
) -> tuple[Progressed, list[Found]]:
    """Make or go on with a run on a stack, beside which the rival is started."""
    from flyspec_lab.evaluation import run_evaluation
    from flyspec_lab.run_directory import fingerprints

    async with AsyncExitStack() as resources:
        return await run_evaluation(
            o, tasks, client, await served_rival(resources, o.rival, stack),
            fingerprints(await drafters_of(stack)), output, resume,
        )  # fmt: skip


def _report(
    o: EvalOptions,
    progressed: Progressed,
    found: Sequence[Found],
    models: dict[str, Any],
    results: RunResults,
) -> Report:
    from flyspec_lab.plots import quality_plot
    from flyspec_lab.tables import task_section

    parts: list[Part] = [*map(task_section, found)]
    missing = {of.task: of.answered.missing for of in found if of.answered and of.answered.missing}
    parts += [f"{task}: no texts of {', '.join(of)}; left out" for task, of in missing.items()]
    again = (
        "--resume makes them" if results.output else "with --output RUN, --resume would make them"
    )
    if progressed.failed:
        parts.append(
            f"{progressed.failed} texts failed and are left out; {again} again. The first: "
            f"{progressed.first_error}"
        )
    if progressed.lost:
        parts.append(f"ended early, since no server answers: {progressed.lost}")
    if progressed.left:
        parts.append(f"{progressed.left} texts are left; {again}")
    if any(of.reports for of in found):
        parts.append(quality_plot("quality", found))
    document = {
        **vars(o),
        **models,
        "samples": vars(progressed),
        "conditions": [report for of in found for report in of.reports],
        "equal_costs": [cost for of in found for cost in of.equal_costs],
        "missing": missing,
    }
    passed = not (progressed.failed or progressed.lost)
    return Report(document, parts, passed=passed, title=f"Rules on {models['target'].name}")

"""`flyspec study`: questions about rules, answered in a report with tables and plots."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyspec.cli.added_drafters import (
    Drafts,
    drafters_of,
    fingerprints,
    with_added_drafters,
)
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.program import say
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.concurrency import interrupted
from flyspec.errors import ConfigError
from flyspec.lab import check_installed
from flyspec.lab.studies.options import StudyOptions

if TYPE_CHECKING:
    from pathlib import Path

    from flyspec.client import AsyncClient
    from flyspec.lab.problems import TaskProblems
    from flyspec.lab.studies.batch import BatchStudy
    from flyspec.lab.studies.page import Page
    from flyspec.lab.studies.study import Study
    from flyspec.values.admin import DrafterStatus

_ALL = "all"


@with_flags
def study(
    models: ModelFlags,
    options: StudyOptions,
    draft: Drafts = (),
    names: Annotated[list[str] | None, typer.Argument(
        metavar="NAME...", help="Studies, or all; none: list them.",
    )] = None,
) -> None:  # fmt: skip
    """Answer questions about rules: run their conditions, and write a report for each.

    A study that was interrupted goes on where it stopped; one that needs other drafters than the
    stack has is skipped.
    """
    check_installed("flyspec study")
    from flyspec.cli.runtime import run_async, with_server
    from flyspec.drawing import check_matplotlib
    from flyspec.lab.studies.batch import BatchStudy
    from flyspec.lab.studies.catalogue import STUDIES, studies_named
    from flyspec.spelling import did_you_mean

    if not names:
        for each in STUDIES.values():
            print(f"{each.name:20} {each.question}")
        return
    for name in names:
        if name not in (*STUDIES, _ALL):
            raise ConfigError(
                f"{name!r} is no study{did_you_mean(name, STUDIES)}; `flyspec study` lists them"
            )
    check_matplotlib("flyspec study")
    chosen = studies_named(list(STUDIES) if _ALL in names else names)
    tasks = {each.name: each.problems(options) for each in chosen}
    command = shlex.join(["flyspec", *sys.argv[1:]])

    drafts = dict(draft)
    slots = StackOptions.max_sessions
    for each in chosen:
        if isinstance(each, BatchStudy):
            slots = max(slots, each.slots)
        elif models.model is None:  # the bundled pair
            drafts = {name: str(path) for name, path in each.drafts.items()} | drafts

    async def use(client: AsyncClient, stack: Stack | None) -> None:
        assert stack is not None
        work = _answer_all(chosen, tasks, client, stack, options, command)
        await with_added_drafters(stack, tuple(drafts.items()), work)

    options_of_stack = StackOptions(**vars(models), log_level="warning", max_sessions=slots)
    run_async(with_server(options_of_stack, None, use))


async def _answer_all(
    studies: Sequence[Study | BatchStudy],
    tasks: Mapping[str, Sequence[TaskProblems]],
    client: AsyncClient,
    stack: Stack,
    o: StudyOptions,
    command: str,
) -> None:
    """Run the studies that this stack can answer, on their tasks, and write their reports."""
    from flyspec.cli.results import result_console
    from flyspec.lab.studies.batch import BatchStudy

    drafters = await drafters_of(stack)
    for each in studies:
        directory = o.output / each.name
        if not isinstance(each, BatchStudy) and (missing := each.missing(drafters)):
            say(f"{each.name}: skipped: {missing}")
            continue
        directory.parent.mkdir(parents=True, exist_ok=True)
        say(f"{each.name}: {each.question}")
        of = tasks[each.name]
        if isinstance(each, BatchStudy):
            page = await _measured(each, of, client, drafters, o, command, directory)
        else:
            page = await _evaluated(each, of, client, drafters, o, command, directory)
        file = page.write(directory)
        console: Any = result_console()
        for section in page.sections:
            for table in section.tables:
                console.print(table, markup=False, crop=False)
        say(f"wrote {file}")
        if interrupted():
            return


async def _evaluated(
    study: Study,
    tasks: Sequence[TaskProblems],
    client: AsyncClient,
    drafters: Sequence[DrafterStatus],
    o: StudyOptions,
    command: str,
    directory: Path,
) -> Page:
    """Run a study's evaluation, and return its report."""
    from flyspec.lab.evaluation import run_evaluation
    from flyspec.lab.run import ServedModel
    from flyspec.lab.studies.report import page_of

    run = study.run(o, drafters)
    served = await client.list_models()
    target = ServedModel(client, served.target)
    found = await run_evaluation(
        run, tasks, served, target, None, fingerprints(drafters), directory,
        resume=True, mixed_versions=o.mixed_versions,
    )  # fmt: skip
    return page_of(study, found, tasks, served.target, command, o.problem_seed, drafters)


async def _measured(
    study: BatchStudy,
    tasks: Sequence[TaskProblems],
    client: AsyncClient,
    drafters: Sequence[DrafterStatus],
    o: StudyOptions,
    command: str,
    directory: Path,
) -> Page:
    """Measure a study of batch sizes, and return its report."""
    from flyspec.lab.studies.batch import measure, page_of_batches

    target = (await client.list_models()).target
    samples = await measure(study, tasks, client, target, drafters, o, directory)
    return page_of_batches(study, samples, tasks, target, drafters, o, command)

"""`flyspec study`: questions about rules, answered in a report with tables and plots."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.program import say
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.errors import ConfigError
from flyspec.lab import check_installed
from flyspec.lab.studies.options import StudyOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyspec.client import AsyncClient
    from flyspec.lab.problems import TaskProblems
    from flyspec.lab.studies.study import Study

_ALL = "all"


@with_flags
def study(
    models: ModelFlags,
    options: StudyOptions,
    names: Annotated[list[str] | None, typer.Argument(
        metavar="NAME...", help="Studies, or all; none: list them.",
    )] = None,
) -> None:  # fmt: skip
    """Answer questions about rules: run their conditions, and write a report for each.

    A study that was interrupted goes on where it stopped.
    """
    check_installed("flyspec study")
    from flyspec.cli.runtime import run_async, with_server
    from flyspec.drawing import check_matplotlib
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
    asked = [(each, each.problems(options)) for each in chosen]
    command = shlex.join(["flyspec", *sys.argv[1:]])

    async def use(client: AsyncClient, _: Stack | None) -> None:
        for each, tasks in asked:
            await _answer(each, tasks, client, options, command)

    stack = StackOptions(**vars(models), log_level="warning")
    run_async(with_server(stack, None, use))


async def _answer(
    each: Study,
    tasks: Sequence[TaskProblems],
    client: AsyncClient,
    o: StudyOptions,
    command: str,
) -> None:
    """Run one study and write its report."""
    from flyspec.cli.results import result_console
    from flyspec.lab.evaluation import run_evaluation
    from flyspec.lab.run import ServedModel
    from flyspec.lab.studies.report import page_of

    served = await client.list_models()
    target = ServedModel(client, served.target)
    directory = o.output / each.name
    directory.parent.mkdir(parents=True, exist_ok=True)
    say(f"{each.name}: {each.question}")
    found = await run_evaluation(
        each.run(o), tasks, served, target, None, {}, directory,
        resume=True, mixed_versions=o.mixed_versions,
    )  # fmt: skip
    page = page_of(each, found, tasks, served.target, command, o.problem_seed)
    file = page.write(directory)
    console: Any = result_console()
    for section in page.sections:
        for table in section.tables:
            console.print(table, markup=False, crop=False)
    say(f"wrote {file}")

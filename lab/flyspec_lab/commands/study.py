"""`flyspec study`: questions about rules, answered in a report with tables and plots."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.program import say
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.concurrency import interrupted
from flyspec.errors import ConfigError
from flyspec_lab.commands.evaluate import evaluate_on
from flyspec_lab.commands.other_models import Drafts, drafters_of, with_added_drafters
from flyspec_lab.options import StudyOptions

if TYPE_CHECKING:
    from flyspec.client import AsyncClient
    from flyspec_lab.problems import TaskProblems
    from flyspec_lab.report import Section
    from flyspec_lab.studies.study import Study

_ALL = "all"
Tasks = Mapping[str, "Sequence[TaskProblems]"]


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
    from flyspec.cli.runtime import run_async, with_server
    from flyspec.spelling import did_you_mean
    from flyspec_lab.studies.catalogue import STUDIES

    if not names:
        for each in STUDIES.values():
            print(f"{each.name:20} {each.question}")
        return
    for name in names:
        if name not in (*STUDIES, _ALL):
            raise ConfigError(
                f"{name!r} is no study{did_you_mean(name, STUDIES)}; `flyspec study` lists them"
            )
    chosen = [each for name, each in STUDIES.items() if name in names or _ALL in names]
    tasks = {each.name: each.problems(options) for each in chosen}
    drafts = dict(draft)
    if models.model is None:  # the bundled pair
        own = ((name, str(path)) for each in chosen for name, path in each.draft_models.items())
        drafts = {**dict(own), **drafts}
    settings = StackOptions(**vars(models), log_level="warning").resolved()
    # Before the stack starts, which needs the devices, too.
    further = {
        each.name: each.of_models(tasks[each.name], settings, options)
        for each in chosen
        if each.of_models is not None
    }

    async def use(client: AsyncClient, stack: Stack | None) -> None:
        assert stack is not None
        work = _answer(chosen, tasks, further, client, stack, options)
        await with_added_drafters(stack, tuple(drafts.items()), work)

    run_async(with_server(settings, None, use))


async def _answer(
    studies: Sequence[Study],
    tasks: Tasks,
    further: Mapping[str, Sequence[Section]],
    client: AsyncClient,
    stack: Stack,
    o: StudyOptions,
) -> None:
    """Run the studies that this stack can answer, and write their reports.

    `further` are sections of a study's report that are made already.
    """
    from flyspec_lab.studies.study import evaluated, facts_of

    command = shlex.join(["flyspec", *sys.argv[1:]])
    drafters = await drafters_of(stack)
    for each in studies:
        of, target = tasks[each.name], (await client.list_models()).target
        try:
            run = each.run(o, drafters)
        except LookupError as missing:
            say(f"{each.name}: skipped: {missing}")
            continue
        say(f"{each.name}: {each.question}")
        directory = o.output / each.name
        _, found = await evaluate_on(client, stack, run, of, directory, resume=True)
        sections, claims = evaluated(each, found)
        used = {arm.drafter for arm in found[0].arms}
        facts = facts_of(command, of, o, target, [d for d in drafters if d.name in used])
        report = each.report([*sections, *further.get(each.name, ())], claims, facts)
        file = report.write(directory)
        report.show()
        say(f"wrote {file}")
        if interrupted():
            return

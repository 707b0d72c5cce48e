"""`flyspec study`: questions about rules, answered in a report with tables and plots."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.program import say
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.concurrency import interrupted
from flyspec.credentials import Credentials
from flyspec.errors import ConfigError
from flyspec.lab import check_installed
from flyspec.lab.studies.options import StudyOptions

if TYPE_CHECKING:
    from flyspec.client import AsyncClient
    from flyspec.lab.studies.study import Study
    from flyspec.lab.tuning.divergences import DraftedDivergences

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
    command = shlex.join(["flyspec", *sys.argv[1:]])

    stack = StackOptions(**vars(models), log_level="warning").resolved()
    # Before the stack starts, which needs the devices, too.
    divergences = {each.name: _divergences(each, stack, options) for each in chosen}

    async def use(client: AsyncClient, running: Stack | None) -> None:
        for each in chosen:
            if not interrupted():
                await _answer(each, client, running, options, command, divergences[each.name])

    run_async(with_server(stack, None, use))


def _divergences(
    each: Study, stack: StackOptions, o: StudyOptions
) -> dict[str, DraftedDivergences]:
    """Return the divergences of draft and target by task, if the study's report shows them."""
    if not each.divergences:
        return {}
    if not stack.model or not stack.draft_model:
        raise ConfigError(f"{each.name}: compares two models; name the other with --draft-model")
    from flyspec.lab.local_model import LocalModel
    from flyspec.lab.problems import read_problems
    from flyspec.lab.tuning.divergences import drafted_divergences
    from flyspec.lab.tuning.record import Recorder

    run = each.run(o)
    target, draft = (
        LocalModel(name, stack.device, stack.dtype, stack.threads)
        for name in (stack.model, stack.draft_model)
    )
    found = {}
    for task in read_problems(run):
        most = run.max_tokens or task.task.max_tokens
        recorder = Recorder(target, draft, task.task, o.num_speculative_tokens, most)
        found[task.name] = drafted_divergences(recorder.record(task.problems, forks=False))
    return found


async def _answer(
    each: Study,
    client: AsyncClient,
    stack: Stack | None,
    o: StudyOptions,
    command: str,
    divergences: Mapping[str, DraftedDivergences],
) -> None:
    """Run one study and write its report."""
    from flyspec.cli.results import result_console
    from flyspec.cli.rival import served_rival
    from flyspec.lab.evaluation import run_evaluation
    from flyspec.lab.problems import read_problems
    from flyspec.lab.run import ServedModel
    from flyspec.lab.studies.report import page_of

    runs = each.runs(o)
    served = await client.list_models()
    target = ServedModel(client, served.target)
    directory = o.output / each.name
    directory.mkdir(parents=True, exist_ok=True)
    say(f"{each.name}: {each.question}")
    found = {}
    for part, run in runs.items():
        if interrupted():
            break
        async with AsyncExitStack() as resources:
            rival = await served_rival(resources, run.rival, stack, Credentials())
            found[part] = await run_evaluation(
                run, read_problems(run), served, target, rival, {}, directory / part,
                resume=True, mixed_versions=o.mixed_versions,
            )  # fmt: skip
    page = page_of(each, found, served.target, command, o.problem_seed, divergences)
    file = page.write(directory)
    console: Any = result_console()
    for section in page.sections:
        for table in section.tables:
            console.print(table, markup=False, crop=False)
    say(f"wrote {file}")

"""`flyspec study`: questions about rules, answered in a report with tables and plots."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.program import say
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.concurrency import interrupted
from flyspec.credentials import Credentials
from flyspec.errors import ConfigError
from flyspec_lab.commands.other_models import Drafts, drafters_of, with_added_drafters
from flyspec_lab.options import StudyOptions

if TYPE_CHECKING:
    from pathlib import Path

    from flyspec.client import AsyncClient, Models
    from flyspec.values.admin import DrafterStatus
    from flyspec_lab.evaluation import Evaluation
    from flyspec_lab.problems import TaskProblems
    from flyspec_lab.report import Section
    from flyspec_lab.studies.batch import BatchStudy
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
    from flyspec_lab.studies.study import Study

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
    drafts, slots = dict(draft), StackOptions.max_sessions
    for each in chosen:
        if not isinstance(each, Study):
            slots = max(slots, each.slots)
        elif models.model is None:  # the bundled pair
            drafts = {name: str(path) for name, path in each.drafts.items()} | drafts
    settings = StackOptions(**vars(models), log_level="warning", max_sessions=slots).resolved()
    # Before the stack starts, which needs the devices, too.
    further = {
        each.name: _divergences(tasks[each.name], settings, options)
        for each in chosen
        if isinstance(each, Study) and each.divergences
    }

    async def use(client: AsyncClient, stack: Stack | None) -> None:
        assert stack is not None
        work = _answer(chosen, tasks, further, client, stack, options)
        await with_added_drafters(stack, tuple(drafts.items()), work)

    run_async(with_server(settings, None, use))


def _divergences(
    tasks: Sequence[TaskProblems], stack: StackOptions, o: StudyOptions
) -> list[Section]:
    """Return how far draft and target are apart on each task; nothing without a draft model."""
    from flyspec.config import DraftSettings, VerifySettings
    from flyspec_lab.local_model import LocalModel
    from flyspec_lab.studies.fuzzy import MAX_PROMPTS, divergence_section
    from flyspec_lab.tuning.recording import Recorder
    from flyspec_lab.tuning.replay import drafted_divergences

    if not stack.model or not stack.draft_model:
        return []
    device, threads = stack.draft_device or stack.device, stack.threads
    target = LocalModel(
        VerifySettings(model=stack.model, device=stack.device, dtype=stack.dtype, threads=threads)
    )
    draft = LocalModel(
        DraftSettings(
            model=stack.draft_model, device=device, dtype=stack.draft_dtype, threads=threads
        )
    )
    found = {}
    for task in tasks:
        most = o.max_tokens or task.task.max_tokens
        recorder = Recorder(target, draft, task.task, o.num_speculative_tokens, most)
        recording = recorder.record(task.problems[:MAX_PROMPTS], forks=False)
        found[task.name] = drafted_divergences(recording)
    return [divergence_section(found)]


async def _answer(
    studies: Sequence[Study | BatchStudy],
    tasks: Tasks,
    further: Mapping[str, Sequence[Section]],
    client: AsyncClient,
    stack: Stack,
    o: StudyOptions,
) -> None:
    """Run the studies that this stack can answer, and write their reports.

    `further` are sections of a study's report that are made already.
    """
    from flyspec_lab.studies.batch import batch_report, measure
    from flyspec_lab.studies.study import Study, report_of

    command = shlex.join(["flyspec", *sys.argv[1:]])
    drafters = await drafters_of(stack)
    served = await client.list_models()
    target = served.target
    for each in studies:
        directory, of = o.output / each.name, tasks[each.name]
        if isinstance(each, Study) and (missing := each.missing(drafters)):
            say(f"{each.name}: skipped: {missing}")
            continue
        directory.mkdir(parents=True, exist_ok=True)
        say(f"{each.name}: {each.question}")
        if isinstance(each, Study):
            found = await _evaluated(each, of, client, served, stack, drafters, o, directory)
            sections = further.get(each.name, ())
            report = report_of(each, found, of, target, o, command, drafters, sections)
        else:
            samples = await measure(each, of, client, target, drafters, o, directory)
            report = batch_report(each, samples, of, target, drafters, o, command)
        file = report.write(directory)
        report.show()
        say(f"wrote {file}")
        if interrupted():
            return


async def _evaluated(
    study: Study,
    tasks: Sequence[TaskProblems],
    client: AsyncClient,
    served: Models,
    stack: Stack,
    drafters: Sequence[DrafterStatus],
    o: StudyOptions,
    directory: Path,
) -> dict[str, Evaluation]:
    """Evaluate each part of a study, in a directory of its own."""
    from flyspec_lab.commands.other_models import served_rival
    from flyspec_lab.evaluation import run_evaluation
    from flyspec_lab.run import ServedModel
    from flyspec_lab.run_directory import fingerprints

    found = {}
    for part, run in study.runs(o, drafters).items():
        async with AsyncExitStack() as resources:
            rival = await served_rival(resources, run.rival, stack, Credentials())
            found[part] = await run_evaluation(
                run, tasks, served, ServedModel(client, served.target), rival,
                fingerprints(drafters), directory / part, resume=True,
            )  # fmt: skip
        if interrupted():
            break
    return found

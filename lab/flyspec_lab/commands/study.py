"""`flyspec study`: questions about rules, answered in a report with tables and plots."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.program import say
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.concurrency import interrupted
from flyspec.credentials import Credentials
from flyspec.errors import ConfigError
from flyspec_lab.commands.other_models import (
    Drafts,
    drafters_of,
    with_added_drafters,
)
from flyspec_lab.studies.options import StudyOptions

if TYPE_CHECKING:
    from pathlib import Path

    from flyspec.client import AsyncClient, Models
    from flyspec.values.admin import DrafterStatus
    from flyspec_lab.problems import TaskProblems
    from flyspec_lab.studies.batch import BatchStudy
    from flyspec_lab.studies.divergences import Divergences
    from flyspec_lab.studies.page import Page
    from flyspec_lab.studies.study import Study

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
    from flyspec.cli.runtime import run_async, with_server
    from flyspec.spelling import did_you_mean
    from flyspec_lab.studies.batch import BatchStudy
    from flyspec_lab.studies.catalogue import STUDIES, studies_named

    if not names:
        for each in STUDIES.values():
            print(f"{each.name:20} {each.question}")
        return
    for name in names:
        if name not in (*STUDIES, _ALL):
            raise ConfigError(
                f"{name!r} is no study{did_you_mean(name, STUDIES)}; `flyspec study` lists them"
            )
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
        asker = _Asker(client, stack, options, command)
        work = asker.answer(chosen, tasks, divergences)
        await with_added_drafters(stack, tuple(drafts.items()), work)

    settings = StackOptions(**vars(models), log_level="warning", max_sessions=slots).resolved()
    # Before the stack starts, which needs the devices, too.
    divergences = {
        each.name: _divergences(tasks[each.name], settings, options)
        for each in chosen
        if not isinstance(each, BatchStudy) and each.divergences
    }
    run_async(with_server(settings, None, use))


def _divergences(
    tasks: Sequence[TaskProblems], stack: StackOptions, o: StudyOptions
) -> Divergences:
    """Return how far draft and target are apart on each task; empty if there is no draft model."""
    from flyspec.config import DraftSettings, VerifySettings
    from flyspec_lab.local_model import LocalModel
    from flyspec_lab.studies.divergences import MAX_PROMPTS
    from flyspec_lab.tuning.recording import Recorder
    from flyspec_lab.tuning.replay import drafted_divergences

    if not stack.model or not stack.draft_model:
        return {}
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
        found[task.name] = drafted_divergences(
            recorder.record(task.problems[:MAX_PROMPTS], forks=False)
        )
    return found


@dataclass(frozen=True)
class _Asker:
    """Asks studies of a stack."""

    client: AsyncClient
    stack: Stack
    o: StudyOptions
    command: str

    async def answer(
        self,
        studies: Sequence[Study | BatchStudy],
        tasks: Mapping[str, Sequence[TaskProblems]],
        divergences: Mapping[str, Divergences],
    ) -> None:
        """Run the studies that this stack can answer, and write their reports.

        `tasks` and `divergences` are by study.
        """
        from flyspec.tables import result_console
        from flyspec_lab.studies.batch import BatchStudy

        drafters = await drafters_of(self.stack)
        served = await self.client.list_models()
        for each in studies:
            directory = self.o.output / each.name
            if not isinstance(each, BatchStudy) and (
                missing := each.missing(drafters, served.rules)
            ):
                say(f"{each.name}: skipped: {missing}")
                continue
            directory.mkdir(parents=True, exist_ok=True)
            say(f"{each.name}: {each.question}")
            of = tasks[each.name]
            if isinstance(each, BatchStudy):
                page = await self._measured(each, of, served, drafters, directory)
            else:
                apart = divergences.get(each.name, {})
                page = await self._evaluated(each, of, served, drafters, apart, directory)
            file = page.write(directory)
            console: Any = result_console()
            for section in page.sections:
                for table in section.tables:
                    console.print(table, markup=False, crop=False)
            say(f"wrote {file}")
            if interrupted():
                return

    async def _evaluated(
        self,
        study: Study,
        tasks: Sequence[TaskProblems],
        served: Models,
        drafters: Sequence[DrafterStatus],
        divergences: Divergences,
        directory: Path,
    ) -> Page:
        """Evaluate each part of a study, in a directory of its own, and return the report."""
        from flyspec_lab.commands.other_models import served_rival
        from flyspec_lab.evaluation import run_evaluation
        from flyspec_lab.run import ServedModel
        from flyspec_lab.run_directory import fingerprints
        from flyspec_lab.studies.report import page_of

        target = ServedModel(self.client, served.target)
        found = {}
        for part, run in study.runs(self.o, drafters).items():
            async with AsyncExitStack() as resources:
                rival = await served_rival(resources, run.rival, self.stack, Credentials())
                found[part] = await run_evaluation(
                    run, tasks, served, target, rival, fingerprints(drafters), directory / part,
                    resume=True, mixed_versions=self.o.mixed_versions,
                )  # fmt: skip
            if interrupted():
                break
        return page_of(
            study, found, tasks, served.target, self.command, self.o.problem_seed, drafters,
            divergences,
        )  # fmt: skip

    async def _measured(
        self,
        study: BatchStudy,
        tasks: Sequence[TaskProblems],
        served: Models,
        drafters: Sequence[DrafterStatus],
        directory: Path,
    ) -> Page:
        """Measure a study of batch sizes, and return its report."""
        from flyspec_lab.studies.batch import measure, page_of_batches

        samples = await measure(
            study, tasks, self.client, served.target, drafters, self.o, directory
        )
        return page_of_batches(study, samples, tasks, served.target, drafters, self.o, self.command)

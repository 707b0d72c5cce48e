"""`flyspec eval`: the quality of each rule's outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flyspec.bench.options import EvalOptions
from flyspec.cli.bench.common import Address, Local, models_of
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.results import BenchReport, Results, notes
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.credentials import Credentials

if TYPE_CHECKING:
    from flyspec.client import AsyncClient


@with_flags
def evaluate(
    models: ModelFlags,
    connection: Credentials,
    options: EvalOptions,
    results: Results,
    address: Address = None,
    local: Local = False,
) -> None:
    """Compare the outputs of plain decoding and acceptance rules by answers or log-likelihood."""
    from flyspec.bench import accuracy, tables
    from flyspec.bench.prompts import Group, fresh_problems
    from flyspec.cli.runtime import refuse_model_flags, run_async, with_server
    from flyspec.progress import error_console, working
    from flyspec.prompts import read_prompts

    refuse_model_flags(models, local or address is None, address, reads_model=True)
    file = options.prompt_file
    if file is None:
        group = fresh_problems(options.problems, options.problem_seed)
    else:
        group = Group(file, read_prompts(file, options.limit))
    answered = accuracy.has_answers(group)

    async def use(client: AsyncClient, stack: Stack | None) -> BenchReport:
        target = (await client.list_models()).target
        reference = None
        if not answered:  # loaded first, to fail early if the target is not on this machine
            from flyspec.bench.reference import Reference

            threads = stack.options.threads if stack else models.threads
            source = str(stack.options.model) if stack else models.model or target.name
            with working(f"loading {source} to score texts"):
                reference = Reference(source, target.dtype, threads, target.device)
        error_console().print(
            f"{len(group.prompts)} prompts with each rule on {target.name}", markup=False
        )
        done, texts = await accuracy.generate_all(client, group, options)
        scores = None if reference is None else await accuracy.log_likelihoods(reference, texts)
        reports = accuracy.report(done, texts, scores, options.conditions[0].name)
        if options.rules is None and answered:
            shown: list[Any] = [tables.accuracy_table(done.name, reports)]
        else:
            shown = [tables.rules_table(done.name, reports), notes(tables.RULES_NOTES)]
        if len(reports) > 1:
            shown.append(tables.versus_table(reports))
        document = {
            **vars(options),
            **models_of(target, stack),
            "problems": done.name,
            "seed": options.problem_seed if file is None else None,
            "sampling_seed": options.seed,
            "conditions": reports,
        }
        return BenchReport(document, shown, {"samples": accuracy.to_samples(done, texts, scores)})

    stack = StackOptions(**vars(models), log_level="warning") if address is None else None
    results.of(lambda: run_async(with_server(stack, address, use, connection)))

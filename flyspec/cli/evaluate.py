"""`flyspec eval`: the quality of each rule's outputs, measured by `flyspec.bench.accuracy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from flyspec.cli.options import ModelFlags, measuring, with_flags
from flyspec.cli.runtime import (
    check_output,
    error_console,
    print_json,
    refuse_model_flags,
    run_async,
    with_server,
    write_json,
)
from flyspec.cli.stack import Stack, StackOptions
from flyspec.credentials import Credentials
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.prompts import read_prompts
from flyspec.values.tokens import SamplingParams

if TYPE_CHECKING:
    from flyspec.bench.accuracy import ConditionReport, Results
    from flyspec.client import Client


@with_flags
def evaluate(
    models: ModelFlags,
    connection: Credentials,
    problems: Annotated[int, Flag("Number of fresh word problems.", min=1)] = 100,
    problem_seed: measuring.ProblemSeed = 7,
    prompt_file: Annotated[
        str | None,
        Flag("Prompt file to use instead of fresh problems. Without answers (HumanEval), the "
             "target's log-likelihood of the outputs is reported instead of accuracy."),
    ] = None,
    limit: measuring.Limit = None,
    rules: Annotated[
        str | None,
        Flag("Rules to compare, or `all`: comma-separated, with parameters as in "
             "fly,margin:margin_threshold=0.2,fly_window_size=4. Also shows the loss of each "
             "rule.", default="exact, fly and fly with W = 0"),
    ] = None,
    address: measuring.Address = None,
    local: measuring.Local = False,
    drafter: measuring.Drafter = "",
    num_speculative_tokens: Annotated[str, Flag(
        "K: maximum drafted tokens per round, or auto to adapt it each round.",
    )] = "auto",
    max_tokens: measuring.MaxTokens = 256,
    temperature: measuring.Temperature = 0.0,
    top_p: measuring.TopP = 1.0,
    seed: Annotated[
        int, Flag("Sampling seed of the first prompt, one more for each later prompt.", min=0)
    ] = 0,
    concurrency: Annotated[int, Flag("Concurrent prompts.", min=1)] = 8,
    chat: measuring.Chat = None,
    json: measuring.Json = False,
    output: measuring.Output = None,
) -> None:  # fmt: skip
    """Compare the outputs of plain decoding and acceptance rules by answers or log-likelihood."""
    from flyspec.bench import accuracy, conditions
    from flyspec.bench.prompts import Group, fresh_problems

    check_output(output)
    refuse_model_flags(models, local or address is None, address, reads_model=True)
    chosen = conditions.parse_conditions(rules) if rules is not None else conditions.CONDITIONS
    first = chosen[0].name
    chosen = conditions.with_plain(chosen)
    ks = conditions.parse_ks(num_speculative_tokens)
    if len(ks) > 1:
        raise ConfigError(
            "--num-speculative-tokens: give one K, and others as parameters of rules: "
            "--rules fly,fly:num_speculative_tokens=8"
        )
    if prompt_file is None:
        group = fresh_problems(problems, problem_seed)
    else:
        group = Group(prompt_file, read_prompts(prompt_file, limit))
    answered = accuracy.has_answers(group)
    options = accuracy.EvalOptions(
        num_speculative_tokens=ks[0],
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=temperature, top_p=top_p),
        seed=seed,
        drafter=drafter,
        chat=chat,
        concurrency=concurrency,
    )
    facts: dict[str, Any] = {
        "problems": group.name,
        "seed": problem_seed if prompt_file is None else None,
        "num_speculative_tokens": ks[0],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "sampling_seed": seed,
    }

    async def use(
        client: Client, stack: Stack | None
    ) -> tuple[Results, dict[str, list[float]] | None]:
        from flyspec.cli.progress import progress_bar

        target = (await client.list_models()).target
        facts.update(target=target.name, dtype=target.dtype, device=target.device)
        reference = None
        if not answered:  # loaded first, to fail early if the target is not on this machine
            from flyspec.bench.reference import Reference

            threads = stack.options.threads if stack else models.threads
            source = str(stack.options.model) if stack else models.model or target.name
            reference = Reference(source, target.dtype, threads, target.device)
        console = error_console()
        total = len(group.prompts) * len(chosen)
        console.print(
            f"{len(group.prompts)} prompts in {len(chosen)} modes on {target.name}", markup=False
        )
        with progress_bar(console) as progress:
            bar = progress.add_task("generating", total=total)
            results = await accuracy.generate_all(
                client, group, chosen, options, lambda: progress.advance(bar)
            )
            if reference is None:
                return results, None
            bar = progress.add_task("scoring", total=total)
            return results, await accuracy.log_likelihoods(
                reference, results, lambda: progress.advance(bar)
            )

    stack_options = StackOptions(**vars(models), log_level="warning") if address is None else None
    results, scores = run_async(with_server(stack_options, address, use, connection))
    reports = accuracy.report(group, results, scores, first)
    samples = accuracy.to_samples(group, results, scores)
    write_json(output, accuracy.to_document(reports, samples, **facts))
    if json:
        print_json(accuracy.to_document(reports, **facts))
    else:
        _print(group.name, reports, every_column=rules is not None or not answered)


def _print(name: str, reports: list[ConditionReport], every_column: bool) -> None:
    from flyspec.bench.tables import RULES_NOTES, accuracy_table, rules_table, versus_table
    from flyspec.cli.bench.common import result_console

    console = result_console()
    if not every_column:
        console.print(accuracy_table(name, reports))
    else:
        console.print(rules_table(name, reports))
        console.print(RULES_NOTES, style="dim")
    if len(reports) > 1:
        console.print(versus_table(reports))

"""`flyspec eval`: how right each rule's answers are. Measures in `bench.accuracy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyspec.cli.options import ModelFlags, with_flags

if TYPE_CHECKING:
    from flyspec.cli.stack import Stack
    from flyspec.client import Client


@with_flags
def evaluate(
    models: ModelFlags,
    problems: Annotated[int, typer.Option(help="Fresh word problems.", min=1)] = 100,
    problem_seed: Annotated[int, typer.Option(help="Seed of the word problems.")] = 7,
    prompt_file: Annotated[
        str | None, typer.Option(help="GSM8K or MGSM file, instead of fresh problems.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most problems of the file.", min=1)] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Of a running stack.", show_default="one is started for this command"),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Start a stack (the default).")] = False,
    drafter: Annotated[str, typer.Option(help="Drafter to use.", show_default="the server's")] = "",
    num_speculative_tokens: Annotated[int, typer.Option(help="K.", min=1)] = 15,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a solution.", min=1)] = 256,
    concurrency: Annotated[int, typer.Option(help="Problems at once.", min=1)] = 8,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Ask an assistant.")] = True,
    json: Annotated[bool, typer.Option("--json", help="One JSON document, no table.")] = False,
) -> None:
    """Solve problems under plain decoding, exact, fly and fly with W = 0, and compare."""
    from bench import accuracy
    from bench.prompts import Group, fresh_problems
    from flyspec.cli.prompts import read_prompts
    from flyspec.cli.runtime import print_json, refuse_model_flags, run_async, with_server
    from flyspec.errors import ConfigError

    refuse_model_flags(models, local or address is None, address)
    if prompt_file is None:
        group = fresh_problems(problems, problem_seed)
    else:
        group = Group(prompt_file, read_prompts(prompt_file, limit))
        unknown = [p for p in group.prompts if p.reference is None]
        if unknown:
            raise ConfigError(f"{unknown[0].where}: no answer to compare with")

    async def use(client: Client, stack: Stack | None) -> list[accuracy.AccuracyReport]:
        from flyspec.cli.progress import progress_bar
        from flyspec.cli.runtime import error_console

        console = error_console()
        total = len(group.prompts) * len(accuracy.CONDITIONS)
        console.print(f"solving {len(group.prompts)} problems in "
                      f"{len(accuracy.CONDITIONS)} ways", markup=False)  # fmt: skip
        with progress_bar(console) as progress:
            bar = progress.add_task("solving", total=total)
            return await accuracy.evaluate(
                client,
                group,
                num_speculative_tokens=num_speculative_tokens,
                max_tokens=max_tokens,
                drafter=drafter,
                chat=chat,
                concurrency=concurrency,
                on_result=lambda: progress.advance(bar),
            )

    stack_options = models.to_stack_options(log_level="warning") if address is None else None
    reports = run_async(with_server(stack_options, address, use))
    if json:
        facts: dict[str, Any] = {
            "problems": group.name,
            "seed": problem_seed if prompt_file is None else None,
            "num_speculative_tokens": num_speculative_tokens,
            "max_tokens": max_tokens,
        }
        print_json(accuracy.to_document(reports, **facts))
        return
    from rich.console import Console

    from bench.tables import accuracy_table

    Console(highlight=False).print(accuracy_table(group.name, reports))

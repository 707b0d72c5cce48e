"""`flyspec generate`: prompts in, streamed text out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from flyspec.cli.options import (
    Color,
    ConnectionFlags,
    ModelFlags,
    RuleFlags,
    SamplingFlags,
    SpeculationFlags,
    to_generate_options,
    with_flags,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from flyspec.cli.screen import Screen
    from flyspec.cli.stack import Stack
    from flyspec.client import Client, GenerateOptions, Generation
    from flyspec.prompts import Prompt


@with_flags
def generate(
    models: ModelFlags,
    sampling: SamplingFlags,
    speculation: SpeculationFlags,
    rule: RuleFlags,
    connection: ConnectionFlags,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...", help="Prompts; '-' reads standard input as a prompt file."
        ),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Of a running stack.", show_default="127.0.0.1:50050")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Start a stack for this command.")] = False,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(
            help="Lines, HumanEval, GSM8K, Spec-Bench or MGSM, told by the content; repeatable."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="A prompt is a user's message to an assistant.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an output.", min=1)] = 256,
    limit: Annotated[int | None, typer.Option(help="Most prompts of a file.", min=1)] = None,
    concurrency: Annotated[int, typer.Option(help="Prompts at once.", min=1)] = 1,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds for each prompt, waiting for its turn included.", show_default="no limit"
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document a prompt on standard output.")
    ] = False,
    return_rounds: Annotated[
        bool,
        typer.Option(
            "--return-rounds",
            help="With --json: each round's drafts and decisions, to replay the run with.",
        ),
    ] = False,
    color: Annotated[Color, typer.Option(help="Colour tokens by their origin.")] = "auto",
) -> None:
    """Stream the continuation of prompts, each token coloured by its origin.

    Without prompts, standard input is read as a prompt file.
    """
    from flyspec.cli.runtime import refuse_model_flags, run_async, with_server

    refuse_model_flags(models, local, address)
    if sampling.logprobs is not None and not json:
        raise typer.BadParameter("--logprobs: only with --json, which shows them")
    if return_rounds and not json:
        raise typer.BadParameter("--return-rounds: only with --json, which shows them")
    what = _prompts(prompts or [], prompt_file or [], limit)
    options = to_generate_options(max_tokens, sampling, speculation, rule)
    options = replace(options, timeout_s=timeout, return_rounds=return_rounds)
    output = _Output(json=json, color=_wants_color(color))

    async def use(client: Client, _: Stack | None) -> None:
        if len(what) == 1:
            await _one(client, what[0], options, chat, output)
        else:
            await _many(client, what, options, chat, concurrency, output)

    stack = models.to_stack_options(log_level="warning") if local else None
    run_async(with_server(stack, address, use, connection.credentials()))


@dataclass(frozen=True)
class _Output:
    """How results are shown."""

    json: bool
    color: bool


def _prompts(arguments: list[str], files: list[str], limit: int | None) -> list[Prompt]:
    from flyspec.errors import ConfigError
    from flyspec.prompts import Prompt, read_prompts

    if not arguments and not files:
        if sys.stdin.isatty():
            raise typer.BadParameter("no prompt: give one, or --prompt-file, or pipe some in")
        arguments = ["-"]
    found: list[Prompt] = []
    for argument in arguments:
        found += read_prompts("-", limit) if argument == "-" else [Prompt(argument, "plain")]
    for name in files:
        found += read_prompts(name, limit)
    if any(not p.text for p in found):
        raise ConfigError("prompt: is empty; give at least one character")
    return found


def _wants_color(color: Color) -> bool:
    from rich.console import Console

    if color == "auto":
        console = Console()
        return console.is_terminal and not console.no_color
    return color == "always"


async def _one(
    client: Client, prompt: Prompt, options: GenerateOptions, chat: bool, output: _Output
) -> None:
    """Stream one generation."""
    from flyspec.cli import render
    from flyspec.cli.runtime import error_console, print_json
    from flyspec.client import Chat, Chunk, Completion, Generation, Retract, Started, Transcript

    console = error_console()
    source = Chat.of_user(prompt.text) if chat else prompt.text
    if output.json:
        generation = await client.complete(source, options)
        _warn(console, generation.started.warnings)
        print_json(render.document(generation))
        return
    terminal = sys.stdout.isatty()
    options = replace(options, eager=options.eager and terminal)  # nothing else can take text back
    screen = _screen(output.color)
    started: Started | None = None
    transcript = Transcript()
    shown_prompt = (render.visible(prompt.text) + "\n" * chat, render.PROMPT_STYLE)
    echo = [shown_prompt] if output.color else []
    begin = time.perf_counter()
    async with aclosing(client.generate(source, options)) as events:  # type: ignore[type-var]
        async for event in events:
            transcript.add(event)
            match event:
                case Started():
                    started = event
                    _warn(console, started.warnings)
                    if output.color:
                        console.print(render.legend())
                    screen.show(echo)
                case Chunk() if terminal or output.color:
                    screen.show(render.pieces(event))
                case Chunk():
                    _write(event.text)  # as the model wrote it
                case Retract():
                    stands = [piece for c in transcript.chunks for piece in render.pieces(c)]
                    screen.replace(echo + stands)
                case Completion() if started is not None:
                    seconds = time.perf_counter() - begin
                    _write("\n")
                    generation = Generation(started, transcript.chunks, event)
                    line = render.summary(generation, seconds)
                    if not options.sampling.greedy:
                        line += f" · seed {started.seed}"
                    console.print(line, style="dim", markup=False)


def _screen(color: bool) -> Screen:
    """Standard output as a screen; its text is made harmless."""
    from flyspec.cli import render
    from flyspec.cli.screen import Screen

    return Screen(_write, render.paint if color else lambda text, _: text)


def _warn(console: Console, warnings: Sequence[str]) -> None:
    """What the server says of the parameters, on standard error."""
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


async def _many(
    client: Client,
    prompts: Sequence[Prompt],
    options: GenerateOptions,
    chat: bool,
    concurrency: int,
    output: _Output,
) -> None:
    """Generate for many prompts, some at once; results come in the order of the prompts."""
    from flyspec.cli import render
    from flyspec.cli.progress import progress_bar
    from flyspec.cli.runtime import error_console
    from flyspec.client import Chat
    from flyspec.errors import FlyspecError

    console = error_console()
    gate = asyncio.Semaphore(concurrency)

    async def work(prompt: Prompt) -> Generation:
        async with gate:
            try:
                source = Chat.of_user(prompt.text) if chat else prompt.text
                # A server with fewer slots than `concurrency` has the others wait here.
                return await client.complete(source, options, options.timeout_s or math.inf)
            except FlyspecError as error:
                raise type(error)(f"{prompt.where}: {error}" if prompt.where else error) from None

    if output.color:
        console.print(render.legend())
    begin = time.perf_counter()
    generations: list[Generation] = []
    warned: set[str] = set()
    tasks = [asyncio.ensure_future(work(p)) for p in prompts]
    try:
        with progress_bar(console) as progress:
            bar = progress.add_task("generating", total=len(prompts))
            for task in tasks:
                task.add_done_callback(lambda _: progress.advance(bar))
            for number, (prompt, task) in enumerate(zip(prompts, tasks, strict=True), 1):
                generation = await task
                generations.append(generation)
                _warn(console, [w for w in generation.started.warnings if w not in warned])
                warned.update(generation.started.warnings)
                _show(progress, _result(number, len(prompts), prompt, generation, output))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not output.json:
        console.print(render.total(generations, time.perf_counter() - begin), style="dim")


def _result(
    number: int, count: int, prompt: Prompt, generation: Generation, output: _Output
) -> str:
    """What standard output gets for one of many prompts."""
    from flyspec.cli import render
    from flyspec.cli.runtime import to_json

    if output.json:
        return to_json(render.document(generation)) + "\n"
    text = "".join(_shown(chunk, output) for chunk in generation.chunks)
    if output.color:
        text = render.paint(prompt.text, render.PROMPT_STYLE) + text
    return f"--- {number}/{count} ---\n{text}\n"


def _shown(chunk: object, output: _Output) -> str:
    """Text for a terminal is made harmless; text for a file or pipe is what the model wrote."""
    from flyspec.cli import render
    from flyspec.client import Chunk

    assert isinstance(chunk, Chunk)
    if output.color or sys.stdout.isatty():
        return render.painted(chunk, output.color)
    return chunk.text


def _show(progress: Progress, text: str) -> None:
    """Write a result; when the progress bar is on the same terminal, above it."""
    if progress.disable or not sys.stdout.isatty():
        _write(text)
        return
    with contextlib.ExitStack() as stack:
        progress.stop()
        stack.callback(progress.start)
        _write(text)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

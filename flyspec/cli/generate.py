"""`flyspec generate`: stream completions of prompts."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from flyspec.cli.conditions import Then, Until, with_phases
from flyspec.cli.json_output import print_json, to_json
from flyspec.cli.options import Color, ModelFlags, read_address, with_flags
from flyspec.cli.program import check_file
from flyspec.cli.runtime import refuse_model_flags, run_async, with_server
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.cli.streaming import (
    DEFAULTS,
    StreamedAnswer,
    note,
    wants_color,
    warn,
    write,
)
from flyspec.credentials import Credentials
from flyspec.errors import ConfigError, DeadlineExceededError, InvalidArgumentError
from flyspec.flags import Flag
from flyspec.progress import Bar, error_console
from flyspec.prompts import Prompt, PromptFiles, PromptLimit, read_prompts, read_raw_prompt
from flyspec.values.requests import GenerateOptions

if TYPE_CHECKING:
    from rich.progress import Progress

    from flyspec.client import AsyncClient, Generation


_PROMPT_ERRORS = InvalidArgumentError, DeadlineExceededError
"""Errors of one prompt, after which others can be answered."""


# fmt: off
@with_flags
def generate(
    models: ModelFlags,
    connection: Credentials,
    options: GenerateOptions = DEFAULTS,
    until: Until = (),
    then: Then = (),
    prompts: Annotated[list[str] | None, typer.Argument(
        metavar="PROMPT", help="Prompts; '-' reads standard input as a prompt file.",
    )] = None,
    address: Annotated[str | None, Flag(
        "Address of a running stack.", default="127.0.0.1:50050", read=read_address,
    )] = None,
    local: Annotated[bool, Flag("Start a stack for this command.")] = False,
    prompt_file: PromptFiles = (),
    file: Annotated[Sequence[str], Flag(
        "File to send as one prompt, unchanged; '-' is standard input; repeatable.",
    )] = (),
    chat: Annotated[bool, Flag("Send each prompt as a user's chat message.")] = False,
    limit: PromptLimit = None,
    concurrency: Annotated[int, Flag("Concurrent prompts.", min=1)] = 1,
    json: Annotated[bool, Flag("Print one JSON document per prompt.")] = False,
    record: Annotated[Path | None, Flag(
        "Also write recordings to a file, for `flyspec audit`.", metavar="FILE",
    )] = None,
    color: Annotated[Color, Flag("Color tokens by their origin.")] = "auto",
) -> None:
    # fmt: on
    """Stream completions of prompts, with tokens colored by origin.

    Without prompts, reads standard input as a prompt file.
    """
    refuse_model_flags(models, local, address)
    if options.logprobs is not None and not json:
        raise typer.BadParameter("--logprobs: only with --json")
    if options.return_rounds and not json:
        raise typer.BadParameter("--return-rounds: only with --json")
    options = with_phases(options, until, then)
    check_file("--record", record)
    what = _prompts(prompts or [], prompt_file, file, limit)

    async def use(client: AsyncClient, _: Stack | None) -> None:
        asked = options
        if record is not None:
            from flyspec.client.recordings import recordable

            asked = recordable(options)
        with _recorder(record) as tape:
            output = _Output(json, wants_color(color), options, tape)
            if len(what) == 1:
                await _one(client, what[0], asked, chat, output)
            else:
                await _many(client, what, asked, chat, concurrency, output)

    stack = StackOptions(**vars(models), log_level="warning") if local else None
    run_async(with_server(stack, address, use, connection))


@dataclass(frozen=True)
class _Output:
    """Format of results; `asked` is what the user wants of each, `tape` the file of recordings."""

    json: bool
    color: bool
    asked: GenerateOptions
    tape: TextIO | None = None

    def document(self, generation: Generation, index: int = 0) -> dict[str, Any]:
        """Return the JSON document, without what only a recording asked for."""
        from flyspec.cli import render

        document = render.document(generation, index)
        if self.asked.logprobs is None:
            document.pop("logprobs", None)
        if not self.asked.return_rounds:
            document.pop("rounds", None)
        return document

    def record(self, generation: Generation | None) -> None:
        """Write the recording of a complete generation, if there is a file."""
        if self.tape is not None and generation is not None:
            from flyspec.client.recordings import recording_of, to_line

            self.tape.write(to_line(recording_of(generation)) + "\n")
            self.tape.flush()


def _recorder(path: Path | None) -> AbstractContextManager[TextIO | None]:
    """Open the file of recordings, if there is one. Raises `ConfigError`."""
    if path is None:
        return nullcontext()
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--record {path}: {error.strerror}") from None


def _prompts(
    arguments: list[str], files: Sequence[str], raw_files: Sequence[str], limit: int | None
) -> list[Prompt]:
    if not (arguments or files or raw_files):
        if sys.stdin.isatty():
            raise typer.BadParameter(
                "no prompt: give one, use --prompt-file or --file, or pipe prompts in"
            )
        arguments = ["-"]
    found: list[Prompt] = []
    for argument in arguments:
        found += read_prompts("-", limit) if argument == "-" else [Prompt(argument, "plain")]
    for name in files:
        try:
            found += read_prompts(name, limit)
        except ConfigError as error:
            raise ConfigError(f"--prompt-file {error}") from None
    found += map(read_raw_prompt, raw_files)
    if any(not (p.text or p.chat) for p in found):
        raise ConfigError("prompt: is empty; give at least one character")
    return found


async def _one(
    client: AsyncClient, prompt: Prompt, options: GenerateOptions, chat: bool, output: _Output
) -> None:
    from flyspec.cli import render
    console = error_console()
    source = prompt.to_request(chat)
    if output.json:
        try:
            generation = await client.complete(source, options)
        except _PROMPT_ERRORS as error:
            print_json(render.failure(error))
            raise
        output.record(generation)
        warn(console, generation.started.warnings)
        print_json(output.document(generation))
        return
    echo = []
    if output.color:
        echo = [(render.visible(prompt.text) + "\n" * chat, render.PROMPT_STYLE)]
    answer = StreamedAnswer(output.color)
    await answer.stream(client, source, options, echo)
    output.record(answer.transcript.generation)


async def _many(
    client: AsyncClient,
    prompts: Sequence[Prompt],
    options: GenerateOptions,
    chat: bool,
    concurrency: int,
    output: _Output,
) -> None:
    """Generate for many prompts concurrently; print results in the order of the prompts.

    Raises `InvalidArgumentError` at the end if some prompts could not be answered.
    """
    from flyspec.cli import render

    console = error_console()
    gate = asyncio.Semaphore(concurrency)

    async def work(prompt: Prompt) -> Generation:
        async with gate:
            # If the server has fewer slots than `concurrency`, the others wait here.
            patience_s = options.timeout_s or math.inf
            return await client.complete(prompt.to_request(chat), options, patience_s)

    begin = time.perf_counter()
    generations: list[Generation] = []
    warned: set[str] = set()
    num_failed = 0
    tasks = [asyncio.ensure_future(work(p)) for p in prompts]
    try:
        with Bar(console) as progress:
            bar = progress.add_task("generating", total=len(prompts))
            for task in tasks:
                task.add_done_callback(lambda _: progress.advance(bar))
            for number, (prompt, task) in enumerate(zip(prompts, tasks, strict=True), 1):
                try:
                    generation = await task
                except _PROMPT_ERRORS as error:
                    num_failed += 1
                    if output.json:
                        _show(progress, to_json(render.failure(error, number - 1)) + "\n")
                    where = prompt.where or f"prompt {number}"
                    console.print(f"error: {where}: {error}", markup=False)
                    continue
                output.record(generation)
                if output.color and not generations:
                    console.print(render.legend(console.width))
                generations.append(generation)
                warn(console, [w for w in generation.started.warnings if w not in warned])
                warned.update(generation.started.warnings)
                _show(progress, _result(number, len(prompts), prompt, generation, output))
    except asyncio.CancelledError:
        if not output.json:
            line = render.total(generations, time.perf_counter() - begin)
            note(console, f"stopped after {len(generations)} of {len(prompts)} prompts · {line}")
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not output.json:
        note(console, render.total(generations, time.perf_counter() - begin))
    if num_failed:
        raise InvalidArgumentError(f"{num_failed} of {len(prompts)} prompts could not be answered")


def _result(
    number: int, count: int, prompt: Prompt, generation: Generation, output: _Output
) -> str:
    from flyspec.cli import render

    if output.json:
        return to_json(output.document(generation, number - 1)) + "\n"
    raw = not (output.color or sys.stdout.isatty())  # a file or pipe gets the text unchanged
    text = generation.text if raw else "".join(
        render.painted(chunk, output.color) for chunk in generation.chunks
    )  # fmt: skip
    if output.color:
        text = render.paint(prompt.text, render.PROMPT_STYLE) + text
    return f"--- {number}/{count} ---\n{text}\n"


def _show(progress: Progress, text: str) -> None:
    """Write a result, above the progress bar if that is on the same terminal."""
    shared = not progress.disable and sys.stdout.isatty()
    if shared:
        progress.stop()
    write(text)
    if shared:
        progress.start()

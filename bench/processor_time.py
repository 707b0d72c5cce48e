"""Processor time of flyspec and of llama.cpp's server: `python -m bench.processor_time`.

For a machine that others use, too, where time on the clock is mostly theirs. Both run the bundled
pair from the same GGUF files, with one thread for each model and the same number of drafts, on
prompts that none has seen. What counts is the time that the processes' threads spent on a
processor, those of all of flyspec's services together; the client's is left out.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

from bench.llama_cpp import BESIDE, SERVER, Rival, Setup, calibration_prompts, connected
from demo.gguf import FOLDER, TYPES, convert, file_name
from flyspec.bundled import DRAFT, TARGET
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, say, single
from flyspec.cli.runtime import run_async
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient, Chat, GenerateOptions
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.rules import Rule
from flyspec.word_problems import problems

Complete = Callable[[int], Awaitable[int]]
"""Continues a prompt by its number, and returns how many tokens that were."""


# fmt: off
@dataclass(frozen=True)
class ProcessorTimeOptions:
    """What to compare, and on what."""

    server: Annotated[Path, Flag("llama.cpp's llama-server.")] = SERVER
    type: Annotated[str, Flag(
        f"Type of the files' matrices: {', '.join(TYPES)}.", metavar="TYPE",
    )] = "bf16"
    problems: Annotated[int, Flag("Number of fresh word problems.", min=1)] = 24
    repeats: Annotated[int, Flag("Passes over all problems.", min=1)] = 3
    num_speculative_tokens: Annotated[int, Flag("K of all.", min=1)] = 15
    # fmt: on


def processor_ms(pid: int) -> float:
    """Return the time that a process's threads have run, in ms (Linux)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e6


def below(pid: int) -> set[int]:
    """Return the processes that a process has started, and theirs (Linux)."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        own = {int(child) for child in (task / "children").read_text().split()}
        found |= own.union(*map(below, own))
    return found


async def compare(o: ProcessorTimeOptions) -> None:
    """Measure all modes on all problems, and say each one's processor time per 100 tokens."""
    paths = [FOLDER / file_name(model, o.type) for model in (TARGET, DRAFT)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model, path in zip((TARGET, DRAFT), paths, strict=True):
        convert(model, o.type, path)
    rival, k = Rival(o.server, *paths), o.num_speculative_tokens
    chosen = StackOptions(
        model=str(paths[0]), draft_model=str(paths[1]), heads=f"{BESIDE}={paths[1]}",
        max_sessions=2, max_model_len=1024, threads=1,
    ).on_free_ports()  # fmt: skip
    questions = [problem.question for problem in problems("processor time", o.problems)]
    modes: dict[str, tuple[set[int], Complete]] = {}
    async with AsyncExitStack() as resources:
        stack = await resources.enter_async_context(Stack(chosen))
        client = await resources.enter_async_context(AsyncClient(stack.address))
        ours = below(os.getpid())

        def asked(rule: str, drafter: str, k: int) -> GenerateOptions:
            return GenerateOptions(
                rule=Rule(rule), drafter=drafter, num_speculative_tokens=k, max_tokens=200
            )

        plain = [await client.complete(Chat.of_user(q), asked("exact", "", 0)) for q in questions]
        for drafter in ("model", BESIDE):
            for rule in ("exact", "fly"):
                options = asked(rule, drafter, k)

                async def ask(number: int, options: GenerateOptions = options) -> int:
                    done = await client.complete(Chat.of_user(questions[number]), options)
                    return len(done.token_ids)

                modes[f"flyspec, {rule}, {drafter}"] = ours, ask
        for flash in (True, False):
            before = below(os.getpid())
            setup = Setup(1, flash, k)
            url = resources.enter_context(rival.serving(setup))
            server = await connected(url, calibration_prompts()[0])

            async def answer(number: int, server: object = server) -> int:
                own = plain[number]
                found = await server.complete(own.started.prompt_token_ids, len(own.token_ids))  # type: ignore[attr-defined]
                return int(found.tokens)

            modes[f"llama.cpp, {setup}"] = below(os.getpid()) - before, answer
        found: dict[str, list[float]] = {name: [] for name in modes}
        for repeat in range(1 + o.repeats):
            for name, (processes, complete) in modes.items():
                began = sum(map(processor_ms, processes))
                tokens = sum([await complete(number) for number in range(o.problems)])
                if repeat:  # the first pass warms up
                    found[name].append(100 * (sum(map(processor_ms, processes)) - began) / tokens)
    for name, values in found.items():
        say(f"{name}: {median(values):.1f} ms of processor time per 100 tokens")


@with_flags
def processor_time(options: ProcessorTimeOptions) -> None:
    """Compare the processor time of flyspec and of llama.cpp's own speculative decoding."""
    if not options.server.is_file():
        raise ConfigError(f"--server {options.server}: no such file; build it: make llama-server")
    if options.type not in TYPES:
        raise ConfigError(f"--type {options.type}: must be one of {', '.join(TYPES)}")
    run_async(compare(options))


if __name__ == "__main__":
    run(single(processor_time))

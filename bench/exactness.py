"""`python -m bench.exactness`: texts of `exact` against those of plain decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal

from flyspec.cli.options import with_flags
from flyspec.cli.options.stack import setting
from flyspec.cli.program import run, say, single
from flyspec.cli.runtime import run_async
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import HEAD_DRAFTERS, StackOptions
from flyspec.client import AsyncClient, GenerateOptions
from flyspec.concurrency import all_or_first_error
from flyspec.config import VerifySettings
from flyspec.drafter_names import DRAFTER_KINDS, KINDS_LISTED, NEED_DATASTORE
from flyspec.errors import ConfigError, InvalidArgumentError
from flyspec.flags import Flag
from flyspec.prompts import PromptFiles
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO, SpeculationLength
from flyspec.tables import make_table
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.conditions import parse_ks
from flyspec_lab.bench.options import MaxTokens, SpeedOptions, names_listed
from flyspec_lab.bench.prompts import groups_of
from flyspec_lab.bench.reference import Reference
from flyspec_lab.report import Report, Results
from flyspec_lab.statistics import grouped

CONCURRENCY = 8
DRAFTERS = (*(kind for kind in DRAFTER_KINDS if kind not in NEED_DATASTORE), *HEAD_DRAFTERS)
EXACT = Rule("exact")


# fmt: off
@dataclass(frozen=True)
class ExactnessOptions:
    """The texts to compare, and their reference."""

    prompt_file: PromptFiles = ()
    problems: Annotated[int, Flag("Number of fresh word problems.", min=1)] = 200
    limit: Annotated[int | None, Flag(
        "Maximum problems, and prompts per file (or per category in it), evenly spaced.", min=1,
    )] = None
    dtype: Annotated[Literal["float64", "float32", "bfloat16"], Flag(
        "Data type of both models.",
    )] = "float64"
    tensor_parallel_size: Annotated[int, setting(VerifySettings, "tensor_parallel_size")] = 1
    max_tokens: MaxTokens = 64
    max_model_len: Annotated[int, Flag(
        "Skip prompts that would get longer than this with their output.", min=0,
        default="the model's limit",
    )] = 0
    reference: Annotated[Literal["transformers", "plain"], Flag(
        "What greedy texts must equal: transformers' generate, or plain decoding bit for bit.",
    )] = "transformers"
    ks: Annotated[tuple[SpeculationLength, ...], Flag(
        "Drafted tokens per round: numbers or auto, comma-separated.", name="--k",
        metavar="N|auto,...", listed=True, read=parse_ks,
    )] = (1, 4, 15, AUTO)
    drafters: Annotated[tuple[str, ...], Flag(
        f"Drafters, comma-separated: {KINDS_LISTED}, or heads.",
        name="--drafter", metavar="NAME,...", listed=True, read=names_listed,
    )] = DRAFTERS
    sampled_every: Annotated[int, Flag("Also sample every Nth prompt.", min=1)] = 4
    # fmt: on


@dataclass(frozen=True, slots=True)
class SeededPrompt:
    """A prompt of a group, and its seed."""

    group: str
    prompt: list[int]
    seed: int


async def tokenized(client: AsyncClient, o: ExactnessOptions) -> list[SeededPrompt]:
    """Tokenize the prompts that fit."""
    limit = (await client.list_models()).target.context_length
    only_tokenize = GenerateOptions(max_tokens=1, num_speculative_tokens=0)
    problems, found = min(o.problems, o.limit or o.problems), []
    speed = SpeedOptions(prompt_file=o.prompt_file, problems=problems, limit=o.limit)
    for group in groups_of(speed):
        for index, prompt in enumerate(group.prompts):
            try:
                done = await client.complete(prompt.to_request(), only_tokenize)
                ids = list(done.started.prompt_token_ids)
            except InvalidArgumentError:
                ids = [0] * limit
            if len(ids) + o.max_tokens <= limit:
                found.append(SeededPrompt(group.name, ids, index))
            else:
                say(f"SKIPPED prompt {index} of {group.name}: it is too long")
    return found


async def generate_all(
    client: AsyncClient, asked: Sequence[SeededPrompt], options: GenerateOptions
) -> list[list[int]]:
    """Return the output tokens of every prompt, generating several at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(of: SeededPrompt) -> list[int]:
        async with gate:
            return (await client.complete(of.prompt, replace(options, seed=of.seed))).token_ids

    return await all_or_first_error(map(one, asked))


async def measure(o: ExactnessOptions) -> Report:
    if o.reference == "transformers" and o.dtype != "float64":
        raise ConfigError(
            f"--dtype {o.dtype}: transformers' bits differ from flyspec's; add --reference plain"
        )
    options = StackOptions(
        dtype=o.dtype,
        draft_dtype=o.dtype,
        tensor_parallel_size=o.tensor_parallel_size,
        max_model_len=o.max_model_len,
        log_level="warning",
    )
    plain = GenerateOptions(rule=EXACT, max_tokens=o.max_tokens, num_speculative_tokens=0)
    drawn = replace(plain, sampling=SamplingParams(1.0))
    rows: list[dict[str, Any]] = []
    async with Stack(options) as stack, AsyncClient(stack.address, max_retries=0) as client:
        say(f"reference: {o.reference}, and plain decoding with keyed sampling")
        every = await tokenized(client, o)
        some = every[:: o.sampled_every]
        if o.reference == "transformers":
            reference = Reference(str(stack.options.model), o.dtype, stack.options.threads)
            greedy = [reference.generate(of.prompt, o.max_tokens) for of in every]
        else:
            greedy = await generate_all(client, every, plain)
        kinds = (plain, every, greedy), (drawn, some, await generate_all(client, some, drawn))
        for drafter, k, (how, asked, expected) in product(o.drafters, o.ks, kinds):
            how = replace(how, drafter=drafter, num_speculative_tokens=k)
            found = zip(asked, expected, await generate_all(client, asked, how), strict=True)
            for name, texts in grouped(found, lambda text: text[0].group).items():
                equal = sum(one == other for _, one, other in texts)
                rows.append({
                    "drafter": drafter, "k": k, "temperature": how.sampling.temperature,
                    "group": name, "texts": len(texts), "equal": equal, "wrong": len(texts) - equal,
                })  # fmt: skip
                say(str(rows[-1]))
    count, wrong = (sum(row[figure] for row in rows) for figure in ("texts", "wrong"))
    summary = f"{count} texts in {o.dtype}: {wrong} wrong"
    table = make_table(list(rows[0]), ([*map(str, row.values())] for row in rows), left=4)
    return Report({**vars(o), "rows": rows}, [table, summary], passed=not wrong)


@with_flags
def exactness(options: ExactnessOptions, results: Results) -> None:
    """Check that `exact` gives the texts of plain decoding.

    Greedy texts of the three services are compared with those of transformers' own generate, token
    for token, for each drafter and K: in float64 there are no numerical ties, and every text must
    be equal. Texts sampled at temperature 1 are compared with plain decoding (K = 0) by the same
    services with the same seed.

    With --reference plain all texts are compared with plain decoding: a step whose bits depend on
    no other row gives the same text in any data type.

    The exit code is 1 if a text differs that must not. Prompts that do not fit the context are
    skipped and reported.
    """
    results.of(lambda: run_async(measure(options)))


if __name__ == "__main__":
    run(single(exactness))

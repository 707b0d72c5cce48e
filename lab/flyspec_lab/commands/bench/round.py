"""`flyspec bench round`: the parts of a round's time in the running stack."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flyspec.cli.conditions import Condition, parse_condition
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack_options import StackOptions
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.prompts import PromptFiles, PromptLimit, read_prompts
from flyspec.values.requests import GenerateOptions
from flyspec_lab.bench.conditions import EXACT
from flyspec_lab.bench.options import Chat, Drafter, MaxTokens
from flyspec_lab.report import Report, Results
from flyspec_lab.word_problems import word_problems

if TYPE_CHECKING:
    from flyspec.cli.stack import Stack
    from flyspec.client import AsyncClient


# fmt: off
@dataclass(frozen=True)
class RoundOptions:
    """`flyspec bench round`. K is fixed, so that rounds can be compared."""

    rule: Annotated[Condition, Flag(
        "Acceptance rule, with parameters after a colon.", metavar="RULE", read=parse_condition,
    )] = EXACT
    num_speculative_tokens: Annotated[int, Flag("K: drafted tokens per round.", min=1)] = 8
    drafter: Drafter = ""
    prompt_file: PromptFiles = ()
    limit: PromptLimit = None
    problems: Annotated[int, Flag(
        "Number of fresh word problems, without a prompt file.", min=1,
    )] = 8
    chat: Chat = None
    max_tokens: MaxTokens = 64
# fmt: on


@with_flags
def bench_round(models: ModelFlags, options: RoundOptions, results: Results) -> None:
    """Show the parts of a round's time, one request at a time: models, judging, messages, waiting.

    From the spans that all three services record, which take a little time themselves.
    """
    results.of(lambda: _measure(models, options))


def _measure(models: ModelFlags, o: RoundOptions) -> Report:
    from flyspec.cli.runtime import run_async, with_server
    from flyspec_lab.bench.rounds import parts_table, read_spans, summary, timed_rounds

    prompts = [prompt for file in o.prompt_file for prompt in read_prompts(file, o.limit)]
    prompts = prompts or word_problems(o.problems, 7)
    asked = GenerateOptions(
        rule=o.rule.rule,
        phases=o.rule.phases,
        num_speculative_tokens=o.num_speculative_tokens,
        drafter=o.drafter,
        max_tokens=o.max_tokens,
        seed=0,
    )

    async def use(client: AsyncClient, _: Stack | None) -> None:
        for prompt in prompts:
            await client.complete(prompt.to_request(o.chat), asked)

    with tempfile.TemporaryDirectory(prefix="flyspec-round-") as folder:
        files = {name: Path(folder) / name for name in ("verify", "draft", "orchestrator")}
        flags = {name: ["--traces-file", str(file)] for name, file in files.items()}
        stack = StackOptions(**vars(models), log_level="warning", last_flags=flags)
        run_async(with_server(stack, None, use))
        rounds = timed_rounds(read_spans(files.values()))
    if not rounds:
        raise ConfigError("no round had drafts; raise --max-tokens, or name another --drafter")
    drafts = sum(r.num_drafts for r in rounds) / len(rounds)
    title = f"{o.rule.name}, {len(rounds)} rounds of {drafts:.1f} drafts"
    parts = summary(rounds)
    document = {
        **vars(o),
        "rule": o.rule.name,
        "num_rounds": len(rounds),
        "mean_num_drafts": drafts,
        "parts": parts,
    }
    return Report(document, [parts_table(parts, title)], {"rounds": rounds})

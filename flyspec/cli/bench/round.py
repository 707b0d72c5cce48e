"""`flyspec bench round`: the timeline of a round, compared with bare gRPC echoes."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flyspec.cli.bench.bench_stack import BenchStack
from flyspec.cli.bench.common import result_console
from flyspec.cli.options import ModelFlags, measuring, with_flags
from flyspec.cli.options.stack import to_flags
from flyspec.cli.stack import StackOptions
from flyspec.errors import ConfigError
from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.bench.timeline_run import TracedRun
    from flyspec.values.generation import GenerateOptions

_SERVICES = ("orchestrator", "draft", "verify")


@with_flags
def bench_round(
    models: ModelFlags,
    rule: Annotated[str, Flag("Rule, with parameters as in margin:margin_threshold=0.2.")] = "fly",
    problems: Annotated[int, Flag("Number of fresh word problems.", min=1)] = 6,
    problem_seed: measuring.ProblemSeed = 7,
    drafter: measuring.Drafter = "",
    num_speculative_tokens: measuring.K = 15,
    max_tokens: measuring.MaxTokens = 128,
    repeats: Annotated[int, Flag("Traced runs per prompt.", min=1)] = 5,
    json: measuring.Json = False,
    output: measuring.Output = None,
) -> None:
    """Show where a round's time goes in all three processes: work and waiting."""
    from flyspec.bench.conditions import parse_conditions
    from flyspec.bench.timeline import read_spans, report, round_ends, round_lines
    from flyspec.bench.timeline_run import text_times_ns
    from flyspec.bench.timeline_tables import TIMELINE_NOTES, timeline_summary, timeline_table
    from flyspec.cli.runtime import check_output, print_json, run_async, write_json
    from flyspec.values.generation import GenerateOptions

    check_output(output)
    conditions = parse_conditions(rule)
    if len(conditions) > 1:
        raise ConfigError(f"--rule {rule!r} names {len(conditions)} rules; give one")
    options = GenerateOptions(
        max_tokens=max_tokens,
        drafter=drafter,
        rule=conditions[0].rule,
        num_speculative_tokens=num_speculative_tokens,
    )
    stack = StackOptions(**vars(models), log_level="warning")
    with tempfile.TemporaryDirectory(prefix="flyspec-round-") as folder:
        files = {service: Path(folder) / f"{service}.jsonl" for service in _SERVICES}
        done = run_async(_run(stack, files, options, problems, problem_seed, repeats))
        spans = read_spans(files.values())
    lines = round_lines(spans, done.chunks_ns)
    if not lines:
        raise ConfigError("no round had drafts; raise --max-tokens or choose another --drafter")
    texts = [
        ns
        for trace_id, chunks in done.chunks_ns.items()
        for ns in text_times_ns(chunks, round_ends(spans, trace_id))
    ]
    found = report(lines, done.overheads_ns, done.echoes_ns, done.exchanges_ns, texts)
    document = found.to_document(
        rule=conditions[0].name,
        num_speculative_tokens=num_speculative_tokens,
        echo_bytes=[leg.request_bytes for leg in done.legs],
        echo_work_ms=[leg.work_ns / 1e6 for leg in done.legs],
    )
    samples = {
        "lines_ns": [line.parts_ns for line in lines],
        "overheads_ns": done.overheads_ns,
        "echoes_ns": done.echoes_ns,
        "exchanges_ns": done.exchanges_ns,
    }
    write_json(output, {**document, **samples})
    if json:
        print_json(document)
        return
    console = result_console()
    console.print(timeline_table(found))
    console.print(timeline_summary(found), markup=False)
    console.print(TIMELINE_NOTES, style="dim")


async def _run(
    stack_options: StackOptions,
    files: dict[str, Path],
    options: GenerateOptions,
    problems: int,
    problem_seed: int,
    repeats: int,
) -> TracedRun:
    """Measure with a temporary stack that writes its spans to `files`, and with echoes."""
    from flyspec.bench.exchanges import exchanges
    from flyspec.bench.prompts import fresh_problems, to_request
    from flyspec.bench.timeline_run import count, run
    from flyspec.bench.transport import echoes
    from flyspec.cli.progress import progress_bar
    from flyspec.cli.runtime import error_console, narrate
    from flyspec.client import Client

    prompts = [to_request(p, None) for p in fresh_problems(problems, problem_seed).prompts]
    flags = {service: to_flags(traces_file=file) for service, file in files.items()}
    console = error_console()
    with narrate(console) as say:
        stack = BenchStack(stack_options, flags, on_event=say)
        await stack.__aenter__()
    try:
        async with Client(stack.address) as client, echoes(2) as bare, exchanges() as typed:
            with progress_bar(console) as progress:
                bar = progress.add_task("measuring", total=count(len(prompts), repeats))
                advance = partial(progress.advance, bar)
                return await stack.guard(
                    run(client, bare, typed, prompts, options, repeats, advance)
                )
    finally:
        await stack.stop()

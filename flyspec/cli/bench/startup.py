"""`flyspec bench startup`: `generate --local` to its first token, beside a bare import."""

from __future__ import annotations

import dataclasses

from flyspec.bench.options import StartupOptions
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.options.stack import to_flags
from flyspec.cli.results import BenchReport, Results, notes

_NOTES = (
    "bare import: a new process that imports torch and transformers' Llama\n"
    "generate --local: a new process that starts a stack and prints its first token\n"
    "ratio: median of the ratios of neighbouring runs; CPU: all processes, until their ends"
)


@with_flags
def bench_startup(models: ModelFlags, options: StartupOptions, results: Results) -> None:
    """Measure `generate --local` to its first token, beside a bare import of its libraries."""
    results.of(lambda: _measure(models, options))


def _measure(models: ModelFlags, options: StartupOptions) -> BenchReport:
    from flyspec.bench import startup
    from flyspec.bench.machine import this_machine
    from flyspec.progress import progress
    from flyspec.tables import make_table

    default = ModelFlags()
    given = {name: v for name, v in vars(models).items() if v != getattr(default, name)}
    with progress("starting", options.repeats + 1) as step:
        pairs = startup.measure(to_flags(**given), options.repeats, step)
    found = startup.report(pairs)
    table = make_table(
        ("", "bare import", "generate --local", "ratio"),
        [
            (
                "to the first token",
                f"{found.bare_s:.2f} s", f"{found.first_token_s:.2f} s", f"{found.ratio:.2f}",
            ),
            (
                "CPU",
                f"{found.bare_cpu_s:.2f} s", f"{found.generate_cpu_s:.2f} s",
                f"{found.cpu_ratio:.2f}",
            ),
        ],
        f"{found.runs} runs of each, in turn",
    )  # fmt: skip
    return BenchReport(
        {**vars(options), **vars(found), "models": given, "machine": this_machine()},
        [table, notes(_NOTES)],
        {"runs": [[dataclasses.asdict(start) for start in pair] for pair in pairs]},
    )

"""`flyspec bench startup`: `generate --local` to its first token, beside a bare import."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.options.stack import to_flags
from flyspec.concurrency import whatever_reached
from flyspec_lab.bench.options import StartupOptions
from flyspec_lab.report import Report, Results

if TYPE_CHECKING:
    from flyspec_lab.bench import startup

_NOTES = (
    "bare import: a new process that imports torch and transformers' Llama\n"
    "generate --local: a new process that starts a stack and prints its first token\n"
    "ratio: median of the ratios of neighbouring runs; CPU: all processes, until their ends"
)


@with_flags
def bench_startup(models: ModelFlags, options: StartupOptions, results: Results) -> None:
    """Measure `generate --local` to its first token, beside a bare import of its libraries."""
    results.of(lambda: _measure(models, options))


def _measure(models: ModelFlags, options: StartupOptions) -> Report:
    from flyspec.progress import progress
    from flyspec_lab.bench import startup

    default = ModelFlags()
    given = {name: v for name, v in vars(models).items() if v != getattr(default, name)}

    def measure() -> list[startup.Pair]:
        with progress("starting", options.repeats + 1) as step:
            return startup.measure(to_flags(**given), options.repeats, step)

    return whatever_reached(
        measure, lambda pairs: _report(pairs, {**vars(options), "models": given})
    )


def _report(pairs: list[startup.Pair], document: dict[str, Any]) -> Report:
    from flyspec.tables import make_table
    from flyspec_lab.bench import startup
    from flyspec_lab.bench.machine import this_machine

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
    return Report(
        {**document, **vars(found), "machine": this_machine()},
        [table, _NOTES],
        {"runs": [[dataclasses.asdict(start) for start in pair] for pair in pairs]},
    )

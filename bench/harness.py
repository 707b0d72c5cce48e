"""What rules keep of a target's answers, by lm-evaluation-harness: `make bench-harness`.

The harness is an independent judge: it asks a running stack through the HTTP API, unchanged, as
`local-completions`, where the model `target:RULE` is the target under a rule.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from flyspec import bundled
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.cli.runtime import run_async
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.errors import FlyspecError
from flyspec.flags import Flag
from flyspec.progress import progress
from flyspec.tables import table_of
from flyspec.word_problems import problems as word_problems
from flyspec_lab.bench.options import Problems, ProblemSeed
from flyspec_lab.report import Report, Results
from flyspec_lab.statistics import mcnemar_p

TASKS = Path(__file__).parent / "harness_tasks"
TASK = "word_problems_solve"
FILTER = "exact_match,answer"


# fmt: off
@dataclass(frozen=True)
class HarnessOptions:
    """What to ask. The first rule is the baseline; `exact` gives what plain decoding gives."""

    problems: Problems = 1000
    problem_seed: ProblemSeed = 7
    rules: Annotated[tuple[str, ...], Flag(
        "Presets, comma-separated; the first is the baseline.", metavar="RULE,...", listed=True,
        read=lambda text: tuple(text.split(",")),
    )] = ("exact", "relaxed", "kl", "fly", "margin", "fuzzy")
    num_speculative_tokens: Annotated[int, Flag("K of all rules.", min=1)] = 15
    harness: Annotated[Path, Flag("The harness's program.")] = Path(
        "build/http-clients/venv/bin/lm-eval"
    )
# fmt: on


@dataclass(frozen=True)
class HarnessRow:
    """A rule's figures. `accuracy` and `stderr` are the harness's own; the rest is paired.

    `won` and `lost`: problems that only this rule, or only the baseline, answered correctly.
    """

    rule: str
    accuracy: float
    stderr: float
    recovery: float
    won: int
    lost: int
    mcnemar_p: float


@dataclass(frozen=True)
class HarnessRun:
    """One run of the harness: its results for the task, and whether each problem was solved."""

    results: dict[str, Any]
    solved: Sequence[bool]


async def judge(o: HarnessOptions, url: str, rule: str, problems: Path, folder: Path) -> HarnessRun:
    """Run the harness once. Raises `FlyspecError` with its last words if it fails."""
    command = [
        o.harness.resolve(), "run", "--model", "local-completions",
        "--model_args", f"model=target:{rule}", f"base_url={url}/v1/completions",
        f"tokenizer={bundled.TARGET.resolve()}", "tokenizer_backend=huggingface",
        "num_concurrent=8", "max_length=4096",
        "--tasks", TASK, "--include_path", TASKS, "--metadata", json.dumps({"path": str(problems)}),
        "--apply_chat_template", "--log_samples", "--output_path", folder,
    ]  # fmt: skip
    running = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await running.communicate()
    if running.returncode:
        raise FlyspecError(f"{o.harness} failed with {rule}:\n{said.decode()[-2000:]}")
    return read_results(folder)


def read_results(folder: Path) -> HarnessRun:
    """Read what the harness wrote."""
    (results,) = folder.rglob("results_*.json")
    (samples,) = folder.rglob("samples_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    found = json.loads(results.read_text())["results"][TASK]
    return HarnessRun(found, [bool(row["exact_match"]) for row in rows])


def row_of(rule: str, judged: HarnessRun, baseline: HarnessRun) -> HarnessRow:
    """Compare a rule with the baseline, problem by problem."""
    pairs = list(zip(judged.solved, baseline.solved, strict=True))
    won, lost = pairs.count((True, False)), pairs.count((False, True))
    accuracy, most = judged.results[FILTER], baseline.results[FILTER]
    return HarnessRow(
        rule=rule,
        accuracy=accuracy,
        stderr=judged.results[FILTER.replace(",", "_stderr,")],
        recovery=accuracy / most if most else 0.0,
        won=won,
        lost=lost,
        mcnemar_p=mcnemar_p(won, lost),
    )


async def measure(o: HarnessOptions) -> Report:
    options = StackOptions(
        http_port=0, log_level="warning", num_speculative_tokens=o.num_speculative_tokens
    )
    judged: dict[str, HarnessRun] = {}
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder) / "problems.jsonl"
        lines = [
            json.dumps({"question": p.question, "answer": p.solution})
            for p in word_problems(o.problem_seed, o.problems)
        ]
        problems.write_text("\n".join(lines) + "\n")
        async with Stack(options) as stack:
            assert stack.http_url is not None
            with progress("judging", len(o.rules)) as advance:
                for rule in o.rules:
                    judged[rule] = await judge(
                        o, stack.http_url, rule, problems, Path(folder) / rule
                    )
                    advance()
    baseline = judged[o.rules[0]]
    rows = [row_of(rule, found, baseline) for rule, found in judged.items()]
    table = table_of(
        [
            {
                "rule": row.rule,
                "accuracy": f"{row.accuracy:.1%}",
                "± stderr": f"{row.stderr:.1%}",
                "recovery": f"{row.recovery:.1%}",
                "won": row.won,
                "lost": row.lost,
                "McNemar p": f"{row.mcnemar_p:.3f}",
            }
            for row in rows
        ]
    )
    return Report({**vars(o), "rows": rows}, [table])


@with_flags
def main(options: HarnessOptions, results: Results) -> None:
    """Measure what rules keep of the answers, with lm-evaluation-harness."""
    results.of(lambda: run_async(measure(options)))


if __name__ == "__main__":
    run(single(main))

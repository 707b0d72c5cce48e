"""`python -m bench.out_of_domain`: trained heads and judges against rules that need no training.

Each judge has a stack of its own, the first one with all heads and other drafters; speed is
relative to plain decoding on the same stack. Requests come one at a time, and the methods of each
prompt in a drawn order (`flyspec_lab.run`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from bench.library_datastore import library_datastore
from bench.out_of_domain.figures import (
    ComparedMethod,
    Kept,
    SetFigures,
    beyond_all,
    findings,
    keeping,
)
from bench.prompt_sets import PYTHON, WORD_PROBLEMS, NamedPromptFiles, files_by_set
from flyspec import bundled
from flyspec.cli.conditions import Condition
from flyspec.cli.options import with_flags
from flyspec.cli.program import needing, run, single
from flyspec.cli.runtime import run_async, with_server
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient, Models
from flyspec.concurrency import interrupted
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.rules import Rule
from flyspec.tables import Column, FittedTable, make_table, record_table
from flyspec_lab import compare
from flyspec_lab.answered import COLUMNS, Answered
from flyspec_lab.arms import Arm, make_arms
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.machine import this_machine
from flyspec_lab.bench.options import Chat, MaxTokens, ProblemSeed
from flyspec_lab.bench.summaries import grouped
from flyspec_lab.commands.bench.common import models_of
from flyspec_lab.evaluation import settings_of
from flyspec_lab.options import EvalOptions
from flyspec_lab.problems import PromptFile, TaskProblems
from flyspec_lab.report import Report, Results, markdown, write_into
from flyspec_lab.run import ServedModel, make_samples, wanted_samples
from flyspec_lab.run_directory import open_run
from flyspec_lab.statistics import Interval
from flyspec_lab.tasks.python_code import PythonCode
from flyspec_lab.tasks.word_problems import WordProblems

IN_DOMAIN = (WORD_PROBLEMS, PYTHON)
"""What the bundled models, and heads and judges without --trained-on, have learned."""
FLY, AUTOJUDGE = "fly", "autojudge"
RECYCLED_FLY = "fly, token_recycling"
"""FLy without anything trained: even the draft model of `FLY` has its domain."""
BUNDLED = "bundled"
PART = "out-of-domain"
"""The part of a document that the tables replace."""

NamedPaths = Sequence[tuple[str, str]]


def read_paths(texts: Sequence[str]) -> NamedPaths:
    """Parse NAME=PATH texts. Raises `ValueError`."""
    found: list[tuple[str, str]] = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in dict(found):
            raise ValueError(f"{text!r}: must be NAME=PATH, each name once")
        found.append((name, path))
    return tuple(found)


def read_temperatures(text: str) -> tuple[float, ...]:
    """Parse comma-separated numbers. Raises `ValueError`."""
    try:
        found = tuple(dict.fromkeys(float(piece) for piece in text.split(",")))
    except ValueError:
        found = (-1.0,)
    if min(found) < 0.0:
        raise ValueError(f"{text!r}: must be numbers from 0, comma-separated")
    return found


# fmt: off
@dataclass(frozen=True)
class DomainOptions:
    """What to compare, and on what."""

    head: Annotated[NamedPaths, Flag(
        "An EAGLE-3 head of the target: its name and directory; repeatable.", metavar="NAME=DIR",
        read=read_paths, default="the one that comes with the bundled pair",
    )] = ()
    autojudge: Annotated[NamedPaths, Flag(
        "A judge of the pair: its name and file; repeatable.", metavar="NAME=FILE",
        read=read_paths, default="the one that comes with the bundled pair",
    )] = ()
    trained_on: Annotated[NamedPaths, Flag(
        f"What a head or judge was trained on, if not on {' and '.join(IN_DOMAIN)}: sets, "
        "comma-separated; repeatable.", metavar="NAME=SET,...", read=read_paths, default="none",
    )] = ()
    prompt_file: NamedPromptFiles = ()
    limit: Annotated[int, Flag("Maximum prompts of each set.", min=2)] = 10
    problem_seed: ProblemSeed = 7
    temperatures: Annotated[tuple[float, ...], Flag(
        "Sampling temperatures, comma-separated.", metavar="T,...", listed=True,
        name="--temperature", read=read_temperatures,
    )] = (0.0, 1.0)
    num_speculative_tokens: Annotated[int, Flag("K of all methods but heads.", min=1)] = 15
    head_tokens: Annotated[int, Flag("K of heads.", min=1)] = 5
    max_tokens: MaxTokens = 128
    chat: Chat = None
    datastore: Annotated[str | None, Flag(
        "Datastore of the drafter rest.", default="the Python standard library, built once",
    )] = None
    document: Annotated[Path | None, Flag(
        f"Document to write the tables into, between <!-- {PART} --> and <!-- /{PART} -->.",
    )] = None

    @property
    def heads(self) -> NamedPaths:
        own = ((BUNDLED, str(bundled.EAGLE3)),) if bundled.EAGLE3.is_dir() else ()
        return self.head or own

    @property
    def judges(self) -> NamedPaths:
        return self.autojudge or ((BUNDLED, str(bundled.AUTOJUDGE)),)

    def domain(self, name: str) -> Sequence[str]:
        return tuple(dict(self.trained_on).get(name, ",".join(IN_DOMAIN)).split(","))
# fmt: on


@with_flags
def out_of_domain(options: DomainOptions, results: Results) -> None:
    """Compare trained parts with FLy on what they were trained on, and on other sets.

    EAGLE-3 heads and Token Recycling and REST draft for the rule exact; FLy and trained judges
    accept drafts of the bundled draft model. Prompts of word_problems and python (files held out
    from training) are always there; those of --prompt-file are of nobody's domain.
    """
    with needing("this comparison", "models"):
        import pyarrow  # noqa: F401
    sets = tasks_of(options)
    check(options, [task.name for task in sets])
    results.of(lambda: run_async(_compare(options, sets)))


def tasks_of(o: DomainOptions) -> list[TaskProblems]:
    """Return the sets with their prompts. Raises `ConfigError`."""
    own = {
        WORD_PROBLEMS: WordProblems(limit=o.limit, seed=o.problem_seed),
        PYTHON: PythonCode(limit=o.limit, seed=o.problem_seed),
    }
    found = [TaskProblems(name, task, task.problems()) for name, task in own.items()]
    for name, files in files_by_set(o.prompt_file).items():
        each = max(1, o.limit // len(files))
        parts = [PromptFile(file, chat=o.chat, limit=each) for file in files]
        problems = [
            replace(problem, prompt_id=f"{Path(str(part.path)).name} {problem.prompt_id}")
            for part in parts
            for problem in part.problems()
        ]
        found.append(TaskProblems(name, parts[0], problems))
    return found


def check(o: DomainOptions, sets: Sequence[str]) -> None:
    """Raise `ConfigError` for names that nothing has, before anything is measured."""
    names = [name for name, _ in (*o.heads, *o.judges)]
    for name, _ in o.trained_on:
        if name not in names:
            raise ConfigError(f"--trained-on {name}: no --head or --autojudge has this name")
        if unknown := [each for each in o.domain(name) if each not in sets]:
            raise ConfigError(
                f"--trained-on {name}: there is no set {unknown[0]!r}; there are {', '.join(sets)}"
            )
    if not beyond_all(methods_of(o), sets):
        raise ConfigError("--prompt-file: give a set that is in nobody's domain")
    if o.document is not None:
        write_into(o.document, {PART: None})


def methods_of(o: DomainOptions, judges: NamedPaths | None = None) -> list[ComparedMethod]:
    """Return the methods in the order of the tables; with `judges` only what these bring."""
    k = o.num_speculative_tokens
    plain = [
        ComparedMethod("exact", "exact", "model", k, False, IN_DOMAIN),
        ComparedMethod(FLY, FLY, "model", k, False, IN_DOMAIN),
        ComparedMethod("token_recycling", "exact", "token_recycling", k, False, IN_DOMAIN),
        ComparedMethod(RECYCLED_FLY, FLY, "token_recycling", k, False, IN_DOMAIN),
        ComparedMethod("rest", "exact", "rest", k, False, IN_DOMAIN),
        *(
            ComparedMethod(f"eagle3 {name}", "exact", name, o.head_tokens, True, o.domain(name))
            for name, _ in o.heads
        ),
    ]
    of_judges = [
        ComparedMethod(f"{AUTOJUDGE} {name}", AUTOJUDGE, "model", k, True, o.domain(name))
        for name, _ in (o.judges if judges is None else judges)
    ]
    return [*plain, *of_judges] if judges is None else of_judges


async def _compare(o: DomainOptions, sets: Sequence[TaskProblems]) -> Report:
    found: list[SetFigures] = []
    methods = methods_of(o)
    models: Mapping[str, object] = {}
    others = [m for m in methods if m.rule != AUTOJUDGE]
    for index, judge in enumerate(o.judges):
        own = methods_of(o, [judge])
        stack = stack_of(o, judge, first=index == 0)
        part = _Part(o, sets, [*others, *own] if index == 0 else own)
        figures, models = await with_server(stack, None, part.measure)
        found += figures
        if interrupted():
            break
    measured = {f.method for f in found}
    methods = [m for m in methods if m.name in measured]
    kept = keeping(methods, found)
    shown = tables(methods, found, kept)
    if o.document is not None and not interrupted():
        write_into(o.document, {PART: markdown(shown)})
    claims = [*findings(kept, FLY), *findings(kept, RECYCLED_FLY)]
    return Report(
        {
            **vars(o), **models, "kind": "out of domain",
            "command": ["python -m bench.out_of_domain", *sys.argv[1:]],
            "machine": this_machine(), "methods": methods, "figures": found, "kept": kept,
            "findings": claims,
        },
        [*shown, *claims, explained(o)],
    )  # fmt: skip


def stack_of(o: DomainOptions, judge: tuple[str, str], first: bool) -> StackOptions:
    """Return a stack with a judge; the first one has the heads and the datastore as well."""
    stack = StackOptions(log_level="warning", autojudge_file=judge[1])
    if not first:
        return replace(stack, heads="")
    datastore = o.datastore or str(library_datastore(str(stack.resolved().model)))
    heads = " ".join(f"{name}={Path(path).resolve()}" for name, path in o.heads)
    return replace(stack, heads=heads, datastore=datastore)


class _Part:
    """What is measured on one stack."""

    def __init__(
        self, o: DomainOptions, sets: Sequence[TaskProblems], methods: Sequence[ComparedMethod]
    ) -> None:
        self._o, self._sets, self._methods = o, sets, methods

    async def measure(
        self, client: AsyncClient, stack: Stack | None
    ) -> tuple[list[SetFigures], Mapping[str, object]]:
        served = await client.list_models()
        target = ServedModel(client, served.target)
        found: list[SetFigures] = []
        for temperature in self._o.temperatures:
            options = EvalOptions(
                temperature=temperature, max_tokens=self._o.max_tokens, concurrency=1
            )
            arms = arms_of(self._methods, served)
            found += [
                SetFigures.of(report, temperature)
                for reports in (await _reports(options, self._sets, arms, target)).values()
                for report in reports
                if report.condition != PLAIN
            ]
            if interrupted():
                break
        return found, models_of(served.target, stack)


def arms_of(methods: Sequence[ComparedMethod], served: Models) -> list[Arm]:
    """Return plain decoding, and each method. Raises `ConfigError` for what the stack lacks."""
    arms: list[Arm] = []
    for method in methods:
        if method.drafter not in served.drafters:
            raise ConfigError(f"{method.name}: the stack has no drafter {method.drafter!r}")
        condition = Condition(method.name, Rule(method.rule), method.num_speculative_tokens)
        plain, own = make_arms([condition], (), 0, method.drafter, served.rules)
        arms = [*(arms or [plain]), own]
    return arms


async def _reports(
    o: EvalOptions, sets: Sequence[TaskProblems], arms: Sequence[Arm], target: ServedModel
) -> dict[str, list[compare.ConditionReport]]:
    wanted = wanted_samples(o, sets, arms, target.model, None)
    with open_run(None, settings_of(o, sets, {"target": target}, {})) as kept:
        progressed = await make_samples(o, wanted, target, None, kept.samples)
        if progressed.failed:
            raise ConfigError(f"{progressed.failed} requests failed: {progressed.first_error}")
        rows = kept.samples.read(COLUMNS).to_pylist()
    return {task.name: compare.report(Answered(task.name, arms, wanted, rows)) for task in sets}


def tables(
    methods: Sequence[ComparedMethod], found: Sequence[SetFigures], kept: Sequence[Kept]
) -> list[FittedTable]:
    """Return for each temperature the sets that something was trained on, the others, the rest."""
    shown = []
    sets = list(dict.fromkeys(f.set for f in found))
    beyond = beyond_all(methods, sets)
    for temperature, of in grouped(found, lambda f: f.temperature).items():
        for title, names in (
            ("Trained on", [name for name in sets if name not in beyond]),
            ("Out of domain", beyond),
        ):
            shown.append(_layout(f"{title}, temperature {temperature:g}", methods, of, names))
    shown.append(record_table(_KEPT, kept, "What is kept out of domain", left=2))
    quality = [f for f in found if f.recovery is not None]
    if quality:
        shown.append(_recovery(methods, quality))
    return shown


def _layout(
    title: str, methods: Sequence[ComparedMethod], found: Sequence[SetFigures], sets: Sequence[str]
) -> FittedTable:
    """Return a table like the paper's: speed and τ of each set, then their means."""
    at = {(f.method, f.set): f for f in found}
    rows = []
    for method in methods:
        of = [at[method.name, name] for name in sets]
        speeds = [f.speedup.value for f in of if f.speedup is not None]
        mean = f"{sum(speeds) / len(speeds):.2f} / {sum(f.tau for f in of) / len(of):.2f}"
        cells = [f"{_value(f.speedup, '.2f')} / {f.tau:.2f}" for f in of]
        rows.append([method.name, *cells, mean])
    return make_table(["speed / τ", *sets, "mean"], rows, title)


def _recovery(methods: Sequence[ComparedMethod], found: Sequence[SetFigures]) -> FittedTable:
    cells = grouped(found, lambda f: (f.set, f.temperature))
    columns = [f"{name}, T {temperature:g}" for name, temperature in cells]
    rows = [
        [
            method.name,
            *(
                _value(next(f.recovery for f in of if f.method == method.name), ".0%")
                for of in cells.values()
            ),
        ]
        for method in methods
    ]
    return make_table(["right answers to plain's", *columns], rows, "Recovery")


def _value(interval: Interval | None, form: str) -> str:
    return "-" if interval is None else f"{interval.value:{form}}"


_KEPT: tuple[Column, ...] = (
    ("method", "{.method}"),
    ("trained", lambda k: "yes" if k.trained else "no"),
    ("T", "{.temperature:g}"),
    ("τ in domain", "{.within:.2f}"),
    ("τ out", "{.beyond:.2f}"),
    ("kept", "{.kept:.0%}"),
    ("drafts kept", "{.drafts_kept:.0%}"),
    ("x exact in", "{.gain_within:.2f}"),
    ("x exact out", "{.gain_beyond:.2f}"),
    ("nats in", "{.nats_within:.3f}"),
    ("nats out", "{.nats_beyond:.3f}"),
)


def explained(o: DomainOptions) -> str:
    return (
        "speed: tokens per second of a request relative to plain decoding on the same stack; "
        f"τ: tokens per round. K {o.num_speculative_tokens}, of heads {o.head_tokens}. Kept: mean "
        "τ of the sets in nobody's domain to that of a method's own domain (of untrained methods "
        f"{' and '.join(IN_DOMAIN)}); drafts kept: the same of τ - 1; x "
        "exact: mean τ to that of exact with the same drafts; nats: what loose tokens cost per "
        "token, log p(target's own token) - log p(token). "
        f"{o.limit} prompts of each set; for narrower intervals raise --limit."
    )


if __name__ == "__main__":
    run(single(out_of_domain))

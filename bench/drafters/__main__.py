"""`python -m bench.drafters`: every drafter of a stack on sets of prompts, in one run.

The rule is exact, greedy, so that all texts are plain decoding's. Modes take turns prompt by
prompt (`flyspec_lab.bench.speed`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from bench.drafters.figures import (
    WITHIN,
    ComposedCheck,
    DrafterFigures,
    composed_checks,
    figures,
    plain_step_ms,
)
from bench.drafters.retrieval import RetrievalFigures, along
from bench.library_datastore import library_datastore
from bench.prompt_sets import WORD_PROBLEMS, NamedPromptFiles, file_group, files_by_set
from draft_service.drafters.sources import DatastoreSource, LookupSource
from flyspec import bundled
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.program import run, say, single
from flyspec.cli.runtime import run_async, with_server
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient
from flyspec.datastore.store import Datastore
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.speculation_length import AUTO, SpeculationLength
from flyspec.tables import Column, FittedTable, make_table, record_table
from flyspec_lab.bench.conditions import EXACT, PLAIN, parse_ks
from flyspec_lab.bench.machine import this_machine
from flyspec_lab.bench.modes import Item, Noise, Sample
from flyspec_lab.bench.options import Chat, MaxTokens, ProblemSeed, SpeedOptions, names_listed
from flyspec_lab.bench.prompts import Group, fresh_problems
from flyspec_lab.bench.speed import flyspec_modes, measure, read_items
from flyspec_lab.bench.summaries import grouped
from flyspec_lab.commands.added_drafters import Drafts, with_added_drafters
from flyspec_lab.commands.bench.common import models_of
from flyspec_lab.report import Report, Results, markdown, write_into

BYTES = "bytes"
"""The drafter that is the byte-level draft model, whose tokens are translated."""
SLOTS = 2
"""Sessions of each service: so few are soon filled with noise between measurements."""
PART = "drafters"
"""The part of a document that the tables replace."""


# fmt: off
@dataclass(frozen=True)
class DraftersOptions:
    """What to draft, and how long to measure."""

    prompt_file: NamedPromptFiles = ()
    problems: Annotated[int, Flag("Number of fresh word problems.", min=0)] = 8
    problem_seed: ProblemSeed = 7
    limit: Annotated[int, Flag("Maximum prompts of each set, evenly spaced.", min=1)] = 6
    drafters: Annotated[tuple[str, ...], Flag(
        "Drafters, comma-separated.", name="--drafter", metavar="NAME,...", listed=True,
        default="all that there are", read=names_listed,
    )] = ("",)
    num_speculative_tokens: Annotated[tuple[SpeculationLength, ...], Flag(
        "K: maximum drafted tokens per round, or auto; several are compared.",
        metavar="N|auto,...", listed=True, read=parse_ks,
    )] = (AUTO, 5, 15)
    max_tokens: MaxTokens = 128
    repeats: Annotated[int, Flag("Runs per prompt and mode.", min=1)] = 3
    chat: Chat = None
    document: Annotated[Path | None, Flag(
        f"Document to write the tables into, between <!-- {PART} --> and <!-- /{PART} -->.",
    )] = None
# fmt: on


@with_flags
def drafters(
    models: ModelFlags, options: DraftersOptions, results: Results, draft: Drafts = ()
) -> None:
    """Compare all drafters with the rule exact: tokens per round, step costs, speed.

    Without --datastore, that of the drafter rest is the Python standard library. With the bundled
    pair, its byte-level draft model is a drafter as well.
    """
    stack_options = StackOptions(**vars(models), log_level="warning", max_sessions=SLOTS)
    target = str(stack_options.resolved().model)
    datastore = Path(stack_options.datastore or library_datastore(target))
    if models.model is None:
        draft = [*draft, (BYTES, str(bundled.DRAFT_BYTES))]
    sets = prompt_groups(options)
    if options.document is not None:
        write_into(options.document, {PART: None})

    async def use(client: AsyncClient, stack: Stack | None) -> Report:
        assert stack is not None
        work = _measure(options, sets, client, stack, [name for name, _ in draft], datastore)
        return await with_added_drafters(stack, draft, work)

    with_datastore = replace(stack_options, datastore=str(datastore))
    results.of(lambda: run_async(with_server(with_datastore, None, use)))


def prompt_groups(o: DraftersOptions) -> list[Group]:
    """Return the sets. Raises `ConfigError` if there is none."""
    own = [Group(WORD_PROBLEMS, fresh_problems(o.problems, o.problem_seed).prompts)]
    found = own if o.problems else []
    found += [
        file_group(name, files, o.limit) for name, files in files_by_set(o.prompt_file).items()
    ]
    if not found:
        raise ConfigError("--problems 0: then give a --prompt-file")
    return found


async def _measure(
    o: DraftersOptions,
    sets: Sequence[Group],
    client: AsyncClient,
    stack: Stack,
    added: Sequence[str],
    datastore: Path,
) -> Report:
    served = await client.list_models()
    known = list(dict.fromkeys([*served.drafters, *added]))
    chosen = tuple(filter(None, o.drafters)) or tuple(known)
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(f"--drafter {unknown[0]}: must be one of {', '.join(known)}")
    speed = SpeedOptions(
        rules=(EXACT,),
        drafters=chosen,
        num_speculative_tokens=o.num_speculative_tokens,
        max_tokens=o.max_tokens,
        chat=o.chat,
    )
    modes = flyspec_modes(client, speed)
    items = await read_items(client, sets, speed)
    # Each draft model has a cache of its own.
    noise = Noise(client, served.target.vocab_size, SLOTS, ("", *added))
    say(f"{sum(map(len, items))} prompts in {len(modes)} modes on {served.target.name}")
    for mode in modes:  # what the first use compiles or learns
        await mode.run(items[0][0])
    samples = await measure(modes, items, o.repeats, noise)
    where = {group.name: [Path(p.where).name for p in group.prompts] for group in sets}
    found = figures(modes, samples, where)
    checks = composed_checks(modes, samples)
    retrieved = retrieval(items, samples, Datastore(datastore), o)
    steps = plain_step_ms(samples)
    shown = [figure_table(found), composed_table(checks), retrieval_table(retrieved)]
    if o.document is not None:
        write_into(o.document, {PART: markdown(shown)})
    return Report(
        {
            **vars(o), **models_of(served.target, stack), "kind": "drafters",
            "command": ["python -m bench.drafters", *sys.argv[1:]], "machine": this_machine(),
            "datastore": str(datastore), "figures": found, "composed": checks,
            "retrieval": retrieved, "plain_step_ms": steps,
        },
        [*shown, explained(o, steps)],
        {"samples": samples},
    )  # fmt: skip


def retrieval(
    items: Sequence[Sequence[Item]],
    samples: Sequence[Sample],
    datastore: Datastore,
    o: DraftersOptions,
) -> list[RetrievalFigures]:
    """Return what prompt lookup and the datastore find along plain decoding's texts."""
    texts = {(s.group, s.prompt): s.token_ids for s in samples if s.mode == PLAIN}
    longest = max([k for k in o.num_speculative_tokens if isinstance(k, int)], default=15)
    return [
        along(
            of[0].group,
            [(i.prompt_token_ids, texts[i.group, i.index], make()) for i in of],
            longest,
        )
        for of in items
        for make in (LookupSource, lambda: DatastoreSource(datastore))
    ]


def figure_table(found: Sequence[DrafterFigures]) -> FittedTable:
    """Return a row for each set and drafter; step times are those of the largest K."""
    rows = []
    for (name, drafter), of in grouped(found, lambda f: (f.set, f.drafter)).items():
        last = of[-1]
        rows.append(
            [name, drafter]
            + [f"{f.tokens_per_round:.2f} / {f.ratio.median:.2f} ({f.ratio.worst:.2f})" for f in of]
            + [_ms(last.draft_ms), _ms(last.target_ms), _ms(last.other_ms)]
            + [" ".join(dict.fromkeys(f"{f.same}/{f.prompts}" for f in of))]
        )
    ks = dict.fromkeys(f"K {f.num_speculative_tokens}" for f in found)
    columns = ["set", "drafter", *ks, "draft ms", "target ms", "other ms", "same"]
    return make_table(columns, rows, "Tokens per round / speed to plain (worst prompt)", left=2)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


_COMPOSED: tuple[Column, ...] = (
    ("set", "{.set}"),
    ("K", "{.num_speculative_tokens}"),
    ("best part", "{.best}"),
    ("composed to it", "{.ratio.median:.2f}"),
    ("95 %", "{0.ratio.low:.2f}-{0.ratio.high:.2f}"),
    ("tok/round", "{.tokens_per_round:.2f}"),
    ("of the part", "{.best_tokens_per_round:.2f}"),
    (f"within {WITHIN:.0%}", lambda c: "yes" if c.holds else "no"),
)
_RETRIEVAL: tuple[Column, ...] = (
    ("set", "{.set}"),
    ("source", "{.source}"),
    ("places", "{.places}"),
    ("found", "{.found:.0%}"),
    ("match", "{.match:.1f}"),
    ("first right", "{.first:.0%}"),
    ("right", "{.right:.2f}"),
    ("tok/place", "{.tokens_per_place:.2f}"),
    ("µs", "{.guess_us:.0f}"),
)


def composed_table(checks: Sequence[ComposedCheck]) -> FittedTable:
    return record_table(
        _COMPOSED, checks, "The composed drafter and the fastest of its parts, tokens/s", left=3
    )


def retrieval_table(found: Sequence[RetrievalFigures]) -> FittedTable:
    return record_table(
        _RETRIEVAL, found, "What retrieval finds along plain decoding's texts", left=2
    )


def explained(o: DraftersOptions, steps: dict[str, Any]) -> str:
    shown = ", ".join(f"{name} {ms:.2f}" for name, ms in steps.items() if ms is not None)
    return (
        "tokens per round: the target's own token included; speed: tokens per second relative to "
        "plain decoding, median over prompts of ratios within a repeat; draft, target, other: ms "
        "per proposal in the draft model or head, per target step, and per round besides (messages "
        f"and retrieval), at the last K; same: texts equal to plain decoding's. A step of plain "
        f"decoding: {shown} ms. Retrieval: found: places with a guess; match: tokens that led to "
        "it; right: tokens of a guess that were right in a row; tok/place: 1 + right tokens over "
        f"all places. {o.problems} problems, up to {o.limit} prompts of each file, {o.repeats} "
        "repeats; for narrower intervals raise --problems, --limit and --repeats."
    )


if __name__ == "__main__":
    run(single(drafters))

"""`python -m bench.trees`: what trees of drafts would win over the best chain, without serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bench.exactness import SETS, Data
from bench.trees.gains import ArmResult, Gain, gains, results
from bench.trees.study import MeasuredPair, SetStudy, read_texts
from flyspec.bench.options import MaxTokens, ProblemSeed, Threads, names_of, numbers_flag
from flyspec.bench.prompts import Group, fresh_problems, groups
from flyspec.bundled import DRAFT, TARGET
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, say, single
from flyspec.cli.results import BenchReport, Results, notes
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.ranges import Range
from flyspec.tables import FittedTable, make_table, record_table

SHOWN_TEXTS = 1
"""Texts shown of those on which a tree gains least, and most."""


# fmt: off
@dataclass(frozen=True)
class TreesOptions:
    """Which texts to draft, and with what."""

    model: Annotated[str, Flag("Target: a directory.", default="the bundled target")] = str(TARGET)
    draft_model: Annotated[str, Flag(
        "Draft model: a directory.", default="the bundled draft model",
    )] = str(DRAFT)
    data: Data = Path("../shared/data")
    sets: Annotated[tuple[str, ...], Flag(
        f"Sets of prompts, comma-separated: {', '.join(SETS)}.", metavar="SET,...", listed=True,
        read=names_of(SETS),
    )] = ("problems", "humaneval", "gsm8k", "spec_bench")
    problem_seed: ProblemSeed = 7
    limit: Annotated[int, Flag("Maximum prompts per set.", min=1)] = 60
    max_tokens: MaxTokens = 96
    rows: Annotated[tuple[int, ...], numbers_flag(
        "Rows that the target verifies per round, its own last token included", least=2,
    )] = (4, 8, 16, 32)
    rest_ms: Annotated[float, Flag(
        "Time of a round besides the steps of target and draft model, ms. Results at 0 are shown "
        "too.", Range(0.0, 1000.0),
    )] = 3.0
    threads: Threads = 0
    # fmt: on


def set_groups(o: TreesOptions, name: str) -> list[Group]:
    """Return a set's prompts, by category if it has any; none if its file is missing."""
    file, _ = SETS[name]
    path = o.data / file
    if name == "problems":
        return [fresh_problems(o.limit, o.problem_seed)]
    if not path.exists():
        say(f"SKIPPED {name}: {path} does not exist")
        return []
    found = groups([str(path)], 0, o.problem_seed, None)
    return groups([str(path)], 0, o.problem_seed, max(1, o.limit // len(found)))


def arm_tables(rows: list[ArmResult], rest_ms: float) -> Iterator[FittedTable]:
    """Yield tokens per round, and per time, of every method by its number of rows."""
    measures: list[tuple[str, Callable[[ArmResult], float]]] = [
        ("Tokens per round", lambda row: row.tokens_per_round),
        ("Tokens per ms, rest 0 ms", lambda row: row.tokens_per_ms[0]),
        (f"Tokens per ms, rest {rest_ms:g} ms", lambda row: row.tokens_per_ms[1]),
    ]
    sizes = sorted({row.rows for row in rows})
    for title, value in measures:
        lines: dict[tuple[str, str, str], list[str]] = {}
        for row in rows:
            line = lines.setdefault((row.set, row.kind, row.method), [])
            line.append(f"{value(row):.3f}" if "ms" in title else f"{value(row):.2f}")
        yield make_table(
            ["set", "kind", "method", *(f"{size} rows" for size in sizes)],
            ([*key, *cells] for key, cells in lines.items()), title, left=3,
        )  # fmt: skip


def gain_tables(found: list[Gain]) -> Iterator[FittedTable]:
    """Yield each set's best tree and chain, then the texts on which that tree is worst and best."""
    yield record_table(
        [("set", "{.set}"), ("measure", "{.measure}"), ("best tree", "{.tree}"),
         ("best chain", "{.chain}"), ("tree", "{.tree_value:.3f}"),
         ("chain", "{.chain_value:.3f}"), ("gain", "{.gain:+.1%}")],
        found, "Best tree over best chain", left=4,
    )  # fmt: skip
    texts = [
        [gain.set, place.place, f"{place.tree:.2f}", f"{place.chain:.2f}", f"{place.gain:+.0%}"]
        for gain in found
        for place in (*gain.texts[:SHOWN_TEXTS], *gain.texts[-SHOWN_TEXTS:])
    ]
    title = "Texts with the smallest and the largest gain at equal rows, tokens per round"
    yield make_table(["set", "text", "tree", "chain", "gain"], texts, title, left=2)


def measure(o: TreesOptions) -> BenchReport:
    pair = MeasuredPair.load(o.model, o.draft_model, o.threads, o.limit)
    rows: list[ArmResult] = []
    found: list[Gain] = []
    for name in o.sets:
        if not (read := read_texts(pair, set_groups(o, name), o.max_tokens)):
            continue
        for part in SetStudy(pair, name, read, o.max_tokens, o.rest_ms).run(o.rows):
            rows += results(part)
            found += gains(part, o.rest_ms)
    if not rows:
        raise ConfigError(f"--sets: there are no prompts; --data is {o.data}")
    steps = {
        "target": {str(n): pair.verify(n) / 1e6 for n in (1, *o.rows)},
        "draft": {str(n): pair.draft_ns(n) / 1e6 for n in (1, *o.rows)},
    }
    shown = "; ".join(
        f"{model}: " + ", ".join(f"{n} rows {ms:.3f}" for n, ms in costs.items())
        for model, costs in steps.items()
    )
    whole = [row for row in rows if row.set in o.sets]
    return BenchReport(
        {**vars(o), "step_ms": steps, "results": rows, "gains": found},
        [*arm_tables(whole, o.rest_ms), *gain_tables(found), notes(f"Steps in ms. {shown}")],
    )


@with_flags
def trees(options: TreesOptions, results: Results) -> None:
    """Simulate what verifying trees of drafts would win over the best chain.

    Greedy and exact: rounds are simulated along the target's own texts, where drafts are accepted
    as far as they equal the text. Chains are those of the draft service's drafters, and best_chain,
    which selects one by the values that trees go by. Trees have at most as many rows, as EAGLE-2
    makes them of the draft model, of Token Recycling's candidates, and of the chains of all sources
    (trie) or EAGLE-2's tree with these (joint_tree).

    Tokens per time count the steps of both models, measured at start, and --rest-ms. A tree is
    assumed to cost no more than a chain of as many rows: nothing for its attention mask, nor for
    moving accepted tokens in the KV cache.
    """
    results.of(lambda: measure(options))


if __name__ == "__main__":
    run(single(trees))

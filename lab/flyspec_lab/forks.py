"""Where it hurts: does an answer depend on one loosely accepted token?

A fork takes a recorded text that has a loose token. From the text up to and with that token, and
from the text before it with the target's own token in its place, it decodes on exactly, with the
same seed, and scores both. What differs between the two is what the token did, and nothing else.
"""

from __future__ import annotations

import math
import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from flyspec.client import AsyncClient, GenerateOptions
from flyspec.concurrency import all_or_first_error, until_interrupted
from flyspec.errors import FlyspecError
from flyspec.progress import progress
from flyspec.rules import Rule
from flyspec_lab.bench.summaries import grouped
from flyspec_lab.options import EvalOptions
from flyspec_lab.row_files import RowFiles
from flyspec_lab.run import Unit, Wanted, sampling_of, scored
from flyspec_lab.samples import KEY, SampleKey, key_of, latest, schema_of
from flyspec_lab.statistics import exact_interval

TokenClass = Literal["digit", "word", "punctuation", "whitespace", "other"]
TOKEN_CLASSES = get_args(TokenClass)
_COLUMNS = (
    *KEY, "condition", "repeat", "error", "score", "token_ids", "prompt_token_ids",
    "loose_positions", "loose_gaps_nats", "loose_entropies", "loose_target_token_ids",
)  # fmt: skip
_QUARTERS = 4


@dataclass(frozen=True)
class Fork(SampleKey):
    """A fork of the sample that its key says, at an output position.

    `token` and `target_token` are the texts that the loose token and the target's complete.
    `score` is of the text with the loose token, `target_score` of that with the target's.
    `same_rest`: the same tokens follow both.
    """

    position: int
    condition: str
    gap_nats: float
    entropy: float
    error: str | None = None
    token: str = ""
    target_token: str = ""
    token_class: str = ""
    same_rest: bool = False
    text: str = ""
    target_text: str = ""
    score: float | None = None
    target_score: float | None = None


FORK_KEY = (*KEY, "position")
FORK_SCHEMA = schema_of(Fork)


@dataclass(frozen=True)
class ForkReport:
    """Forks of a group: how many, the share with another rest, and answers that flipped.

    `by` is what they are grouped by, `group` the values. `harmful`: right with the target's token,
    wrong with the loose one; `helpful`: the other way round. `harmful_rate` is of all `forks`, with
    its exact 95 % interval.
    """

    by: str
    group: str
    forks: int
    other_rest: float
    harmful: int
    helpful: int
    harmful_rate: float
    low: float
    high: float


def token_class(text: str) -> TokenClass:
    """Return the class of a token's text by its most telling character: a digit, then a letter."""
    if any(c.isdigit() for c in text):
        return "digit"
    if any(c.isalpha() for c in text):
        return "word"
    if any(unicodedata.category(c)[0] in "PS" for c in text):
        return "punctuation"
    return "whitespace" if text and text.isspace() else "other"


async def make_forks(
    o: EvalOptions, wanted: Wanted, samples: RowFiles, files: RowFiles, client: AsyncClient
) -> list[dict[str, Any]]:
    """Fork at up to `forks` loose tokens of the samples, drawn evenly; return the forks' rows.

    Forks that are in `files` are not made again, unless they failed. After Ctrl-C, returns those
    that there are.
    """
    chosen = _choose(o, wanted, samples)
    known = _by_key(files)
    missing = [place for place in chosen if _fork_key(place) not in known]
    queue = iter(missing)

    async def work(advance: Callable[[], None]) -> None:
        for place in queue:
            files.append(vars(await _fork(o, client, wanted[key_of(place)], place)))
            advance()

    with progress("forking", len(missing)) as advance, until_interrupted():
        await all_or_first_error(work(advance) for _ in range(o.concurrency))
    known = _by_key(files)
    return [known[key] for key in map(_fork_key, chosen) if key in known]


def report(rows: Sequence[Mapping[str, Any]]) -> list[ForkReport]:
    """Summarize forks: all, by condition, by class of the loose token, by gap and by entropy."""
    if not rows:
        return []
    found = [_group("", "all", rows)]
    conditions = grouped(rows, lambda row: row["condition"])
    if len(conditions) > 1:
        found += [_group("condition", name, of) for name, of in conditions.items()]
    classes = grouped(rows, lambda row: row["token_class"])
    found += [_group("class", name, classes[name]) for name in TOKEN_CLASSES if name in classes]
    found += _quarters("gap, nats", rows, [row["gap_nats"] for row in rows])
    measured = [row for row in rows if not math.isnan(row["entropy"])]
    return [*found, *_quarters("entropy", measured, [row["entropy"] for row in measured])]


def _quarters(
    by: str, rows: Sequence[Mapping[str, Any]], values: Sequence[float]
) -> list[ForkReport]:
    """Group by the quarters of a value's distribution."""
    if len(rows) < _QUARTERS:
        return []
    edges = np.quantile(values, np.linspace(0, 1, _QUARTERS + 1))
    places = np.searchsorted(edges[1:-1], values, side="left")
    found = []
    for quarter in range(_QUARTERS):
        of = [row for row, place in zip(rows, places, strict=True) if place == quarter]
        if of:
            found.append(_group(by, f"{edges[quarter]:.2f} to {edges[quarter + 1]:.2f}", of))
    return found


def _group(by: str, group: str, rows: Sequence[Mapping[str, Any]]) -> ForkReport:
    pairs = [(row["score"] >= 1.0, row["target_score"] >= 1.0) for row in rows]
    harmful, helpful = pairs.count((False, True)), pairs.count((True, False))
    other = sum(not row["same_rest"] for row in rows)
    rate = harmful / len(rows)
    interval = exact_interval(harmful, len(rows))
    return ForkReport(by, group, len(rows), other / len(rows), harmful, helpful, rate, *interval)


def _by_key(files: RowFiles) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the forks that did not fail."""
    rows = {_fork_key(row): row for row in files.read().to_pylist()}
    return {key: row for key, row in rows.items() if row["error"] is None}


def _choose(o: EvalOptions, wanted: Wanted, samples: RowFiles) -> list[dict[str, Any]]:
    """Draw loose tokens of scored samples; a larger number has those of a smaller one."""
    places = [
        (row, i)
        for key, row in latest(samples.read(_COLUMNS).to_pylist()).items()
        if key in wanted and row["error"] is None and row["score"] is not None
        for i, target in enumerate(row["loose_target_token_ids"])
        if target >= 0
    ]
    # By a number for each place: those of further samples do not change which are drawn.
    order = sorted(places, key=lambda place: _number(o.seed, key_of(place[0]), place[1]))
    return [_place(row, i) for row, i in order[: o.forks]]


def _number(seed: int, *place: Any) -> float:
    return random.Random(repr((seed, *place))).random()


def _place(row: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return what is known of a fork before it is made, with the tokens that it needs."""
    return {
        **{name: row[name] for name in (*KEY, "condition")},
        "position": row["loose_positions"][i],
        "gap_nats": row["loose_gaps_nats"][i],
        "entropy": row["loose_entropies"][i],
        "before": [*row["prompt_token_ids"], *row["token_ids"][: row["loose_positions"][i]]],
        "prompt_tokens": len(row["prompt_token_ids"]),
        "loose": row["token_ids"][row["loose_positions"][i]],
        "target": row["loose_target_token_ids"][i],
    }


def _fork_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in FORK_KEY)


async def _fork(o: EvalOptions, client: AsyncClient, unit: Unit, place: Mapping[str, Any]) -> Fork:
    """Make a fork; one that fails has an error."""
    facts = {name: place[name] for name in (*FORK_KEY, "condition", "gap_nats", "entropy")}
    try:
        way = await _way_on(o, client, unit, place, place["loose"])
        target = await _way_on(o, client, unit, place, place["target"])
    except FlyspecError as error:
        return Fork(**facts, error=str(error))
    return Fork(
        **facts,
        token=way.token,
        target_token=target.token,
        token_class=token_class(way.token),
        same_rest=way.rest == target.rest,
        text=way.text,
        target_text=target.text,
        score=way.score,
        target_score=target.score,
    )


class _Way(NamedTuple):
    """One way on from a fork: the whole output, the first token's text, the tokens after it."""

    text: str
    token: str
    rest: list[int]
    score: float


async def _way_on(
    o: EvalOptions, client: AsyncClient, unit: Unit, place: Mapping[str, Any], token_id: int
) -> _Way:
    """Decode exactly on after a token. Raises `FlyspecError`."""
    task = unit.task.task
    sequence = [*place["before"], token_id]
    start = place["prompt_tokens"]
    left = (o.max_tokens or task.max_tokens) - (len(sequence) - start)
    rest: list[int] = []
    if left > 0:
        options = GenerateOptions(
            sampling=sampling_of(o),
            seed=place["seed"],
            max_tokens=left,
            stop=tuple(task.stop),
            rule=Rule("exact"),
        )
        rest = (await client.complete(sequence, options, math.inf)).token_ids
    texts: list[str] = []
    async for piece in client.score(
        [*sequence, *rest]
    ):  # it tells the texts of tokens, in their context
        texts += piece.token_texts
    text = task.until_stop("".join(texts[start:]))
    score = await scored(task, unit.problem, text)
    if score is None:
        raise FlyspecError("the text has no score")
    return _Way(text, texts[len(sequence) - 1], rest, score.value)

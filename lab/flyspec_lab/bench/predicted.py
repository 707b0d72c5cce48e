"""What a predicted output saves: the target's own text, with a name changed, and others.

The text is that of plain decoding. Every kind of prediction follows the others in a rotating order,
after noise has been read into the services' caches, so that none profits from another.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flyspec.client import AsyncClient
from flyspec.concurrency import until_interrupted
from flyspec.progress import progress
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.modes import FlyspecMode, Item, Noise, Sample
from flyspec_lab.bench.options import PredictionOptions
from flyspec_lab.bench.speed import plain_options, rotated, whole
from flyspec_lab.bench.summaries import grouped

NONE, SAME, RENAMED = "none", "as predicted", "one name changed"
USELESS, MISLEADING = "useless", "misleading"
KINDS = (NONE, SAME, RENAMED, USELESS, MISLEADING)
_UNRELATED = "Volcanic islands rise where plates drift over plumes; lichens settle on lava. "
_NAME = re.compile(r"[A-Za-z_]{3,}")


@dataclass(frozen=True)
class PredictionReport:
    """Generations with one kind of prediction, relative to those of the same prompt without.

    Ratios are medians over the prompts of medians over the repeats, and those of the worst prompt.
    `same_text`: prompts whose text was that of plain decoding in all repeats.
    """

    prediction: str
    prompts: int
    rounds: float
    most_rounds: int
    rounds_ratio: float
    worst_rounds_ratio: float
    time_ratio: float
    worst_time_ratio: float
    same_text: int


def predictions_of(text: str) -> dict[str, str]:
    """Return the predictions of a text by kind; without a name that occurs twice, one less.

    The changed name is the most frequent one, spelled backwards. The useless one has nothing to do
    with the text. The misleading one is the text backwards, which agrees where it repeats itself.
    """
    unrelated = (_UNRELATED * (1 + len(text) // len(_UNRELATED)))[: len(text)]
    found = {NONE: "", SAME: text, USELESS: unrelated, MISLEADING: text[::-1]}
    (name, count), *_ = Counter(_NAME.findall(text)).most_common(1) or [("", 0)]
    if count > 1 and name != name[::-1]:
        found[RENAMED] = re.sub(rf"\b{name}\b", name[::-1], text)
    return found


async def measure(
    client: AsyncClient, items: Sequence[Item], noise: Noise, o: PredictionOptions
) -> list[Sample]:
    """Decode every text plainly, then with each kind of prediction, `repeats` times."""
    plain = plain_options(o)
    asked = replace(
        plain,
        rule=o.rule.rule,
        phases=o.rule.phases,
        drafter=o.drafter,
        num_speculative_tokens=o.num_speculative_tokens,
    )
    samples, predicted = [], []
    for item in items:
        generation = await client.complete(item.prompt, plain)
        tokens = generation.token_ids
        samples.append(Sample(item.group, item.index, 0, PLAIN, 0.0, len(tokens), tokens))
        predicted.append(predictions_of(generation.text))
    count = sum(map(len, predicted))
    with progress("measuring", o.repeats * count) as advance, until_interrupted():
        for repeat in range(o.repeats):
            for item, predictions in zip(items, predicted, strict=True):
                for kind, prediction in rotated([*predictions.items()], repeat + item.index):
                    await noise.fill()
                    mode = FlyspecMode(kind, client, replace(asked, prediction=prediction))
                    samples.append(replace(await mode.run(item), repeat=repeat))
                    advance()
    measured = whole(samples[len(items) :], count)
    return [*samples[: len(items)], *measured]


def report(samples: Sequence[Sample]) -> list[PredictionReport]:
    plain = {(s.group, s.prompt): s.token_ids for s in samples if s.mode == PLAIN}
    modes = grouped([s for s in samples if s.mode != PLAIN], lambda s: s.mode)
    by_prompt = {mode: grouped(of, lambda s: (s.group, s.prompt)) for mode, of in modes.items()}
    return [
        _report(kind, by_prompt[kind], by_prompt[NONE], plain)
        for kind in KINDS
        if kind in by_prompt
    ]


Prompts = dict[tuple[str, int], list[Sample]]


def _report(
    kind: str, prompts: Prompts, without: Prompts, plain: dict[tuple[str, int], Sequence[int]]
) -> PredictionReport:
    rounds, seconds = [], []
    for prompt, samples in prompts.items():
        rounds.append(_ratio([s.rounds for s in samples], [s.rounds for s in without[prompt]]))
        seconds.append(_ratio([s.seconds for s in samples], [s.seconds for s in without[prompt]]))
    every = [s.rounds for samples in prompts.values() for s in samples]
    return PredictionReport(
        prediction=kind,
        prompts=len(prompts),
        rounds=statistics.median(every),
        most_rounds=max(every),
        rounds_ratio=statistics.median(rounds),
        worst_rounds_ratio=max(rounds),
        time_ratio=statistics.median(seconds),
        worst_time_ratio=max(seconds),
        same_text=sum(
            all(s.token_ids == plain[prompt] for s in samples)
            for prompt, samples in prompts.items()
        ),
    )


def _ratio(values: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(values) / statistics.median(others)

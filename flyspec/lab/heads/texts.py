"""What a head learns from: texts that the target itself goes on with, after prompts of a corpus."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flyspec.errors import ConfigError
from flyspec.lab.local_model import LocalModel
from flyspec.prompts import read_prompts, word_problems
from flyspec.python_source import is_held_out, python_files
from flyspec.values.tokens import SamplingParams

SAMPLED = SamplingParams(temperature=1.0)
_WINDOW = 320
"""Characters of source that the target goes on with."""


class LearntText(NamedTuple):
    """Tokens of a text; the head learns to predict those from index `first` on."""

    token_ids: list[int]
    first: int


class Beginning(NamedTuple):
    """A prompt's tokens, and the index of the first one that the head learns to predict."""

    token_ids: list[int]
    first: int


def beginnings(
    model: LocalModel,
    corpora: Sequence[tuple[str, int | None]],
    files: Sequence[str],
    count: int,
    seed: int,
) -> list[Beginning]:
    """Return beginnings of each corpus, `count` unless it says how many, or all it has.

    A head learns the answers to questions; of source it learns all but the first token, since
    the source is what the target itself was asked to continue. Raises `ConfigError`.
    """
    found: list[Beginning] = []
    for name, own in corpora:
        if name == "word_problems":
            prompts = word_problems(own or count, f"heads-{seed}")
            found += (_question(model.encode(p.to_request())) for p in prompts)
        else:
            found += _windows(model, own or count, seed)
    for file in files:
        found += (_question(model.encode(p.to_request())) for p in read_prompts(file, count))
    if not found:
        raise ConfigError("--corpora and --data: give one of them, or there is nothing to learn")
    longest = model.info.context_length - 2
    return [each for each in found if len(each.token_ids) <= longest]


def _question(token_ids: list[int]) -> Beginning:
    return Beginning(token_ids, len(token_ids))


def _windows(model: LocalModel, count: int, seed: int) -> Iterator[Beginning]:
    """Yield windows of source, each from another place."""
    files = python_files(lambda path: not is_held_out(path))
    places = [(path, at) for path, text in files.items() for at in range(0, len(text), _WINDOW)]
    random.Random(f"heads {seed}").shuffle(places)
    for path, at in places[:count]:
        yield Beginning(model.encode(files[path][at : at + _WINDOW]), 1)


def continued(
    model: LocalModel,
    starts: Sequence[Beginning],
    max_tokens: int,
    seed: int,
    advance: Callable[[int], None],
) -> list[LearntText]:
    """Have the target go on with each beginning: every other one greedily, the rest sampled."""
    found: list[LearntText] = []
    for part, sampling in ((starts[::2], SamplingParams()), (starts[1::2], SAMPLED)):
        # Of similar lengths together, so that few wait for the longest.
        own = sorted(part, key=lambda each: len(each.token_ids))
        drawn = model.continued(
            [each.token_ids for each in own], [max_tokens] * len(own), advance, sampling, seed
        )
        found += (
            LearntText([*each.token_ids, *tokens], each.first)
            for each, tokens in zip(own, drawn, strict=True)
            if tokens
        )
    return found

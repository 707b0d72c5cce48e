"""Texts that a head learns from: beginnings from a corpus, which the target itself goes on with.

Or, for a target that was trained on a corpus, the corpus's own texts: they are like the target's
samples, and cost no decoding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flyspec.errors import ConfigError
from flyspec.prompts import read_prompts
from flyspec.values.chat import Chat
from flyspec.values.tokens import SamplingParams
from flyspec_lab.heads.options import Corpora
from flyspec_lab.local_model import LocalModel
from flyspec_lab.python_source import is_held_out, python_files
from flyspec_lab.word_problems import problems

SAMPLED = SamplingParams(temperature=1.0)
_WINDOW, _WHOLE_WINDOW = 320, 700
"""Characters of source that the target goes on with, and that stand for themselves."""


class LearntText(NamedTuple):
    """Tokens of a text, or of its beginning; the head learns to predict those from `first` on.

    Of questions it learns the answers, of source all but the first token.
    """

    token_ids: list[int]
    first: int


def beginnings(
    model: LocalModel,
    corpora: Corpora,
    files: Sequence[str],
    count: int,
    seed: int,
    whole: bool = False,
) -> list[LearntText]:
    """Return beginnings of each corpus, `count` unless it says how many, or all it has.

    With `whole`, the corpora's whole texts. Raises `ConfigError`.
    """
    found: list[LearntText] = []
    for name, own in corpora:
        if name == "word_problems":
            for problem in problems(f"heads-{seed}", own or count):
                asked = Chat.of_user(problem.question)
                question = model.encode(asked)
                answer = {"role": "assistant", "content": problem.solution}
                both = Chat((*asked.messages, answer), add_generation_prompt=False)
                text = model.encode(both) if whole else question
                found.append(LearntText(text, len(question)))
        else:
            found += _windows(model, own or count, seed, _WHOLE_WINDOW if whole else _WINDOW)
    for file in files:
        asked_ids = [model.encode(prompt.to_request()) for prompt in read_prompts(file, count)]
        found += [LearntText(ids, len(ids)) for ids in asked_ids]
    longest = model.info.context_length - 2
    texts = [each for each in found if 1 < len(each.token_ids) <= longest]
    if not texts:
        raise ConfigError("--corpora and --data: give one of them, or there is nothing to learn")
    return texts


def _windows(model: LocalModel, count: int, seed: int, length: int) -> Iterator[LearntText]:
    """Yield windows of source of so many characters, each from another place."""
    files = python_files(lambda path: not is_held_out(path))
    places = [(path, at) for path, text in files.items() for at in range(0, len(text), length)]
    random.Random(f"heads {seed}").shuffle(places)
    for path, at in places[:count]:
        yield LearntText(model.encode(files[path][at : at + length]), 1)


def continued(
    model: LocalModel,
    starts: Sequence[LearntText],
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

"""What retrieval finds along the target's own texts, at every place: why it drafts well or badly.

Without a service: greedy and exact, the text is what a guess is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from draft_service.drafters.sources import DraftSource
from flyspec.prefix import num_same


@dataclass(frozen=True)
class RetrievalFigures:
    """What a source finds at the places of a set's texts.

    `found` is the share of places with a guess. Of those guesses: `match` tokens led to them on
    average, the first token was right in a share `first`, and `right` tokens in a row were on
    average. `tokens_per_place` is 1 + right tokens over all places: a round's tokens, if rounds
    began everywhere. `guess_us` is the time of a guess, found or not, in µs.
    """

    set: str
    source: str
    places: int
    found: float
    match: float
    first: float
    right: float
    tokens_per_place: float
    guess_us: float


def along(
    name: str,
    texts: Iterable[tuple[Sequence[int], Sequence[int], DraftSource]],
    max_tokens: int,
) -> RetrievalFigures:
    """Ask a source before each output token; `texts` are prompts, outputs and new sources.

    Raises `ValueError` if there is no output token.
    """
    kind, places, found, match, first, right, spent_ns = "", 0, 0, 0, 0, 0, 0
    for prompt, output, source in texts:
        kind = source.kind
        tokens = [*prompt]
        source.extend(tokens)
        for index, token in enumerate(output):
            began_ns = perf_counter_ns()
            guess = source.guess(tokens, max_tokens)
            spent_ns += perf_counter_ns() - began_ns
            places += 1
            if guess.token_ids:
                same = num_same(guess.token_ids, output[index:])
                found, match = found + 1, match + guess.length
                first, right = first + (same > 0), right + same
            tokens.append(token)
            source.extend([token])
    if not places:
        raise ValueError(f"{name}: has no output tokens")
    guesses = max(1, found)
    return RetrievalFigures(
        name, kind, places, found / places, match / guesses, first / guesses, right / guesses,
        1.0 + right / places, spent_ns / places / 1e3,
    )  # fmt: skip

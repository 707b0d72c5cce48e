"""A datastore of texts for retrieval (REST, arXiv 2311.08252): what followed the last tokens there?

A directory with `datastore.json` and, for each shard, the tokens of all texts and their suffix
array: the positions of all suffixes in lexicographic order. Both are memory-mapped, so that a
datastore may be larger than memory and processes share it. `build` makes one.
"""

from __future__ import annotations

import json
import mmap
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

from flyspec.errors import ConfigError

FACTS = "datastore.json"
FORMAT = 1
MIN_MATCH, MAX_MATCH = 2, 16
"""Tokens that must occur in the datastore, and that are looked for at most, as in REST."""
MAX_SAMPLES = 32
"""Continuations that are compared, spread evenly over all occurrences."""
MAX_PAIRS = 1 << 16
"""Pairs of tokens whose places in a shard are remembered: where the search for a match begins."""
UNSEEN = 1.0
"""Added to the number of continuations: the weight of those that the datastore has not seen."""


@dataclass(frozen=True, slots=True)
class DatastoreFacts:
    """The contents of `datastore.json`.

    `token_bytes` per token, little-endian; the highest number separates texts. `shards` has the
    number of tokens of each, separators included; suffix arrays have 4 bytes per position.
    """

    tokenizer_fingerprint: str
    vocab_size: int
    token_bytes: int
    shards: Sequence[int]
    num_texts: int
    format: int = FORMAT

    @property
    def separator(self) -> int:
        return (1 << 8 * self.token_bytes) - 1

    def save(self, directory: Path) -> None:
        (directory / FACTS).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read and check them. Raises `ConfigError`."""
        path = directory / FACTS
        try:
            facts = cls(**json.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(
                f"--datastore {directory}: cannot read {FACTS} ({error.strerror}); make a "
                "datastore with `flyspec datastore build`"
            ) from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--datastore {directory}: {FACTS} is not valid: {error}") from None
        if facts.format != FORMAT or facts.token_bytes not in (2, 4):
            raise ConfigError(
                f"--datastore {directory}: format {facts.format} with {facts.token_bytes} bytes "
                "per token is of another release; build the datastore again"
            )
        return facts


def shard_files(directory: Path, index: int) -> tuple[Path, Path]:
    """Return the files of a shard's tokens and of its suffix array."""
    return directory / f"{index:04d}.tokens", directory / f"{index:04d}.suffixes"


class Retrieved(NamedTuple):
    """A continuation, the share of the retrieved ones that agrees, and the length of the match."""

    token_ids: list[int]
    confidences: list[float]
    length: int


NOTHING = Retrieved([], [], 0)


class Datastore:
    """A datastore opened for retrieval. Safe to use from several threads.

    Raises `ConfigError` for a directory that is none, or whose files are incomplete.
    """

    def __init__(self, directory: Path) -> None:
        if sys.byteorder != "little":
            raise ConfigError("--datastore: datastores need a little-endian processor")
        self.facts = DatastoreFacts.load(directory)
        self._shards = [
            _Shard(directory, index, size, self.facts)
            for index, size in enumerate(self.facts.shards)
        ]

    def find(self, last_tokens: Sequence[int], max_tokens: int) -> Retrieved:
        """Return the likeliest continuation of the longest match of the last tokens.

        Token by token, the one that most of the retrieved continuations have that agree so far.
        """
        last = list(last_tokens[-MAX_MATCH:])
        if max_tokens <= 0 or len(last) < MIN_MATCH:
            return NOTHING
        longest, ranges = 0, list[tuple[_Shard, int, int]]()
        for shard in self._shards:
            length, low, high = shard.longest(last, longest)
            if length > longest:
                longest, ranges = length, []
            if length and length == longest:
                ranges.append((shard, low, high))
        if not ranges:
            return NOTHING
        total = sum(high - low for _, low, high in ranges)
        stride = -(-total // MAX_SAMPLES)
        runs = [
            shard.after(at, longest, max_tokens)
            for shard, low, high in ranges
            for at in range(low, high, stride)
        ]
        return Retrieved(*_likeliest(runs, max_tokens), longest)


def _likeliest(runs: list[list[int]], max_tokens: int) -> tuple[list[int], list[float]]:
    chosen: list[int] = []
    confidences: list[float] = []
    for index in range(max_tokens):
        runs = [run for run in runs if len(run) > index]
        if len(runs) < 2:  # nothing to choose from any more
            rest = runs[0][index:max_tokens] if runs else []
            return [*chosen, *rest], [*confidences, *[1 / (1 + UNSEEN)] * len(rest)]
        token, count = Counter(run[index] for run in runs).most_common(1)[0]
        chosen.append(token)
        confidences.append(count / (len(runs) + UNSEEN))
        runs = [run for run in runs if run[index] == token]
    return chosen, confidences


class _Shard:
    """A shard's tokens and suffix array, mapped into memory."""

    def __init__(self, directory: Path, index: int, size: int, facts: DatastoreFacts) -> None:
        tokens, suffixes = shard_files(directory, index)
        self._tokens = _mapped(directory, tokens, "H" if facts.token_bytes == 2 else "I", size)
        self._suffixes = _mapped(directory, suffixes, "I", size)
        self._separator, self._size = facts.separator, size
        self._pairs: dict[tuple[int, int], tuple[int, int]] = {}

    def longest(self, last: list[int], least: int) -> tuple[int, int, int]:
        """Return the length of the longest suffix of `last` that occurs, and its range.

        The range is of the suffix array. Lengths below `least` count as 0.
        """
        low, high = max(MIN_MATCH, least) - 1, len(last)
        best = (0, 0, 0)
        while low < high:  # what holds for a length holds for all smaller ones
            length = (low + high + 1) // 2
            begin, end = self._range(last[-length:])
            if begin < end:
                best = (length, begin, end)
                low = length
            else:
                high = length - 1
        return best

    def after(self, at: int, length: int, max_tokens: int) -> list[int]:
        """Return what follows the first `length` tokens of a suffix, up to the text's end."""
        place = self._suffixes[at] + length
        run: list[int] = self._tokens[place : place + max_tokens].tolist()
        return run[: run.index(self._separator)] if self._separator in run else run

    def _range(self, pattern: list[int]) -> tuple[int, int]:
        """Return the range of the suffixes that begin with a pattern of two tokens or more."""
        pair = pattern[0], pattern[1]
        found = self._pairs.get(pair)
        if found is None:
            found = self._search([*pair], 0, self._size)
            if len(self._pairs) >= MAX_PAIRS:
                self._pairs.clear()
            self._pairs[pair] = found
        return self._search(pattern, *found) if len(pattern) > len(pair) else found

    def _search(self, pattern: list[int], low: int, high: int) -> tuple[int, int]:
        """Return that range, which lies within another one."""
        tokens, length = self._tokens, len(pattern)

        def beginning(place: int) -> list[int]:
            found: list[int] = tokens[place : place + length].tolist()
            return found

        begin = bisect_left(self._suffixes, pattern, low, high, key=beginning)
        if begin == high or beginning(self._suffixes[begin]) != pattern:
            return begin, begin
        return begin, bisect_right(self._suffixes, pattern, begin, high, key=beginning)


def _mapped(directory: Path, path: Path, kind: Literal["H", "I"], size: int) -> memoryview[int]:
    """Map a file of `size` numbers into memory. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(data).cast(kind)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--datastore {directory}: cannot read {path.name}: {error}") from None
    if len(view) != size:
        raise ConfigError(
            f"--datastore {directory}: {path.name} has {len(view)} entries instead of {size}; "
            "build the datastore again"
        )
    return view

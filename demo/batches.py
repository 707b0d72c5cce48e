"""Training batches, each a pure function of (seed, step), so that a run can resume exactly.

Encodes texts, sets loss weights, and packs several problems into a row with masks between them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from tokenizers import Tokenizer

from demo import corpus
from flyspec_lab.word_problems import problems, wording

_RESULT = re.compile(r"(?:= |#### )(\d+)")
_NUMBER = re.compile(r"\d+")
_NAMED = re.compile(rf"\b(?:{'|'.join([*wording.NAMES, *wording.THINGS, *wording.COLOURS])})\b")
RESULT_WEIGHT = 4.0  # otherwise the wording dominates and arithmetic does not converge in time
COPY_WEIGHT = 3.0  # likewise for finding out from the question what belongs where


@dataclass(frozen=True, slots=True)
class Mix:
    """Rows of a batch by kind, and their length in tokens.

    `copying`: increase the weight of what a solution copies from the question (names, things,
    numbers). `hard`: more problems of the families that are learnt last.
    """

    length: int
    problems: int
    drills: int
    code: int
    copying: bool = False
    hard: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Input rows, each token's document (0: padding), position, and weight of predicting it."""

    ids: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Return an additive mask, causal within each document."""
        n = self.ids.shape[1]
        same = self.documents[:, :, None] == self.documents[:, None, :]
        seen = same & torch.ones(n, n, dtype=torch.bool).tril()
        zero = torch.zeros(seen.shape, dtype=torch.bfloat16)
        return zero.masked_fill_(~seen, -3e4)[:, None]


Row = tuple[np.ndarray, np.ndarray]  # ids, weights


def _weigh_copies(text: str, weights: np.ndarray) -> None:
    """Set the weights of names and numbers that occurred before, also within the question."""
    begin = text.index(corpus.ASSISTANT)
    seen: set[str] = set()
    for match in _NAMED.finditer(text):
        if match.start() > begin:
            # Including the space before it, which is part of the token.
            weights[match.start() - 1 : match.end()] = COPY_WEIGHT
        elif match[0] in seen:
            weights[match.start() - 1 : match.end()] = 1.0
        seen.add(match[0])
    for match in _NUMBER.finditer(text, begin):
        weights[match.start() : match.end()] = COPY_WEIGHT


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, drill: bool = False, copying: bool = False
) -> list[Row]:
    rows: list[Row] = []
    for text, encoding in zip(
        texts, tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True
    ):
        chars = np.zeros(len(text), dtype=np.float32)
        if drill:
            chars[[m.start() for m in re.finditer("\n", text)]] = 1.0
        else:  # only the solution is learnt
            chars[text.index(corpus.ASSISTANT) + len(corpus.ASSISTANT) :] = 1.0
            if copying:
                _weigh_copies(text, chars)
        for match in _RESULT.finditer(text):
            if drill or chars[match.start()] > 0:
                chars[match.start(1) : match.end(1)] = RESULT_WEIGHT
        starts = np.array([start for start, _ in encoding.offsets])
        rows.append((np.array(encoding.ids, dtype=np.int64), chars[starts]))
    return rows


def _pack(rows: list[Row], length: int, count: int) -> list[list[Row]]:
    """Pack rows, longest first, into bins of `length` tokens; return the fullest `count` bins."""
    bins: list[list[Row]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda r: -len(r[0])):
        size = len(row[0])
        if size > length:
            continue
        fits = next((i for i, left in enumerate(room) if left >= size), None)
        if fits is None:
            bins.append([row])
            room.append(length - size)
        else:
            bins[fits].append(row)
            room[fits] -= size
    order = sorted(range(len(bins)), key=lambda i: room[i])[:count]
    return [bins[i] for i in order]


class Batches:
    """The batches of all steps."""

    def __init__(self, tokenizer: Tokenizer, seed: int, code: Sequence[str]) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self._bos = tokenizer.token_to_id(corpus.BOS)
        eos = tokenizer.token_to_id(corpus.EOS)
        encodings = tokenizer.encode_batch(list(code), add_special_tokens=False)
        self._files = [np.array([self._bos, *e.ids, eos], dtype=np.int64) for e in encodings]
        self.code_tokens = sum(map(len, self._files))
        self._streams: dict[int, np.ndarray] = {}

    def _code_rows(self, first: int, count: int, length: int) -> list[list[Row]]:
        """Return code rows from `first` on; every pass over the code shuffles its files."""
        rows: list[list[Row]] = []
        step = length - 1
        per_pass = self.code_tokens // step
        for i in range(first, first + count):
            epoch, index = divmod(i, per_pass)
            if epoch not in self._streams:
                order = np.random.default_rng((self._seed, epoch)).permutation(len(self._files))
                self._streams = {epoch: np.concatenate([self._files[k] for k in order])}
            # With a stride, so that neighbouring rows come from different files.
            index = (index * 7919) % per_pass
            ids = self._streams[epoch][index * step : (index + 1) * step]
            ids = np.concatenate([[self._bos], ids]) if ids[0] != self._bos else ids
            cuts = [*np.flatnonzero(ids == self._bos), len(ids)]
            parts = [ids[a:b] for a, b in pairwise(cuts)]
            rows.append([(part, np.ones(len(part), dtype=np.float32)) for part in parts])
        return rows

    def batch(self, step: int, mix: Mix, first_code_row: int) -> Batch:
        """Return a step's batch; `first_code_row` is the number of code rows used before."""
        packed: list[list[Row]] = []
        seed = f"train-{self._seed}-{step}"
        if mix.problems:
            ratio = mix.length / (135 if self._tokenizer.get_vocab_size() > 1000 else 480)
            count = int(mix.problems * ratio * 1.15) + 4
            drawn = problems(seed, count, hard=mix.hard)
            texts = [corpus.chat_text(problem) for problem in drawn]
            encoded = _encode(self._tokenizer, texts, copying=mix.copying)
            packed += _pack(encoded, mix.length, mix.problems)
        rng = random.Random(seed)
        for _ in range(mix.drills):
            text = corpus.drills(rng, mix.length // 8)
            ids, weights = _encode(self._tokenizer, [text], drill=True)[0]
            ids, weights = np.concatenate([[self._bos], ids]), np.concatenate([[0.0], weights])
            packed.append([(ids[: mix.length], weights[: mix.length])])
        packed += self._code_rows(first_code_row, mix.code, mix.length)
        shape = (mix.problems + mix.drills + mix.code, mix.length)
        ids, documents, positions = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        weights = np.zeros(shape, dtype=np.float32)
        for r, row in enumerate(packed):
            at = 0
            for d, (part, weight) in enumerate(row):
                span = slice(at, at + len(part))
                ids[r, span], weights[r, span] = part, weight
                documents[r, span], positions[r, span] = d + 1, np.arange(len(part))
                weights[r, at] = 0.0  # nothing precedes it
                at += len(part)
        # weights[t] is for predicting t: shift it to where the prediction is made.
        weights = np.concatenate([weights[:, 1:], np.zeros((shape[0], 1), np.float32)], axis=1)
        return Batch(*map(torch.from_numpy, (ids, documents, positions, weights)))

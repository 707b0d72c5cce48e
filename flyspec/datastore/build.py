"""Builds a datastore, shard by shard, so that memory holds no more than one of them.

Needs numpy and pydivsufsort (the extra `datastore`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from pydivsufsort import divsufsort

from flyspec.datastore.store import DatastoreFacts, shard_files
from flyspec.errors import ConfigError

MAX_SHARD_TOKENS = 1 << 26
"""Building a shard takes 10 to 12 bytes of memory per token."""


def build(
    directory: Path,
    texts: Iterable[list[int]],
    tokenizer_fingerprint: str,
    vocab_size: int,
    max_shard_tokens: int = MAX_SHARD_TOKENS,
    on_shard: Callable[[int], None] = lambda _: None,
) -> DatastoreFacts:
    """Write the datastore of tokenized texts to a new directory, and return its facts.

    `on_shard` gets the number of tokens of each shard once it is written. Raises `ConfigError` if
    the directory exists or there is no token.
    """
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--output {directory}: {error.strerror}; name a new directory") from None
    token_bytes = 2 if vocab_size < 1 << 16 else 4
    kind = np.dtype(f"<u{token_bytes}")
    count, sizes = 0, list[int]()

    def counted() -> Iterator[list[int]]:
        nonlocal count
        for text in texts:
            count += 1
            yield [*text, int(np.iinfo(kind).max)]

    try:
        for tokens in _shards(counted(), kind, max_shard_tokens):
            tokens_file, suffixes_file = shard_files(directory, len(sizes))
            tokens.tofile(tokens_file)
            divsufsort(tokens).astype("<u4", copy=False).tofile(suffixes_file)
            sizes.append(len(tokens))
            on_shard(len(tokens))
        if not sizes:
            raise ConfigError("no text to build a datastore from; name files that are not empty")
    except BaseException:
        shutil.rmtree(directory)
        raise
    facts = DatastoreFacts(tokenizer_fingerprint, vocab_size, token_bytes, sizes, count)
    facts.save(directory)
    return facts


def _shards(
    texts: Iterable[list[int]], kind: np.dtype[np.unsignedinteger], most: int
) -> Iterator[np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]]:
    """Yield the texts' tokens in arrays of at most `most`; a longer text fills several."""
    pieces, size = list[np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]](), 0
    for text in texts:
        pieces.append(np.array(text, kind))
        size += len(text)
        while size >= most:
            waiting = np.concatenate(pieces)
            yield waiting[:most]
            pieces, size = [waiting[most:]], size - most
    if size:
        yield np.concatenate(pieces)

"""Plain decoding as if each token had been a verdict of its own: how many come in one is free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from flyspec.values.rounds import Verdict


def one_by_one(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """The same verdicts, each with one token of plain decoding at most."""
    for verdict in verdicts:
        tokens = (*verdict.plain_token_ids, verdict.next_token_id)
        first = verdict.keep_length - len(verdict.plain_token_ids)
        for index, token in enumerate(tokens):
            last = index == len(tokens) - 1
            yield replace(
                verdict,
                keep_length=first + index,
                start_length=verdict.start_length + index,
                next_token_id=token,
                last=verdict.last and last,
                plain_token_ids=(),
            )

"""Splits plain decoding into one verdict per token, since how many come in one may vary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from flyspec.values.rounds import Verdict


def one_by_one(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """Return the same verdicts, each with at most one plainly decoded token."""
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

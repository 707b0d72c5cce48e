"""Describes texts that have no right answer: repetition, loops and broken endings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.generation.loop_guard import (
    MAX_UNIT_TOKENS,
    MIN_REPEATS,
    MIN_TOKENS,
    LoopGuard,
)

_FENCE = re.compile(r"^\s*(?:```|~~~)", re.MULTILINE)
_ENDS = ".!?…。！？｡।॥؟۔:;"
_CLOSES = "\"'”’»›)]}）】」』*_`~|"
_UNTERMINATED = re.compile(
    r"""\s*(?:
        [-*+•]\s | \d+[.)]\s | \#{1,6}\s | \| | >\s      # an item of a list, heading, table, quote
        | https?://\S+$ | [A-Z][\w ]*:\s | [-=_*]{3,}$   # an address, a field, a line
    )""",
    re.VERBOSE,
)
_OPENS = re.compile(r"[,(\[{“«‘„=+/&–—-]\s*$")


@dataclass(frozen=True)
class TextDescription:
    """Features of a text that need no right answer.

    `distinct_1` to `distinct_3` are shares of distinct n-grams of its tokens, None if it has fewer
    than n tokens. `loop_token_index` is the number of tokens when the first loop was complete, and
    `broken_ending` a word, a sentence or a code block that is cut off; None if there is none.
    """

    distinct_1: float | None = None
    distinct_2: float | None = None
    distinct_3: float | None = None
    loop_token_index: int | None = None
    broken_ending: str | None = None


def describe_text(text: str, token_ids: Sequence[int]) -> TextDescription:
    distinct = (distinct_n(token_ids, n) for n in (1, 2, 3))
    return TextDescription(*distinct, loop_token_index(token_ids), broken_ending(text))


def distinct_n(token_ids: Sequence[int], n: int) -> float | None:
    """Return the distinct n-grams as a share of all n-grams; None if there is none.

    Distinct-n of Li et al. 2016 (arXiv 1510.03055), which divides by the number of tokens: this is
    (T − n + 1)/T lower there, so that 1 means "no n-gram occurs twice" here for every n.
    """
    total = len(token_ids) - n + 1
    if total < 1:
        return None
    return len({tuple(token_ids[i : i + n]) for i in range(total)}) / total


def loop_token_index(token_ids: Iterable[int]) -> int | None:
    """Return after how many tokens the first loop was complete, by the loop guard's criterion."""
    guard = LoopGuard()
    for token_id in token_ids:
        guard.push(token_id)
        if guard.token_index is not None:
            break
    return guard.token_index


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Return whether a loop, by the loop guard's criterion, goes on to the last token."""
    for unit in range(1, MAX_UNIT_TOKENS + 1):
        length = max(MIN_TOKENS, MIN_REPEATS * unit)
        end = token_ids[-length:]
        if len(end) == length and end[unit:] == end[:-unit]:
            return True
    return False


def broken_ending(text: str) -> str | None:
    """Return what a text is cut off in, judged by its last line; None if it may be complete.

    A code block whose fence is open; a word, if a character is incomplete or a hyphen joins nothing
    to it; a sentence, if a line of prose has no full stop. An empty text, and items of lists,
    headings, tables and single values, which need none, count as complete. Whether a last letter
    ends its word cannot be seen, and languages without full stops (Thai) always look cut off.
    """
    if len(_FENCE.findall(text)) % 2:
        return "code block"
    shown = text.rstrip()
    if shown.endswith("\ufffd") or re.search(r"\w[-\u2010]$", shown):
        return "word"
    last = shown.rsplit("\n", 1)[-1]
    if _OPENS.search(last):
        return "sentence"
    end = last.rstrip(_CLOSES + " ")
    if not end or _UNTERMINATED.match(last) or len(last.split()) < 3:
        return None
    if _FENCE.match(last) or end[-1] in _ENDS or unicodedata.category(end[-1]).startswith("S"):
        return None
    return "sentence"

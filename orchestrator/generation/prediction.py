"""A predicted output: drafts what follows in it, wherever the output agrees with it.

Pure. The output is aligned with the prediction token by token. Where they part, the alignment is
found again behind the edit, and a short segment that was replaced once is expected to be replaced
everywhere (a renamed variable). After drafts in vain it waits for more agreement before the next,
so that a useless prediction costs little. No clocks, so a run can be repeated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

FIRST_RUN = 3
"""Agreeing tokens before the first drafts."""
MOST_RUN = 64
FIRST_K = 8
"""Drafts at first, and after some in vain; doubled while all are accepted."""
IN_VAIN = 2
"""Fewer accepted drafts than this are in vain."""
NEAR = 64
"""Tokens behind the place where the texts parted in which one agreeing token is enough."""
NGRAM, FAR_AFTER = 3, 8
"""Agreeing tokens that are enough anywhere, once the texts have been apart for so many."""
MOST_RENAMED = 6
"""Maximum tokens of a replaced segment and of its replacement."""

Segment = tuple[int, ...]


class Prediction:
    """The expected output, and how far the actual one agrees with it.

    Tokens that are `invisible` in text, as a prediction is one, do not count.
    """

    def __init__(self, token_ids: Sequence[int], invisible: Collection[int] = ()) -> None:
        self._tokens = tuple(token_ids)
        self._invisible = frozenset(invisible)
        self._ends: dict[int, list[int]] = {}  # the positions behind each token
        for end, token in enumerate(self._tokens, 1):
            self._ends.setdefault(token, []).append(end)
        self._places: dict[Segment, list[int]] = {}  # the positions behind each n-gram
        for end in range(NGRAM, len(self._tokens) + 1):
            self._places.setdefault(self._tokens[end - NGRAM : end], []).append(end)
        self._renamed: dict[Segment, Segment] = {}
        self._never: set[Segment] = set()  # segments that are not replaced everywhere
        self._k, self._needed = FIRST_K, FIRST_RUN
        self._restart()

    def _restart(self) -> None:
        self._output: list[int] = []  # without invisible tokens
        self._num_read = 0
        self._at = 0  # position in the prediction that the output has reached, or where they parted
        self._run = 0  # agreeing tokens since they last met
        self._stray: list[int] | None = None  # output since they parted; None: they agree
        self._owed: list[int] = []  # the rest of a replacement, before `_at`
        self._kept: set[Segment] = set()  # segments that stayed as they are

    def follow(self, output: Sequence[int]) -> None:
        """Take in the output, which begins with what it was."""
        for token in output[self._num_read :]:
            self._num_read += 1
            if token in self._invisible:
                continue
            self._output.append(token)
            if self._stray is None:
                self._step(token)
            else:
                self._stray.append(token)
                self._meet()

    def keep(self, length: int) -> None:
        """Record that the output was cut to `length` tokens."""
        if length < self._num_read:
            self._restart()  # the next `follow` begins with the first token

    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens expected to follow; none while it agrees too little."""
        run, start = self._run, self._at
        if self._stray is not None:
            if self._needed or len(self._stray) > 1:
                return []
            run, start = 0, self._at + 1  # one token may have been replaced by another
        if run < self._needed:
            return []
        owed = self._owed if self._stray is None else []
        return [*islice(self._expected(start, owed), min(most, self._k))]

    def checked(self, num_drafted: int, num_accepted: int) -> None:
        """Record how many of the proposed tokens were accepted."""
        if num_accepted >= min(IN_VAIN, num_drafted):
            self._needed = 0
            self._k = 2 * self._k if num_accepted == num_drafted else max(FIRST_K, self._k)
        else:
            self._needed = min(MOST_RUN, 4 * self._needed) if self._needed else 1
            self._k = FIRST_K

    # --- where output and prediction agree --------------------------------------------------

    def _expected(self, at: int, owed: Sequence[int]) -> Iterator[int]:
        """Yield the tokens from position `at` on, after those `owed`, with segments replaced."""
        yield from owed
        while at < len(self._tokens):
            old = self._renamed_at(at)
            yield from self._renamed.get(old, self._tokens[at : at + 1])
            at += max(1, len(old))

    def _renamed_at(self, at: int) -> Segment:
        """Return the longest segment at a position that is replaced; empty if none is."""
        if not self._renamed:
            return ()
        ends = range(at + MOST_RENAMED, at, -1)
        return next((s for end in ends if (s := self._tokens[at:end]) in self._renamed), ())

    def _step(self, token: int) -> None:
        """Take in a token while they agree."""
        if self._owed and self._owed[0] == token:
            del self._owed[0]
            self._run += 1
            return
        old = () if self._owed else self._renamed_at(self._at)
        if old and self._renamed[old][0] == token:
            self._owed = [*self._renamed[old][1:]]
            self._at += len(old)
            self._run += 1
            return
        if old and self._tokens[self._at] == token:  # not replaced here, so not everywhere
            del self._renamed[old]
            self._never.add(old)
        if self._at < len(self._tokens) and self._tokens[self._at] == token and not self._owed:
            self._at += 1
            self._run += 1
            for length in range(1, MOST_RENAMED + 1):
                self._kept.add(self._tokens[max(0, self._at - length) : self._at])
            return
        self._stray, self._owed, self._run = [token], [], 0

    def _meet(self) -> None:
        """Look for where they agree again: nearby for any agreement, elsewhere for a longer one."""
        stray = self._stray
        assert stray is not None
        best, most = None, (0, 0)
        diagonal, ends = self._at + len(stray), self._ends.get(stray[-1], [])
        near = ends[bisect_right(ends, self._at) : bisect_right(ends, self._at + NEAR)]
        far = self._places.get(tuple(self._output[-NGRAM:]), ()) if len(stray) >= FAR_AFTER else ()
        for end in (*near, *far):
            score = self._agreement(end), -abs(end - diagonal)
            if score > most:
                best, most = end, score
        if best is None:
            return
        run = most[0]
        replaced = self._tokens[self._at : best - run] if best - run >= self._at else ()
        self._rename(replaced, tuple(stray[: len(stray) - run]))
        self._at, self._run, self._stray = best, run, None

    def _agreement(self, end: int) -> int:
        """Return how many of the output's last tokens equal those before a position."""
        output, tokens, count = self._output, self._tokens, 0
        most = min(end, len(output), MOST_RUN)
        while count < most and tokens[end - 1 - count] == output[-1 - count]:
            count += 1
        return count

    def _rename(self, old: Segment, new: Segment) -> None:
        """Expect a replacement everywhere, unless the segment has stayed as it is elsewhere."""
        if not 0 < len(old) <= MOST_RENAMED or not 0 < len(new) <= MOST_RENAMED:
            return
        if old not in self._kept and old not in self._never:
            self._renamed[old] = new

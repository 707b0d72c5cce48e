"""A token sequence that can be truncated, with a hash of every prefix.

The orchestrator and the verify service keep one each; equal hashes mean that they agree on the
tokens before a round (`VerifyRound.prefix_hash`).
"""

from __future__ import annotations

from collections.abc import Sequence

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


def num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        count += 1
    return count


class TokenSequence:
    """Tokens with prefix hashes: h_0 = 1, h = mix(h + token), never 0, which means unchecked."""

    __slots__ = ("_hashes", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._hashes: list[int] = [1]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def hash(self) -> int:
        """Hash of the whole sequence, in [1, 2^64)."""
        return self._hashes[-1]

    def extend(self, tokens: Sequence[int]) -> None:
        self._hashes += self._hashes_behind(tokens)
        self.tokens += tokens

    def hash_with(self, tokens: Sequence[int]) -> int:
        """Return the hash that the sequence would have with `tokens` behind it."""
        return [self.hash, *self._hashes_behind(tokens)][-1]

    def _hashes_behind(self, tokens: Sequence[int]) -> list[int]:
        h, hashes = self._hashes[-1], []
        for token in tokens:
            h = (h + token + 1) * _MULTIPLIER & _MASK
            h = (h ^ h >> 29) or 1
            hashes.append(h)
        return hashes

    def keep(self, length: int) -> None:
        """Drop everything from position `length` on."""
        del self.tokens[length:]
        del self._hashes[length + 1 :]

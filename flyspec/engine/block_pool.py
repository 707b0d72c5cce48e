"""The blocks of a paged KV cache: who refers to them, and where known contents are found.

A full block's content is its token ids and the content before it, so equal contents are equal
sequences from the start (vLLM's prefix caching, but compared exactly rather than by hash). A block
that nothing refers to any more stays findable until it is needed.
"""

from __future__ import annotations

from typing import NamedTuple

from flyspec.errors import ResourceExhaustedError


class Content(NamedTuple):
    """The id of the content that precedes a block (0: nothing), and its token ids as bytes."""

    parent: int
    token_ids: bytes


class BlockPool:
    """Blocks 1 to `num_blocks`: each is referred to, or free.

    An id names one content forever, though a content may have several over time.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * (num_blocks + 1)
        # Of each block, the last content that it was given, with its id; meaningless until then.
        self._contents: list[Content | None] = [None] * (num_blocks + 1)
        self._ids = [0] * (num_blocks + 1)
        self._last_id = 0
        self._findable: dict[Content, int] = {}
        # Free blocks: the last one is taken first; then, least recently used first, findable ones.
        self._blank = list(range(num_blocks, 0, -1))
        self._idle: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    def allocate(self) -> int:
        """Take a free block, referred to once and not findable.

        Raises `ResourceExhaustedError` if none is free.
        """
        if self._blank:
            block = self._blank.pop()
        elif self._idle:
            block = next(iter(self._idle))
            del self._idle[block]
            self.hide(block)
        else:
            raise ResourceExhaustedError(
                f"all {self.num_blocks} blocks of the KV cache are in use; retry later or raise "
                "--kv-cache-memory-bytes"
            )
        self._references[block] = 1
        return block

    def find(self, content: Content) -> tuple[int, int]:
        """Refer once more to the block with this content; return it and its content's id.

        Without one, returns zeros.
        """
        block = self._findable.get(content, 0)
        if block:
            self._idle.pop(block, None)
            self._references[block] += 1
        return block, self._ids[block]

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def free(self, block: int) -> None:
        """Refer once less to a block."""
        self._references[block] -= 1
        if not self._references[block]:
            if self._is_findable(block):
                self._idle[block] = None
            else:
                self._blank.append(block)

    def publish(self, block: int, content: Content) -> int:
        """Make a block with this content findable, unless another one is; return the content's id.

        A block that is given its last content again keeps the id, so what followed is still found.
        """
        other = self._findable.setdefault(content, block)
        if other != block:
            self._ids[block] = self._ids[other]
        elif self._contents[block] != content:
            self._last_id += 1
            self._ids[block] = self._last_id
        self._contents[block] = content
        return self._ids[block]

    def hide(self, block: int) -> None:
        """Make a block that is referred to, or about to be, unfindable: its content will change."""
        content = self._contents[block]
        if content is not None and self._is_findable(block):
            del self._findable[content]

    def hide_all(self) -> None:
        self._findable.clear()
        self._blank += self._idle
        self._idle.clear()

    def _is_findable(self, block: int) -> bool:
        content = self._contents[block]
        return content is not None and self._findable.get(content) == block

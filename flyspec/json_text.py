"""JSON of clients: its parts are counted before any of them is built."""

from __future__ import annotations

import json
from typing import Any

from flyspec.errors import InvalidArgumentError

MAX_PARTS = 1 << 16
"""Maximum names, texts, lists and objects of a request, or fields of a message that have a length.

Python builds so many in 20 ms, in which no other thread runs, and more of them disproportionately
slowly: its garbage collection visits each again and again."""
MAX_DIGITS = 64
"""Maximum digits of an integer: the time to read it grows with their square."""


def read_json(text: bytes | bytearray, where: str, more_values: int = 0) -> Any:
    """Parse JSON of at most `MAX_PARTS` parts, and as many other values and `more_values`.

    Raises `InvalidArgumentError` for more of them, `ValueError` or `RecursionError` for what is no
    JSON; `where` begins the message of the former.
    """
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = bare.count(b'"') // 2
    if texts <= MAX_PARTS:
        bare = b"".join(bare.split(b'"')[::2])  # without what is in texts
        if texts + bare.count(b"[") + bare.count(b"{") <= MAX_PARTS:
            if bare.count(b",") <= MAX_PARTS + more_values:
                return json.loads(text.decode("utf-8-sig"), parse_int=_integer)
            raise InvalidArgumentError(
                f"{where}: at most {MAX_PARTS + more_values} values allowed; send fewer at a time"
            )
    raise InvalidArgumentError(
        f"{where}: at most {MAX_PARTS} names, texts, lists and objects allowed; send fewer at a "
        "time"
    )


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)

"""What a service says of the sessions that it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """Sessions that a service holds, and tokens its KV cache was asked for and had.

    `waiting` ones have no slot yet; `others` and `others_waiting` are those of `active` and
    `waiting` that are not of who asks.
    """

    active: int = 0
    limit: int = 0
    opened_total: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    waiting: int = 0
    others: int = 0
    others_waiting: int = 0

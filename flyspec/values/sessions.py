"""Counts of a service's sessions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """A service's sessions, and tokens looked up and found in its KV cache.

    `waiting` sessions have no slot yet; `others` and `others_waiting` are those of `active` and
    `waiting` that belong to other orchestrators than the caller.
    """

    active: int = 0
    limit: int = 0
    opened_total: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    waiting: int = 0
    others: int = 0
    others_waiting: int = 0

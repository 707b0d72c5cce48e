"""Counts of gaps, the costs of tokens in nats: raw log p(most likely token) - log p(token)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

GAP_EDGES_NATS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Where each bin begins; the last one has no end. They are narrow where thresholds lie."""


@dataclass(frozen=True)
class GapCounts:
    """Loose tokens, and rejected mismatches, by gap: one count for each bin."""

    loose: tuple[int, ...]
    rejected: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]]) -> GapCounts:
        """Count those of samples; what an older sample lacks is not counted."""
        return cls(
            *(
                _counts(gap for row in rows for gap in row[name] or ())
                for name in ("loose_gaps_nats", "rejected_gaps_nats")
            )
        )


def _counts(gaps: Iterable[float]) -> tuple[int, ...]:
    # Rounding may leave a gap of two equal probabilities below 0.
    values = np.maximum(np.fromiter(gaps, float), 0.0)
    return tuple(map(int, np.histogram(values, (*GAP_EDGES_NATS, np.inf))[0]))

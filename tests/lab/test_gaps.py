"""Counts of gaps by bin."""

from __future__ import annotations

from flyspec_lab.gaps import GAP_EDGES_NATS, GapCounts


def test_gaps_are_counted_in_bins_that_include_where_they_begin() -> None:
    rows = [
        {"loose_gaps_nats": [0.0, 0.04, 0.05], "rejected_gaps_nats": [11.9, 12.0, 400.0]},
        {"loose_gaps_nats": [-1e-7], "rejected_gaps_nats": None},  # of an older version
    ]
    counts = GapCounts.of(rows)
    assert (counts.loose[:3], sum(counts.loose)) == ((3, 1, 0), 4)
    assert (counts.rejected[-2:], sum(counts.rejected)) == ((1, 2), 3)
    assert len(counts.loose) == len(counts.rejected) == len(GAP_EDGES_NATS)
    assert sum(GapCounts.of([]).loose) == 0

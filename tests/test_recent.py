"""What does not pay is tried always for a while, then now and then, until it pays again."""

from __future__ import annotations

from flyspec.recent import PATIENCE, RARELY, Patience


def test_it_is_tried_less_until_it_pays() -> None:
    patience = Patience()
    assert all(patience.tries() for _ in range(PATIENCE))
    later = [patience.tries() for _ in range(5 * RARELY)]
    assert sum(later) == 5
    patience.paid()
    assert all(patience.tries() for _ in range(PATIENCE))
    assert not patience.tries()

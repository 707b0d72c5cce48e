"""Number of examples of a property: ten times as many with `--hypothesis-profile=full`."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> int:
    return 10 * number if settings.get_current_profile_name() == "full" else number

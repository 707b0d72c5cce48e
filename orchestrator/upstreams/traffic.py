"""Bytes that the rounds of a generation take on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Traffic:
    """Bytes of the rounds' messages to and from both services, before HTTP/2's framing.

    Messages of a round that had to be sent again count again; those that open sessions do not.
    """

    round_bytes: int = 0
    distribution_bytes: int = 0

    def count(self, message: Any) -> None:
        """Add a round's message."""
        self.round_bytes += message.ByteSize()

    def count_distributions(self, num_bytes: int) -> None:
        """Add bytes that carry drafts' distributions."""
        self.round_bytes += num_bytes
        self.distribution_bytes += num_bytes

"""What the services behind the orchestrator are told of a request: which one it is."""

from __future__ import annotations

from typing import Literal

Part = Literal["draft", "verify"]


class Correlation:
    """What a request's streams and messages carry, so that logs and spans of all services agree.

    `metadata` is that of its streams. This one has no id and is not traced.
    """

    metadata: tuple[tuple[str, str], ...] = ()

    def waits_for(self, part: Part, round_id: int) -> str:
        """A message is about to ask for that part of a round; the traceparent that it carries.

        Asked again, for another try, the same one. Empty if the request is not traced.
        """
        return ""


UNKNOWN = Correlation()

"""Commands of the laboratory; each is an entry point of the group `flyspec.commands`."""

from __future__ import annotations

from typing import Annotated

from flyspec.flags import Flag

Address = Annotated[str | None, Flag(
    "Address of a running stack.", default="start one for this command",
)]  # fmt: skip

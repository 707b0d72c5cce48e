"""`python -m draft_service`: the draft service as a process."""

from __future__ import annotations

from draft_service.server import serve
from flyspec import rpc
from flyspec.config import DraftSettings, from_command_line


def main() -> None:
    """Serve until told to stop."""
    rpc.run(serve(from_command_line(DraftSettings, "draft_service")))


if __name__ == "__main__":
    main()

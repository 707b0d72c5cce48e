"""`python -m verify_service`: load the target, warm it up, serve."""

from __future__ import annotations

from flyspec import rpc
from flyspec.config import VerifySettings, from_command_line
from verify_service.server import serve


def main() -> None:
    """Run until SIGTERM."""
    rpc.run(serve(from_command_line(VerifySettings, "verify_service")))


if __name__ == "__main__":
    main()

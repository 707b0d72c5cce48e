"""`python -m verify_service`: load the target, warm it up, serve."""

from __future__ import annotations

from flyspec.termination import end_on_sigterm


def main() -> None:
    """Run until SIGTERM."""
    end_on_sigterm()
    from flyspec import rpc
    from flyspec.config import VerifySettings, from_command_line
    from verify_service.server import serve

    rpc.run(serve(from_command_line(VerifySettings, "verify_service")))


if __name__ == "__main__":
    main()

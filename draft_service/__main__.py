"""`python -m draft_service`: run the draft service."""

from __future__ import annotations

from flyspec.startup import end_on_sigterm


def main() -> None:
    end_on_sigterm()
    from draft_service.server import serve
    from flyspec.config import DraftSettings, from_command_line
    from flyspec.serving import run

    run(serve(from_command_line(DraftSettings, "draft_service")))


if __name__ == "__main__":
    main()

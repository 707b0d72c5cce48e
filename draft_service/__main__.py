"""`python -m draft_service`: run the draft service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyspec.startup import end_on_sigterm

if TYPE_CHECKING:
    from flyspec.config import DraftSettings


def main() -> None:
    end_on_sigterm()
    from flyspec.config import DraftSettings
    from flyspec.serving import run
    from flyspec.settings_sources import environment_names, from_command_line

    settings = from_command_line(DraftSettings, "draft_service")
    run(_serve(settings), environment_names(DraftSettings))


async def _serve(settings: DraftSettings) -> None:
    from flyspec.preflight import check_draft

    check_draft(settings)
    from draft_service.server import serve

    await serve(settings)


if __name__ == "__main__":
    main()

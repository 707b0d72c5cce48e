"""`python -m verify_service`: load the target model, warm it up, serve."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flyspec.startup import end_on_sigterm, large_imports

if TYPE_CHECKING:
    from flyspec.config import VerifySettings


def main() -> None:
    """Run until SIGTERM."""
    end_on_sigterm()
    from flyspec.config import VerifySettings
    from flyspec.serving import run
    from flyspec.settings_sources import environment_names, from_command_line

    settings = from_command_line(VerifySettings, "verify_service")
    run(_serve(settings), environment_names(VerifySettings))


async def _serve(settings: VerifySettings) -> None:
    from flyspec.openmp import openmp_environment
    from flyspec.preflight import check_verify

    check_verify(settings)
    os.environ.update(openmp_environment(settings.model, settings.heads))
    with large_imports():  # torch, after the settings have been checked
        from verify_service.server import serve

    await serve(settings)


if __name__ == "__main__":
    main()

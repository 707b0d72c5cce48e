"""`python -m orchestrator`: connect to the draft and verify services, serve clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyspec.startup import end_on_sigterm

if TYPE_CHECKING:
    from flyspec.config import OrchestratorSettings


def main() -> None:
    end_on_sigterm()
    from flyspec.config import OrchestratorSettings
    from flyspec.serving import run
    from flyspec.settings_sources import environment_names, from_command_line

    settings = from_command_line(OrchestratorSettings, "orchestrator")
    run(_serve(settings), environment_names(OrchestratorSettings))


async def _serve(settings: OrchestratorSettings) -> None:
    from flyspec.preflight import check_orchestrator

    check_orchestrator(settings)
    from orchestrator.server import serve

    await serve(settings)


if __name__ == "__main__":
    main()

"""`python -m orchestrator`: connect to the draft and verify services, serve clients."""

from __future__ import annotations

from flyspec.startup import end_on_sigterm


def main() -> None:
    end_on_sigterm()
    from flyspec.config import OrchestratorSettings, from_command_line
    from flyspec.serving import run
    from orchestrator.server import serve

    run(serve(from_command_line(OrchestratorSettings, "orchestrator")))


if __name__ == "__main__":
    main()

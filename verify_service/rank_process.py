"""`python -m verify_service.rank_process`: a rank started by rank 0 on its own host.

The settings arrive on standard input, which closes when rank 0 ends for whatever reason.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from flyspec.startup import large_imports


def main() -> None:
    """Run the rank until rank 0 stops."""
    # Ctrl-C in a terminal reaches all processes; rank 0 stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    document = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_parent, name="end_with_parent", daemon=True).start()
    with large_imports():
        from flyspec.config import VerifySettings
        from flyspec.errors import FlyspecError
        from flyspec.telemetry import configure_logging
        from verify_service.ranks import find_place, follow

    settings = VerifySettings.model_validate_json(document)
    place = find_place(settings)
    assert place is not None
    configure_logging(f"verify[{place.rank}]", settings.log_level, settings.log_format)
    try:
        follow(settings, place, parent)
    except FlyspecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(os.EX_TEMPFAIL)  # a restart may work


if __name__ == "__main__":
    main()

"""Runs a service as a child: `python -m flyspec.cli.child MODULE FLAGS...`.

The parent holds the other end of standard input. When that closes, however the parent ended, the
service gets SIGTERM, and is killed some seconds later if it is still running.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

ORPHAN_GRACE_S = 5.0


def _follow_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_follow_parent, name="follow-parent", daemon=True).start()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

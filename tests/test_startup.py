"""Before a service can serve, it exits on SIGTERM and reports errors early."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

IMPORTING = """
import time
from flyspec.startup import end_on_sigterm

end_on_sigterm()
print("importing", flush=True)
try:  # as libraries do around what is optional
    time.sleep(60)
except BaseException:
    time.sleep(60)
"""


def test_an_import_that_catches_everything_does_not_outlive_sigterm() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", IMPORTING], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"importing\n"
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 128 + signal.SIGTERM
    assert errors == b""


@pytest.mark.usefixtures("default_ports")
def test_what_is_wrong_with_a_model_is_said_before_torch_is_imported() -> None:
    for module in ("verify_service", "draft_service"):
        code = (
            "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); "
            f"runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "--model", "/nowhere", "--metrics-port", "-1"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "--model /nowhere: no such directory" in done.stderr
        assert done.stdout == "False\n"

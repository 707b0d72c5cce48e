"""Runs generated Python beside its tests where it can do no harm: `run_tests`.

`bubblewrap` builds the command, `system_calls` the filter of system calls, `inside` is what runs
in there. There is no fallback: where bubblewrap is missing or does not work, code is not run.
"""

from __future__ import annotations

from flyspec_lab.sandbox.bubblewrap import SandboxLimits as SandboxLimits
from flyspec_lab.sandbox.execution import Execution as Execution
from flyspec_lab.sandbox.execution import check_sandbox as check_sandbox
from flyspec_lab.sandbox.execution import run_tests as run_tests

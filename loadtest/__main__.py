"""Load tests of a running flyspec: `python -m loadtest SCENARIO --address HOST:PORT`.

Exits with 0 if every goal was met and every check passed, 1 if not, 2 if the test could not run.
"""

from __future__ import annotations

import sys

try:
    import loadtest.patched  # noqa: F401  before anything that gevent has to patch
except ImportError as missing:
    print(
        f"error: load tests need locust ({missing}); install it, in the checkout, with: pip "
        "install -e '.[loadtest]'",
        file=sys.stderr,
    )
    sys.exit(2)

# isort: split
from functools import partial

from flyspec.cli.program import run, say
from loadtest.run import run_test
from loadtest.scenarios import scenario_app

app = scenario_app("Test a running flyspec under load (docs/load.md).", partial(run_test, say=say))

if __name__ == "__main__":
    run(app)

"""Evidence for rules: tasks, recorded samples, statistics, studies and trained judges.

What measures speed is in `flyspec_lab.bench`.
"""

from importlib.util import find_spec

from flyspec.errors import ConfigError

_NEEDED = {"pyarrow": "pyarrow", "scipy": "scipy", "sklearn": "scikit-learn"}
"""The packages of the extra `lab`, by the name under which they are imported."""


def check_installed(command: str) -> None:
    """Raise `ConfigError` if something of the extra `lab`, which `command` needs, is missing."""
    if missing := next((name for name in _NEEDED if find_spec(name) is None), None):
        raise ConfigError(
            f"{command} needs {_NEEDED[missing]}; install it with: pip install 'flyspec[lab]'"
        )

"""flyspec's version, from which the package's metadata, `--version` and metrics have it."""

__version__ = "0.1.0"

"""A name that `bench.fuzz` still imports from here."""

from loadtest.admin import left_open

__all__ = ["left_open"]

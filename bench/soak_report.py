"""Names that `bench.fuzz` still imports from here."""

from loadtest.sampler import Growth, ProcessMemory, growth

__all__ = ["Growth", "ProcessMemory", "growth"]

"""Stacks for benchmarks, with extra flags and other modules for single services."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flyspec.cli.stack import Stack, StackOptions


class BenchStack(Stack):
    """A stack with additional `flags`, and replacement `modules`, for its services.

    The keys of both are `draft`, `verify` and `orchestrator`.
    """

    def __init__(
        self,
        options: StackOptions,
        flags: Mapping[str, Sequence[str]],
        modules: Mapping[str, str] | None = None,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(options, on_event)
        self._flags, self._modules = flags, modules or {}

    def module_of(self, name: str) -> str:
        """The replacement module, or else the service's own."""
        return self._modules.get(name) or super().module_of(name)

    def flags_of(self, name: str) -> list[str]:
        """The service's own flags, followed by the additional ones."""
        return [*super().flags_of(name), *self._flags.get(name, ())]

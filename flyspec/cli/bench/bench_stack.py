"""Stacks that a bench starts otherwise than `flyspec serve` does: flags and modules by service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flyspec.cli.stack import Stack, StackOptions


class BenchStack(Stack):
    """`flags` go to a service beside its own; `modules` run in the place of its own.

    Both are by `draft`, `verify` and `orchestrator`.
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
        """The one given in its place, if there is one."""
        return self._modules.get(name) or super().module_of(name)

    def flags_of(self, name: str) -> list[str]:
        """Its own, and those given beside them."""
        return [*super().flags_of(name), *self._flags.get(name, ())]

"""Commands of the laboratory; each is an entry point of the group `flyspec.commands`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.cli.stack import Stack
    from flyspec.values.admin import ModelInfo

Address = Annotated[str | None, Flag(
    "Address of a running stack.", default="start one for this command",
)]  # fmt: skip


def models_of(target: ModelInfo, stack: Stack | None) -> dict[str, Any]:
    """Return facts about the models for a report; of a running stack, only the target's."""
    names = ("threads", "draft_threads", "draft_model", "tensor_parallel_size")
    return {
        "target": target.name,
        "dtype": target.dtype,
        "device": target.device,
        **{name: getattr(stack.options, name) if stack else None for name in names},
    }

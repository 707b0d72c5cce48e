"""Flags of commands that start a stack on this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from flyspec.cli.stack import StackOptions

Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]

_STACK = "Of a stack started on this machine"


@dataclass(frozen=True)
class ModelFlags:
    """Which models to start, on what, and with which rules."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Target model, a directory or hub id; the bundled pair if not given.",
            rich_help_panel=_STACK,
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Draft model, a directory or hub id; '' drafts by prompt lookup only.",
            rich_help_panel=_STACK,
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(help="Of the target: cpu, cuda, cuda:N or auto.", rich_help_panel=_STACK),
    ] = "auto"
    draft_device: Annotated[
        str | None,
        typer.Option(
            help="Of the draft model.", show_default="as --device", rich_help_panel=_STACK
        ),
    ] = None
    dtype: Annotated[
        Dtype, typer.Option(help="Of the target's weights.", rich_help_panel=_STACK)
    ] = "auto"
    draft_dtype: Annotated[
        Dtype, typer.Option(help="Of the draft model's weights.", rich_help_panel=_STACK)
    ] = "auto"
    threads: Annotated[
        int,
        typer.Option(
            help="CPU threads of the target.",
            min=0,
            show_default="half of the cores",
            rich_help_panel=_STACK,
        ),
    ] = 0
    draft_threads: Annotated[
        int,
        typer.Option(
            help="CPU threads of the draft model.",
            min=0,
            show_default="half of the cores",
            rich_help_panel=_STACK,
        ),
    ] = 0
    batch_invariant: Annotated[
        bool | None,
        typer.Option(
            "--batch-invariant/--no-batch-invariant",
            help="Logits that do not depend on what else a step consists of, bit for bit.",
            show_default="in bfloat16 on CPUs where that costs little",
            rich_help_panel=_STACK,
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            help="Processes that share the target, a GPU each or the CPU threads among them.",
            min=1,
            rich_help_panel=_STACK,
        ),
    ] = 1

    rules_file: Annotated[
        str | None,
        typer.Option(
            help="TOML file of named rules and of limits to what requests may ask for.",
            rich_help_panel=_STACK,
        ),
    ] = None

    def given(self) -> list[str]:
        """The flags that differ from their defaults, as they are typed."""
        return [
            "--" + f.name.replace("_", "-")
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]

    def to_stack_options(self, **more: Any) -> StackOptions:
        """What to start; `more` sets what these flags do not."""
        from flyspec.cli.stack import StackOptions

        return StackOptions(**vars(self), **more)

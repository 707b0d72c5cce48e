"""Flags that several commands share, as dataclasses, and how a command takes them.

A command marked `with_flags` may have parameters whose type is one of these dataclasses; each field
becomes a flag, and the command gets one value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

if TYPE_CHECKING:
    from flyspec.cli.stack import StackOptions
    from flyspec.client import GenerateOptions
    from flyspec.types import Rule

Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]
Color = Literal["auto", "always", "never"]
Measure = Literal["normalized", "top_k"]

_MODELS = "Models (started on this machine)"
_SAMPLING = "Sampling"
_SPECULATION = "Speculation"


@dataclass(frozen=True)
class ModelFlags:
    """Which models to start, and on what."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Target model, a directory or hub id; the bundled pair if not given.",
            rich_help_panel=_MODELS,
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Draft model, a directory or hub id; '' drafts by prompt lookup only.",
            rich_help_panel=_MODELS,
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(help="Of the target: cpu, cuda, cuda:N or auto.", rich_help_panel=_MODELS),
    ] = "auto"
    draft_device: Annotated[
        str | None,
        typer.Option(
            help="Of the draft model.", show_default="as --device", rich_help_panel=_MODELS
        ),
    ] = None
    dtype: Annotated[
        Dtype, typer.Option(help="Of the target's weights.", rich_help_panel=_MODELS)
    ] = "auto"
    draft_dtype: Annotated[
        Dtype, typer.Option(help="Of the draft model's weights.", rich_help_panel=_MODELS)
    ] = "auto"
    threads: Annotated[
        int,
        typer.Option(
            help="CPU threads of the target.",
            min=0,
            show_default="half of the cores",
            rich_help_panel=_MODELS,
        ),
    ] = 0
    draft_threads: Annotated[
        int,
        typer.Option(
            help="CPU threads of the draft model.",
            min=0,
            show_default="half of the cores",
            rich_help_panel=_MODELS,
        ),
    ] = 0

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


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen and where the output ends."""

    temperature: Annotated[
        float, typer.Option(help="0 is greedy decoding.", rich_help_panel=_SAMPLING)
    ] = 0.0
    top_p: Annotated[
        float, typer.Option(help="Nucleus mass, in (0, 1].", rich_help_panel=_SAMPLING)
    ] = 1.0
    top_k: Annotated[
        int,
        typer.Option(
            help="Most likely tokens kept; 0 keeps all.", min=0, rich_help_panel=_SAMPLING
        ),
    ] = 0
    seed: Annotated[
        int | None,
        typer.Option(help="Of the sampling; drawn if not given.", min=0, rich_help_panel=_SAMPLING),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends the output; repeatable.", rich_help_panel=_SAMPLING),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end.", rich_help_panel=_SAMPLING)
    ] = False


@dataclass(frozen=True)
class RuleFlags:
    """The acceptance rule and its parameters; None takes the preset's."""

    fly_window_size: Annotated[
        int | None,
        typer.Option(
            help="W: matches that must follow a loose token.", min=0, rich_help_panel=_SPECULATION
        ),
    ] = None
    fly_entropy_threshold: Annotated[
        float | None,
        typer.Option(
            help="θ: entropy from which a mismatch may stand.", rich_help_panel=_SPECULATION
        ),
    ] = None
    fly_entropy_top_k: Annotated[
        int | None,
        typer.Option(help="k of the top_k entropy.", min=0, rich_help_panel=_SPECULATION),
    ] = None
    entropy_measure: Annotated[
        Measure | None,
        typer.Option(help="How entropy is measured.", rich_help_panel=_SPECULATION),
    ] = None

    def to_rule(self, name: str) -> Rule:
        """The rule of this name with these parameters; an empty name is the server's default."""
        from flyspec.types import EntropyMeasure, Rule

        measure = self.entropy_measure
        return Rule(
            name=name,
            fly_window_size=self.fly_window_size,
            fly_entropy_threshold=self.fly_entropy_threshold,
            fly_entropy_top_k=self.fly_entropy_top_k,
            entropy_measure=EntropyMeasure[measure.upper()] if measure else None,
        )


@dataclass(frozen=True)
class SpeculationFlags:
    """How the output is sped up, and what may be lost."""

    rule: Annotated[
        str,
        typer.Option(
            help="exact, fly, fly-paper or fly-reference.",
            show_default="the server's",
            rich_help_panel=_SPECULATION,
        ),
    ] = ""
    drafter: Annotated[
        str,
        typer.Option(
            help="model, prompt_lookup or multi_level.",
            show_default="the server's",
            rich_help_panel=_SPECULATION,
        ),
    ] = ""
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            help="K: most drafted tokens a round; 0 is plain decoding.",
            min=0,
            show_default="the server's",
            rich_help_panel=_SPECULATION,
        ),
    ] = None
    max_loose_tokens: Annotated[
        int | None,
        typer.Option(help="Most loosely accepted tokens.", min=0, rich_help_panel=_SPECULATION),
    ] = None
    max_loose_cost_nats: Annotated[
        float | None,
        typer.Option(help="Most that they may cost together.", rich_help_panel=_SPECULATION),
    ] = None
    exact_prefix_tokens: Annotated[
        int,
        typer.Option(
            help="First tokens that are judged exactly.", min=0, rich_help_panel=_SPECULATION
        ),
    ] = 0


def to_generate_options(
    max_tokens: int, sampling: SamplingFlags, speculation: SpeculationFlags, rule: RuleFlags
) -> GenerateOptions:
    """What the flags ask of the server."""
    from flyspec.client import GenerateOptions
    from flyspec.types import SamplingParams

    return GenerateOptions(
        sampling=SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k),
        seed=sampling.seed,
        max_tokens=max_tokens,
        stop=tuple(sampling.stop or ()),
        ignore_eos=sampling.ignore_eos,
        drafter=speculation.drafter,
        rule=rule.to_rule(speculation.rule),
        num_speculative_tokens=speculation.num_speculative_tokens,
        max_loose_tokens=speculation.max_loose_tokens,
        max_loose_cost_nats=speculation.max_loose_cost_nats,
        exact_prefix_tokens=speculation.exact_prefix_tokens,
    )


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's dataclass parameters by one flag a field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            groups[name] = hints[name]
            fields = get_type_hints(hints[name], globals(), include_extras=True)
            for f in dataclasses.fields(hints[name]):
                parameters[f.name] = inspect.Parameter(
                    f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default,
                    annotation=fields[f.name],
                )  # fmt: skip
        else:
            parameters[name] = parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]
            )

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)})
        command(**values)

    wrapper.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    wrapper.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    del wrapper.__wrapped__
    return wrapper

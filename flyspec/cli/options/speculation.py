"""Flags that say how the output is sped up, by which rule, and what may be lost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flyspec.rules import PARAMETERS, Parameter, Rule, member_name
from flyspec.rules.presets import RULE_PRESETS

_SPECULATION = "Speculation"
_RULE = "Parameters of the rule (those that it does not have are refused)"


def _flag(parameter: Parameter) -> Any:
    """The type of a parameter's flag: its kind, help and default, and a whole number's least."""
    rules = [name for name, preset in RULE_PRESETS.items() if parameter.name in preset.defaults]
    defaults: dict[str, list[str]] = {}
    for name in rules:
        value = RULE_PRESETS[name].defaults[parameter.name]
        shown = "min(6, K - 1)" if value is None else parameter.show(value)
        defaults.setdefault(shown, []).append(name)
    default = "; ".join(f"{', '.join(names)} {shown}" for shown, names in defaults.items())
    ranges = "; ".join(dict.fromkeys(map(str, parameter.ranges.values())))
    facts = ", ".join(filter(None, (parameter.symbol, ranges)))
    kind: Any = parameter.kind
    if parameter.members:
        kind = Literal[tuple(member_name(m) for m in parameter.members)]
    least = [range_.low for range_ in parameter.ranges.values() if range_.integers]
    option = typer.Option(
        help=f"{rules[0]}{', ...' if rules[1:] else ''}: {parameter.help}"
        f"{facts and f' ({facts})'}.",
        min=least[0] if least else None,
        show_default=default if defaults.keys() - {shown} else shown,
        rich_help_panel=_RULE,
    )
    return Annotated[kind | None, option]


@dataclass(frozen=True)
class _RuleFlags:
    """The acceptance rule's parameters, a flag each; None takes the preset's."""

    guarded_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            "--guarded-token-id",
            metavar="ID",
            help="A token never accepted loosely, nor given up for one that is; repeatable.",
            min=0,
            rich_help_panel=_RULE,
        ),
    ] = None

    def to_rule(self, name: str) -> Rule:
        """The rule of this name with these parameters; an empty name is the server's default."""
        values: dict[str, Any] = {}
        for parameter in PARAMETERS.values():
            value = getattr(self, parameter.name)
            named = parameter.members and value is not None
            values[parameter.name] = parameter.read(value) if named else value
        return Rule(name, **values, guarded_token_ids=tuple(self.guarded_token_ids or ()))


if TYPE_CHECKING:
    RuleFlags = _RuleFlags
else:
    RuleFlags = dataclasses.make_dataclass(
        "RuleFlags",
        [(p.name, _flag(p), None) for p in PARAMETERS.values()],
        bases=(_RuleFlags,),
        frozen=True,
    )


@dataclass(frozen=True)
class SpeculationFlags:
    """How the output is sped up, and what may be lost."""

    rule: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(RULE_PRESETS)}; or one that the server's rules file names.",
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
        typer.Option(
            help="Most loosely accepted tokens; then it goes on exactly.",
            min=0,
            show_default="without bound",
            rich_help_panel=_SPECULATION,
        ),
    ] = None
    max_loose_cost_nats: Annotated[
        float | None,
        typer.Option(
            help="Most that they may cost together, nats; then it goes on exactly.",
            show_default="without bound",
            rich_help_panel=_SPECULATION,
        ),
    ] = None
    exact_prefix_tokens: Annotated[
        int,
        typer.Option(
            help="First tokens that are judged exactly.", min=0, rich_help_panel=_SPECULATION
        ),
    ] = 0
    eager: Annotated[
        bool,
        typer.Option(
            "--eager",
            help="Show tokens before their window closes; a terminal redraws those that do not "
            "stand, a file or pipe gets final text all the same.",
            rich_help_panel=_SPECULATION,
        ),
    ] = False
    no_loop_guard: Annotated[
        bool,
        typer.Option(
            "--no-loop-guard",
            help="Do not turn exact when the output begins to repeat itself.",
            rich_help_panel=_SPECULATION,
        ),
    ] = False

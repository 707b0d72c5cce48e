"""Flags that say how the output is sped up, by which rule, and what may be lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flyspec.validation import DEFAULT_ENTROPY_TOP_K, RULE_PRESETS

if TYPE_CHECKING:
    from flyspec.rules import Rule

Measure = Literal["normalized", "top_k"]
Scope = Literal["within_round", "across_rounds"]
DivergenceName = Literal["js", "kl", "tv"]

_SPECULATION = "Speculation"
_RULE = "Parameters of the rule (those that it does not have are refused)"
_THE_RULES = "the rule's"


def _default_of(rule: str, name: str) -> str:
    """A preset's own value, as help shows it."""
    return f"{RULE_PRESETS[rule].defaults[name]:g}"


@dataclass(frozen=True)
class RuleFlags:
    """The acceptance rule's parameters; None takes the preset's."""

    fly_window_size: Annotated[
        int | None,
        typer.Option(
            help="W: matches that must follow a loosely accepted token, 0 to 1024; 0 is no window.",
            min=0,
            show_default=_THE_RULES,
            rich_help_panel=_RULE,
        ),
    ] = None
    window_scope: Annotated[
        Scope | None,
        typer.Option(
            help="Whether they must follow in the same round; across rounds the token is held back "
            "until they have.",
            show_default=_THE_RULES,
            rich_help_panel=_RULE,
        ),
    ] = None
    fly_entropy_threshold: Annotated[
        float | None,
        typer.Option(
            help="fly, ...: θ, the target's entropy from which a mismatch may stand: 0 to 1 for "
            "normalized, 0 to 20 nats for top_k.",
            show_default=_default_of("fly", "fly_entropy_threshold"),
            rich_help_panel=_RULE,
        ),
    ] = None
    entropy_measure: Annotated[
        Measure | None,
        typer.Option(
            help="fly, ...: entropy over log|V|, or of the k most likely tokens in nats.",
            show_default=_THE_RULES,
            rich_help_panel=_RULE,
        ),
    ] = None
    fly_entropy_top_k: Annotated[
        int | None,
        typer.Option(
            help="fly, ...: k of the top_k entropy, 2 to 1024.",
            min=2,
            show_default=str(DEFAULT_ENTROPY_TOP_K),
            rich_help_panel=_RULE,
        ),
    ] = None
    margin_threshold: Annotated[
        float | None,
        typer.Option(
            help="margin: τ, nats by which the target may prefer its own token, 0 to 100.",
            show_default=_default_of("margin", "margin_threshold"),
            rich_help_panel=_RULE,
        ),
    ] = None
    divergence: Annotated[
        DivergenceName | None,
        typer.Option(
            help="fuzzy, ...: how target and draft are compared.",
            show_default=RULE_PRESETS["fuzzy"].defaults["divergence"].name.lower(),
            rich_help_panel=_RULE,
        ),
    ] = None
    divergence_threshold: Annotated[
        float | None,
        typer.Option(
            help="fuzzy, ...: T, the divergence below which a mismatch may stand, 0 to 100.",
            show_default=f"{_default_of('fuzzy', 'divergence_threshold')}; fuzzy-reference "
            f"{_default_of('fuzzy-reference', 'divergence_threshold')}",
            rich_help_panel=_RULE,
        ),
    ] = None
    divergence_top_k: Annotated[
        int | None,
        typer.Option(
            help="fuzzy: compares so many most likely tokens and the rest as one; rejection: "
            "drafts from so many. 0 is the whole vocabulary, at most 1024.",
            min=0,
            show_default=f"{_default_of('fuzzy', 'divergence_top_k')}; rejection "
            f"{_default_of('rejection', 'divergence_top_k')}",
            rich_help_panel=_RULE,
        ),
    ] = None
    typical_epsilon: Annotated[
        float | None,
        typer.Option(
            help="typical: ε, a probability that is always enough, 0 to 1.",
            show_default=_default_of("typical", "typical_epsilon"),
            rich_help_panel=_RULE,
        ),
    ] = None
    typical_delta: Annotated[
        float | None,
        typer.Option(
            help="typical: δ, where δ·exp(-entropy) is less than ε that is enough, 0 to 100.",
            show_default=_default_of("typical", "typical_delta"),
            rich_help_panel=_RULE,
        ),
    ] = None
    random_acceptance: Annotated[
        float | None,
        typer.Option(
            help="random: probability that a mismatch stands, 0 to 1.",
            show_default=_default_of("random", "random_acceptance"),
            rich_help_panel=_RULE,
        ),
    ] = None
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
        from flyspec.rules import Divergence, EntropyMeasure, Rule, WindowScope

        values: dict[str, Any] = dict(vars(self))
        for field, enum in (
            ("entropy_measure", EntropyMeasure),
            ("window_scope", WindowScope),
            ("divergence", Divergence),
        ):
            values[field] = enum[values[field].upper()] if values[field] else None
        values["guarded_token_ids"] = tuple(self.guarded_token_ids or ())
        return Rule(name, **values)


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

"""Flags that say how tokens are chosen and what is returned, and the whole request of all flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from flyspec.cli.options.speculation import RuleFlags, SpeculationFlags

if TYPE_CHECKING:
    from flyspec.client import GenerateOptions
    from flyspec.values.tokens import SamplingParams

_SAMPLING = "Sampling"


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen, where the output ends, what is told of each token."""

    temperature: Annotated[
        float,
        typer.Option(help="0 is greedy decoding; else 0.001 to 100.", rich_help_panel=_SAMPLING),
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
    min_p: Annotated[
        float,
        typer.Option(
            help="Drops tokens below this share of the most likely one's probability, 0 to 1.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(
            help="Divides positive logits of tokens in prompt or output, multiplies negative ones; "
            "above 0, at most 10.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        typer.Option(
            help="Taken off the logits of tokens in the output, -2 to 2.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        typer.Option(
            help="Taken off once for every time that the token is in the output, -2 to 2.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=BIAS",
            help="Added to the logit of a token id, -100 to 100; repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    min_tokens: Annotated[
        int,
        typer.Option(
            help="No end of sequence before so many tokens; at most --max-tokens.",
            min=0,
            rich_help_panel=_SAMPLING,
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
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: each token's log-probability under the target, and those of so many "
            "most likely tokens, 0 to 20.",
            min=0,
            rich_help_panel=_SAMPLING,
        ),
    ] = None

    def to_sampling(self) -> SamplingParams:
        """The sampling parameters. Raises `typer.BadParameter` for a bias it cannot read."""
        from flyspec.values.tokens import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias or []),
            min_tokens=self.min_tokens,
        )


def _biases(texts: list[str]) -> tuple[tuple[int, float], ...]:
    """Biases by token id, from ID=BIAS each."""
    biases: dict[int, float] = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            number, value = int(token_id), float(bias)
        except ValueError:
            raise typer.BadParameter(
                f"--logit-bias {text!r}: write a token id and a number, such as 42=-1.5"
            ) from None
        if number in biases:
            raise typer.BadParameter(f"--logit-bias: token {number} is given twice")
        biases[number] = value
    return tuple(sorted(biases.items()))


def to_generate_options(
    max_tokens: int, sampling: SamplingFlags, speculation: SpeculationFlags, rule: RuleFlags
) -> GenerateOptions:
    """What the flags ask of the server."""
    from flyspec.client import GenerateOptions

    return GenerateOptions(
        sampling=sampling.to_sampling(),
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
        eager=speculation.eager,
        disable_loop_guard=speculation.no_loop_guard,
        logprobs=sampling.logprobs,
    )

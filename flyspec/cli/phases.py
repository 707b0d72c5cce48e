"""`--until` and `--then`: phases of the output on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from flyspec.cli.conditions import parse_phase, parse_until
from flyspec.flags import Flag
from flyspec.values.phases import Phase
from flyspec.values.requests import GenerateOptions

# fmt: off
Until = Annotated[Sequence[str], Flag(
    "Text in the output after which the rule of the --then behind it holds, or token:ID; "
    "repeatable.", group="Speculation", metavar="TEXT",
)]
Then = Annotated[Sequence[str], Flag(
    "Acceptance rule after the text of --until, with parameters as in "
    "relaxed:relaxed_delta=0.02,max_loose_tokens=5; repeatable.", group="Speculation",
    metavar="RULE",
)]
# fmt: on


def with_phases(
    options: GenerateOptions, until: Sequence[str], then: Sequence[str]
) -> GenerateOptions:
    """Return options with the phases of these flags, in their order; without any, as they are.

    The first phase has the options' own rule. Raises `typer.BadParameter`.
    """
    if len(until) != len(then):
        raise typer.BadParameter(
            f"--until: give one --then for each, the rule after that text; there are {len(until)} "
            f"--until and {len(then)} --then"
        )
    if not until:
        return options
    if "" in until:
        raise typer.BadParameter("--until: is empty; give a text")
    phases = [Phase()]
    for text, rule in zip(until, then, strict=True):
        end = parse_until(text)
        phases[-1] = replace(phases[-1], until=end.until, until_token_ids=end.until_token_ids)
        try:
            phases.append(parse_phase(rule))
        except ValueError as error:
            raise typer.BadParameter(f"--then: {error}") from None
    return replace(options, phases=tuple(phases))

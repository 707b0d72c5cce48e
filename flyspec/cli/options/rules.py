"""The flags of an acceptance rule: its name, and its parameters from the table of rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from flyspec.flags import UINT32, Flag
from flyspec.rules import PARAMETERS, Parameter, member_name
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.generation import SERVERS

_RULE = "Rule parameters (an error if the rule does not have them)"


def _flag(parameter: Parameter) -> tuple[Any, Flag]:
    """Return the type of a parameter's flag, and the flag."""
    defaults: dict[str, list[str]] = {}
    for name, preset in RULE_PRESETS.items():
        if parameter.name in preset.defaults:
            value = preset.defaults[parameter.name]
            shown = "min(6, K - 1)" if value is None else parameter.show(value)
            defaults.setdefault(shown, []).append(name)
    default = "; ".join(f"{shown} for {', '.join(names)}" for shown, names in defaults.items())
    ranges = "; ".join(dict.fromkeys(map(str, parameter.ranges.values())))
    facts = ", ".join(filter(None, (parameter.symbol, ranges)))
    members = tuple(map(member_name, parameter.members or ()))
    kind: Any = Literal[members] if members else parameter.kind
    return kind | None, Flag(
        f"{parameter.help[0].upper()}{parameter.help[1:]}{facts and f' ({facts})'}.",
        next((range_ for range_ in parameter.ranges.values() if range_.integers), None),
        default=default,
        group=_RULE,
        read=parameter.read if members else None,
    )


RULE_FLAGS: Mapping[str, tuple[Any, Flag]] = {
    "name": (str, Flag(
        f"Acceptance rule: {', '.join(RULE_PRESETS)}; or one from the server's rules file.",
        default=SERVERS, group="Speculation", name="--rule",
    )),
    "guarded_token_ids": (tuple[int, ...], Flag(
        "Never accept this token loosely, nor another token in its place; repeatable.",
        UINT32, group=_RULE, name="--guarded-token-id", metavar="ID",
    )),
    **{name: _flag(parameter) for name, parameter in PARAMETERS.items()},
}  # fmt: skip

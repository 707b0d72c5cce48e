"""The rules that requests may name, with their parameters, for the page's controls."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.rule_files import RuleBook
from flyspec.rules import PARAMETERS, Parameter, Rule, member_name
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule
from flyspec.values.admin import JudgeInfo

_TYPES = {bool: "boolean", int: "integer", float: "number"}


def rule_documents(
    names: Iterable[str], book: RuleBook, k: int, judge: JudgeInfo | None
) -> list[dict[str, Any]]:
    """Return the rules as they are resolved for the requested K, and the target's judge."""
    return [_rule(name, book, k, judge) for name in names]


def _rule(name: str, book: RuleBook, k: int, judge: JudgeInfo | None) -> dict[str, Any]:
    try:
        resolved = book.resolve(Rule(name), k, judge)
    except InvalidArgumentError:  # its own parameters are beyond the operator's limits
        resolved = resolve_rule(Rule(name), k)
    preset = RULE_PRESETS[resolved.name]
    return {
        "name": name,
        "preset": resolved.name,
        "accepts": preset.accepts,
        "lossless": preset.lossless,
        "token_exact": preset.token_exact,
        "parameters": [
            _parameter(PARAMETERS[parameter], getattr(resolved, parameter))
            for parameter in PARAMETERS
            if parameter in preset.defaults
        ],
    }


def _parameter(parameter: Parameter, default: Any) -> dict[str, Any]:
    members = parameter.members
    return {
        "name": parameter.name,
        "symbol": parameter.symbol,
        "help": parameter.help,
        "unit": parameter.unit,
        "type": "choice" if members else _TYPES[parameter.kind],
        "choices": [member_name(member) for member in members or ()],
        "default": member_name(default) if isinstance(default, IntEnum) else default,
        "measured_by": parameter.measured_by,
        "ranges": [
            {
                "measure": None if measure is None else member_name(measure),
                "minimum": range_.low,
                "maximum": range_.high,
            }
            for measure, range_ in parameter.ranges.items()
        ],
    }

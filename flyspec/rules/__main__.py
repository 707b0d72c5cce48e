"""Writes the tables of a document about rules anew: `python -m flyspec.rules docs/rules.md`.

A table stands between `<!-- rules -->`, `<!-- parameters NAME ... -->` or `<!-- limits -->` and
`<!-- end -->`; everything else stays as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flyspec.rules import PARAMETERS, Parameter, Rule
from flyspec.rules.presets import RULE_PRESETS, RulePreset
from flyspec.rules.resolve import resolve_rule

_TABLE = re.compile(
    r"(<!-- (rules|parameters|limits)((?: [a-z-]+)*) -->\n).*?(<!-- end -->)", re.DOTALL
)


def write_tables(document: str) -> str:
    """The document with its tables as the rules are declared."""
    tables = {"rules": _rules, "parameters": _parameters, "limits": _limits}

    def table(found: re.Match[str]) -> str:
        begin, kind, names, end = found.groups()
        rows = tables[kind](*names.split())
        return begin + "".join(f"| {' | '.join(row)} |\n" for row in rows) + end

    return _TABLE.sub(table, document)


def _head(*cells: str) -> list[tuple[str, ...]]:
    return [cells, ("---",) * len(cells)]


def _rules() -> Iterable[tuple[str, ...]]:
    """Every rule with its criterion, window and needs."""
    yield from _head(
        "rule", "a mismatch may stand if", "window", "draft's distribution", "lossless"
    )
    for name, preset in RULE_PRESETS.items():
        lossless = "yes" if preset.lossless else "no"
        yield f"`{name}`", preset.accepts, _window(preset), _draft(preset), lossless


def _window(preset: RulePreset) -> str:
    window = preset.defaults.get("fly_window_size", 0)
    if window == 0:
        return "" if preset.lossless else "none"
    scope = preset.defaults.get("window_scope")
    reach = "" if scope is None else f", {scope.name.lower().replace('_', ' ')}"
    counts = ", the mismatch included" if preset.counts_mismatch else ""
    return f"W = {_value(window)}{reach}{counts}"


def _draft(preset: RulePreset) -> str:
    if preset.draft is None:
        return "–"
    top_k = 0 if preset.draft.whole else preset.defaults["divergence_top_k"]
    return (f"top {top_k}" if top_k else "whole") + "; none if greedy" * preset.draft.drawn_from


def _parameters(*names: str) -> Iterable[tuple[str, ...]]:
    """The parameters of some rules, their ranges and values."""
    yield from _head("parameter", "range", *(f"`{name}`" for name in names))
    for parameter in PARAMETERS.values():
        if any(parameter.name in RULE_PRESETS[name].defaults for name in names):
            values = (_default(name, parameter) for name in names)
            yield _called(parameter), _range(parameter), *values


def _called(parameter: Parameter) -> str:
    return f"`{parameter.name}`" + (f" ({parameter.symbol})" if parameter.symbol else "")


def _range(parameter: Parameter) -> str:
    if not parameter.ranges:
        values = parameter.members or (False, True)
        return ", ".join(f"`{parameter.show(value)}`" for value in values)
    shown = "; ".join(dict.fromkeys(map(str, parameter.ranges.values())))
    return " ".join(filter(None, (shown, parameter.unit)))


def _default(name: str, parameter: Parameter) -> str:
    default = RULE_PRESETS[name].defaults.get(parameter.name)
    if getattr(resolve_rule(Rule(name)), parameter.name) is None:
        return "–"
    shown = _value(default) if default is None else parameter.show(default)
    return shown if parameter.ranges else f"`{shown}`"


def _value(window: Any) -> str:
    return "min(6, K − 1)" if window is None else str(window)


def _limits() -> Iterable[tuple[str, ...]]:
    """What an operator can bound of the parameters."""
    yield from _head("limit", "bounds")
    for parameter in PARAMETERS.values():
        if parameter.limit_name:
            side = "floor" if parameter.limit == "min" else "ceiling"
            measures = " of each measure" if parameter.limited_by_measure else ""
            zero = "; 0 is above every other value" if parameter.zero_is_all else ""
            called = parameter.symbol or f"`{parameter.name}`"
            yield f"`{parameter.limit_name}`", f"{side} of {called}{measures}{zero}"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(write_tables(path.read_text(encoding="utf-8")), encoding="utf-8")

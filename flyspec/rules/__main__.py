"""Regenerates the tables of rules in a document: `python -m flyspec.rules docs/rules.md`.

A table is between `<!-- rules -->`, `<!-- parameters NAME ... -->` or `<!-- limits -->` and
`<!-- end -->`; everything else is left unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from flyspec.rules import PARAMETERS, Parameter, Rule
from flyspec.rules.presets import RULE_PRESETS, RulePreset
from flyspec.rules.resolve import resolve_rule

_TABLE = re.compile(r"(<!-- (rules|parameters|limits)([ a-z-]*) -->\n).*?(<!-- end -->)", re.DOTALL)
Rows = Iterable[Iterable[str]]


def write_tables(document: str) -> str:
    """Return the document with its tables regenerated."""
    tables = {"rules": _rules, "parameters": _parameters, "limits": _limits}

    def table(found: re.Match[str]) -> str:
        head, *rows = tables[found[2]](*found[3].split())
        lines = (head, ("---" for _ in head), *rows)
        return found[1] + "".join(f"| {' | '.join(line)} |\n" for line in lines) + found[4]

    return _TABLE.sub(table, document)


def _rules() -> Rows:
    yield "rule", "condition for accepting a mismatch", "window", "draft's distribution", "lossless"
    for name, preset in RULE_PRESETS.items():
        lossless = "yes" if preset.lossless else "no"
        yield f"`{name}`", preset.accepts, _window(preset), _draft(preset), lossless


def _window(preset: RulePreset) -> str:
    if (window := preset.defaults.get("fly_window_size", 0)) == 0:
        return "" if preset.lossless else "none"
    scope = preset.defaults.get("window_scope")
    reach = f", {scope.name.lower().replace('_', ' ')}" if scope else ""
    size = PARAMETERS["fly_window_size"].unset if window is None else window
    return f"W = {size}{reach}{', including the mismatch' * preset.counts_mismatch}"


def _draft(preset: RulePreset) -> str:
    if preset.draft is None:
        return "–"
    top_k = 0 if preset.draft.whole else preset.defaults["divergence_top_k"]
    greedy = preset.draft.drawn_from and not preset.draft.also_greedy
    return (f"top {top_k}" if top_k else "whole") + "; none if greedy" * greedy


def _parameters(*names: str) -> Rows:
    yield "parameter", "range", *(f"`{name}`" for name in names)
    for parameter in PARAMETERS.values():
        if any(parameter.name in RULE_PRESETS[name].defaults for name in names):
            symbol = f" ({parameter.symbol})" if parameter.symbol else ""
            values = (_default(name, parameter) for name in names)
            yield f"`{parameter.name}`{symbol}", _range(parameter), *values


def _range(parameter: Parameter) -> str:
    if parameter.ranges:
        shown = "; ".join(dict.fromkeys(map(str, parameter.ranges.values())))
        return f"{shown} {parameter.unit}".rstrip()
    return ", ".join(f"`{parameter.show(v)}`" for v in parameter.members or (False, True))


def _default(name: str, parameter: Parameter) -> str:
    defaults = RULE_PRESETS[name].defaults
    if defaults.get(parameter.name, parameter) is None:
        return parameter.unset
    if getattr(resolve_rule(Rule(name)), parameter.name) is None:
        return "–"
    default = defaults[parameter.name]
    return str(default) if parameter.ranges else f"`{parameter.show(default)}`"


def _limits() -> Rows:
    yield "limit", "bounds"
    for parameter in PARAMETERS.values():
        if parameter.limit:
            side = "minimum" if parameter.limit == "min" else "maximum"
            measures = " for each measure" if parameter.limited_by_measure else ""
            zero = "; 0 counts as the largest value" if parameter.zero_is_all else ""
            named = f"`{parameter.name}`"
            called = f"{parameter.symbol} ({named})" if parameter.symbol else named
            yield f"`{parameter.limit_name}`", f"{side} of {called}{measures}{zero}"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(write_tables(path.read_text(encoding="utf-8")), encoding="utf-8")

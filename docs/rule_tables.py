"""Regenerates the tables of rules in a document: `python -m docs.rule_tables docs/rules.md`.

A table is between `<!-- rules -->` or `<!-- parameters -->` and `<!-- end -->`; everything else is
left unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from flyspec.rules import PARAMETERS, Parameter, Rule
from flyspec.rules.presets import RULE_PRESETS, RulePreset
from flyspec.rules.resolve import resolve_rule

_TABLE = re.compile(r"(<!-- (rules|parameters) -->\n).*?(<!-- end -->)", re.DOTALL)
Rows = Iterable[Iterable[str]]


def write_tables(document: str) -> str:
    """Return the document with its tables regenerated."""
    tables = {"rules": _rules, "parameters": _parameters}

    def table(found: re.Match[str]) -> str:
        head, *rows = tables[found[2]]()
        lines = (head, ("---" for _ in head), *rows)
        return found[1] + "".join(f"| {' | '.join(line)} |\n" for line in lines) + found[3]

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


def _parameters() -> Rows:
    yield "parameter", "range", "default, by rule"
    for parameter in PARAMETERS.values():
        rules: dict[str, list[str]] = {}
        for name, preset in RULE_PRESETS.items():
            if parameter.name in preset.defaults and (value := _default(name, parameter)):
                rules.setdefault(value, []).append(f"`{name}`")
        symbol = f" ({parameter.symbol})" if parameter.symbol else ""
        defaults = "; ".join(f"{', '.join(names)}: {value}" for value, names in rules.items())
        yield f"`{parameter.name}`{symbol}", _range(parameter), defaults


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
        return ""
    default = defaults[parameter.name]
    return str(default) if parameter.ranges else f"`{parameter.show(default)}`"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(write_tables(path.read_text(encoding="utf-8")), encoding="utf-8")

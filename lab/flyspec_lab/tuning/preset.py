"""The choice as a rules file, with its evidence as comments."""

from __future__ import annotations

import textwrap
from dataclasses import fields
from enum import IntEnum

from flyspec.rules import PARAMETERS, Rule


def rules_file(name: str, rule: Rule, evidence: str) -> str:
    """Return the TOML of a named rule, for `--rules-file`; `evidence` goes before it."""
    lines = [f"# {line}".rstrip() for line in textwrap.wrap(evidence, 96)]
    lines += ["", f"[rules.{name}]", f'preset = "{rule.name}"']
    for field in fields(rule):
        value = getattr(rule, field.name)
        if field.name not in PARAMETERS or value is None:
            continue
        shown = PARAMETERS[field.name].show(value)
        lines.append(f"{field.name} = " + (f'"{shown}"' if isinstance(value, IntEnum) else shown))
    return "\n".join(lines) + "\n"

"""The acceptance rules: one table of their parameters and one of themselves. No I/O, no torch.

Everything else that speaks of a rule or a parameter comes from these tables: flags, the rules file,
limits, checks, warnings, bench conditions, and the tables of docs/rules.md.
"""

from flyspec.rules.parameters import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    MAX_DIVERGENCE_TOP_K,
    MAX_GUARDED_TOKENS,
    MAX_WINDOW_SIZE,
    PARAMETERS,
    Divergence,
    EntropyMeasure,
    Parameter,
    Rule,
    WindowScope,
    member_name,
)
from flyspec.rules.presets import RULE_PRESETS, DraftNeeds, RulePreset
from flyspec.rules.resolve import (
    measure_of,
    resolve_rule,
    rule_warnings,
    validate_rule,
    window_depends_on_k,
)

__all__ = [
    "DEFAULT_NUM_SPECULATIVE_TOKENS",
    "MAX_DIVERGENCE_TOP_K",
    "MAX_GUARDED_TOKENS",
    "MAX_WINDOW_SIZE",
    "PARAMETERS",
    "RULE_PRESETS",
    "Divergence",
    "DraftNeeds",
    "EntropyMeasure",
    "Parameter",
    "Rule",
    "RulePreset",
    "WindowScope",
    "measure_of",
    "member_name",
    "resolve_rule",
    "rule_warnings",
    "validate_rule",
    "window_depends_on_k",
]

"""Phases: segments of the output, each with its own acceptance rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flyspec.rules import Rule

MAX_PHASES = 16
MAX_RULES = MAX_PHASES + 1
"""Of a session with the target: one for each phase, and one for what is exact in any."""
TOOL_CALL, JSON = EXACT_INSIDE = "tool_call", "json"
"""Permitted values of `exact_inside`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A segment of the output, judged by `rule` (None: the request's).

    It ends with the token that completes one of the texts `until` in the phase's own text, or that
    is one of `until_token_ids`; what follows is the next phase. The last one has no end. After
    `max_loose_tokens` loosely accepted tokens, or with a total cost of `max_loose_cost_nats`, the
    rest of the phase is exact.
    """

    rule: Rule | None = None
    until: Sequence[str] = ()
    until_token_ids: Sequence[int] = ()
    max_loose_tokens: int | None = None
    max_loose_cost_nats: float | None = None

    @property
    def ends(self) -> bool:
        """True if something ends it."""
        return bool(self.until or self.until_token_ids)

    @property
    def has_budget(self) -> bool:
        return self.max_loose_tokens is not None or self.max_loose_cost_nats is not None


def rule_names(rules: Iterable[Rule]) -> str:
    """Return the names of rules that follow each other."""
    return ", ".join(rule.name for rule in rules)

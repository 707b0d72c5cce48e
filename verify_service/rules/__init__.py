"""Acceptance rules: which drafted tokens stand, as a pure function of the target's logits.

A rule is a criterion (is the target unsure enough here?), a window (does the draft agree with the
target again afterwards?), a guard (tokens that are never taken loosely) and a budget. `presets`
composes them by name, `judge` applies them.
"""

from verify_service.rules.judge import judge

__all__ = ["judge"]

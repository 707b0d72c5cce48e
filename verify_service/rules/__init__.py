"""Acceptance rules: which drafted tokens are accepted, as a pure function of the target's logits.

A rule consists of a criterion (what must hold where the draft differs from the target?), a window
(does the draft agree with the target again afterwards?), guards (tokens and positions judged
exactly) and a budget. `presets` composes them by name, `judge` applies them. The rule `rejection`
samples instead (`speculative_sampling`).

`judge` takes one round; `prepare` and `decide_all` judge many together (`inquiry`).
"""

from verify_service.rules.deciding import decide_all
from verify_service.rules.judge import judge, prepare

__all__ = ["decide_all", "judge", "prepare"]

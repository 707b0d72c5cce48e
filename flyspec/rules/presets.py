"""The acceptance rules, each declared once: criterion, default parameters and needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from flyspec.rules import Divergence, EntropyMeasure, WindowScope

DEFAULT_WINDOW_SIZE = 6
CriterionName = Literal[
    "never",
    "entropy",
    "margin",
    "divergence",
    "reversed divergence",
    "divergence if unsure",
    "typical",
    "relaxed",
    "mars",
    "ensemble",
    "cactus",
    "importance",
    "random",
]


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """The draft distributions that a rule needs.

    `whole`: over the whole vocabulary, regardless of `divergence_top_k`. `drawn_from`: drafts are
    drawn from what is sent, processed like the target's; if greedy, nothing is sent, or, with
    `also_greedy`, the same distribution, from which nothing is drawn.
    """

    whole: bool = False
    drawn_from: bool = False
    also_greedy: bool = False


@dataclass(frozen=True, slots=True)
class RulePreset:
    """Meaning of a rule's name: a criterion, default parameters and needs.

    `accepts` describes in docs/rules.md when a mismatch may be accepted. A `fly_window_size` of
    None is min(6, K - 1) for the requested K, a `judge_threshold` of None that of the judge.
    `lossless`: the output follows the target's distribution; `token_exact`: it equals plain
    decoding token by token, whatever is drafted. `counts_mismatch`: W includes the mismatch itself.
    `largest`: the maximum of each divergence in the rule's form. `limited_as` prefixes the names of
    its measures in limits, where its numbers are not comparable with those of other rules.

    Needs: `draft` distributions; `raw`, the model's logits instead of the processed ones;
    `samples` of the target at temperature > 0, of which a draft may match any; `hidden_layers`
    (as in `flyspec.engine.model.Step`) whose rows after each draft its criterion reads, with a
    judge that was trained on them.
    """

    accepts: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    criterion: CriterionName = "never"
    lossless: bool = False
    token_exact: bool = False
    counts_mismatch: bool = False
    largest: Mapping[Divergence, float] = field(default_factory=dict)
    limited_as: str = ""
    draft: DraftNeeds | None = None
    raw: bool = False
    samples: int = 1
    hidden_layers: tuple[int, ...] = ()


_WITHIN = {"window_scope": WindowScope.WITHIN_ROUND}
_NO_WINDOW = {"fly_window_size": 0, **_WITHIN}
_FLY = {
    "fly_window_size": DEFAULT_WINDOW_SIZE,
    "fly_entropy_threshold": 0.3,
    "entropy_measure": EntropyMeasure.TOP_K,
    "fly_entropy_top_k": 3,
}

# fmt: off
RULE_PRESETS: Mapping[str, RulePreset] = MappingProxyType({
    "exact": RulePreset("never", lossless=True, token_exact=True),
    "fly": RulePreset(
        "top-3 entropy ≥ 0.3 nats", {**_FLY, "fly_window_size": None, **_WITHIN}, "entropy",
    ),
    "fly-paper": RulePreset(
        "normalized entropy ≥ 0.3",
        {**_FLY, "entropy_measure": EntropyMeasure.NORMALIZED, **_WITHIN}, "entropy",
    ),
    "fly-reference": RulePreset(
        "top-3 entropy ≥ 0.3 nats, raw", _FLY, "entropy",
        counts_mismatch=True, raw=True, samples=2,
    ),
    "margin": RulePreset(
        "Δ log p < 0.3 nats",
        {"margin_threshold": 0.3, "fly_window_size": DEFAULT_WINDOW_SIZE,
         "window_scope": WindowScope.ACROSS_ROUNDS}, "margin",
    ),
    "fuzzy": RulePreset(
        "divergence < 0.1",
        {"divergence": Divergence.JS, "divergence_threshold": 0.1, "divergence_top_k": 50,
         **_NO_WINDOW}, "divergence",
        largest={Divergence.JS: math.log(2.0), Divergence.TV: 1.0}, draft=DraftNeeds(),
    ),
    "fuzzy-reference": RulePreset(
        "reversed divergence ≤ 0.3, raw",
        {"divergence": Divergence.JS, "divergence_threshold": 0.3, "divergence_top_k": 0},
        "reversed divergence", largest={Divergence.TV: 1.0}, limited_as="reference_",
        draft=DraftNeeds(whole=True), raw=True,
    ),
    "kl": RulePreset(
        "KL(p‖q) < 0.1 where no token has p > 0.9",
        {"divergence": Divergence.KL, "divergence_threshold": 0.1, "divergence_top_k": 50,
         "confidence_threshold": 0.9, **_NO_WINDOW}, "divergence if unsure",
        largest={Divergence.JS: math.log(2.0), Divergence.TV: 1.0}, draft=DraftNeeds(),
    ),
    "rejection": RulePreset(
        "at random, preserving the target's distribution", {"divergence_top_k": 0},
        lossless=True, draft=DraftNeeds(drawn_from=True),
    ),
    "ensemble": RulePreset(
        "at random by 1 − w + w·p/q; greedy: x is the choice of w·p + (1 − w)·q",
        {"ensemble_weight": 0.7, "divergence_top_k": 0}, "ensemble",
        draft=DraftNeeds(drawn_from=True, also_greedy=True),
    ),
    "cactus": RulePreset(
        "at random by h/q, where h raises p(x) within 0.2 nats",
        {"cactus_delta": 0.2, "divergence_top_k": 0}, "cactus", draft=DraftNeeds(drawn_from=True),
    ),
    "typical": RulePreset(
        "p(x) > min(ε, δ·exp(−H))",
        {"typical_epsilon": 0.09, "typical_delta": 0.3, **_NO_WINDOW}, "typical",
    ),
    "relaxed": RulePreset(
        "among the top 10, p(x) ≥ p(top) − 0.01",
        {"relaxed_top_k": 10, "relaxed_delta": 0.01, "relaxed_ratio": 1.0, **_NO_WINDOW},
        "relaxed",
    ),
    "mars": RulePreset(
        "the runner-up, z₂/z₁ > 0.9, raw", {"mars_ratio": 0.9, **_NO_WINDOW}, "mars", raw=True,
    ),
    "autojudge": RulePreset(
        "P(important) ≤ the judge's threshold", {"judge_threshold": None, **_NO_WINDOW},
        "importance", hidden_layers=(-1,),
    ),
    "random": RulePreset(
        "at random, with probability 0.1",
        {"random_acceptance": 0.1, "random_judges_matches": False, **_NO_WINDOW}, "random",
    ),
})
# fmt: on
DEFAULT_RULE = "relaxed"
"""The rule of requests that name none, where the server was not told another (`--rule`)."""

"""Validates sampling parameters and lengths, and which draft distributions a rule needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flyspec.errors import InvalidArgumentError
from flyspec.flags import flags_of
from flyspec.rules import MAX_GUARDED_TOKENS, Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.phases import EXACT_INSIDE, MAX_PHASES
from flyspec.values.rounds import MAX_STOP_TOKEN_IDS, DistributionSpec
from flyspec.values.tokens import LOGIT_BIAS, MAX_TEMPERATURE, MIN_TEMPERATURE, SamplingParams

MAX_LOGIT_BIAS_TOKENS = 1024
MAX_STOP_STRINGS = 16
LENGTHS: Mapping[str, int] = {
    "exact_inside": len(EXACT_INSIDE),
    "guarded_token_ids": MAX_GUARDED_TOKENS,
    "logit_bias": MAX_LOGIT_BIAS_TOKENS,
    "phases": MAX_PHASES,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "until": MAX_STOP_STRINGS,
    "until_token_ids": MAX_STOP_TOKEN_IDS,
}
"""Maximum length of a request's lists, by field; that of all others is the model's context."""
BIAS_LENGTH = (MAX_LOGIT_BIAS_TOKENS, f"tokens; send at most {MAX_LOGIT_BIAS_TOKENS}")
"""For `flyspec.rpc.check_lengths`."""
DISTRIBUTION_WARNING_ABOVE_MB = 1.0
BYTES_PER_LOG_PROB = 2


def validate_sampling(sampling: SamplingParams) -> None:
    """Raise `InvalidArgumentError` for sampling parameters out of range."""
    temperature = sampling.temperature
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise InvalidArgumentError(
            f"sampling.temperature must be 0 (greedy) or between {MIN_TEMPERATURE:g} and "
            f"{MAX_TEMPERATURE:g}, got {temperature:g}"
        )
    for name, (_, flag) in flags_of(SamplingParams).items():
        if flag.range is not None:
            flag.range.check(f"sampling.{name}", getattr(sampling, name))
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS_TOKENS:
        raise InvalidArgumentError(
            f"sampling.logit_bias: at most {MAX_LOGIT_BIAS_TOKENS} tokens, "
            f"got {len(sampling.logit_bias)}"
        )
    for token_id, bias in sampling.logit_bias:
        LOGIT_BIAS.check(f"sampling.logit_bias[{token_id}]", bias)


def distribution_spec(rule: Rule, sampling: SamplingParams) -> DistributionSpec | None:
    """Return which draft distributions a resolved rule needs; None if it needs none."""
    needs = RULE_PRESETS[rule.name].draft
    # Greedy drawing: both distributions are a single token, which the drafts already give.
    if needs is None or (needs.drawn_from and sampling.greedy and not needs.also_greedy):
        return None
    top_k = 0 if needs.whole else rule.divergence_top_k or 0
    drawn_from = needs.drawn_from and not sampling.greedy
    return DistributionSpec(top_k, drawn_from, RULE_PRESETS[rule.name].raw)


def common_distribution_spec(
    rules: Sequence[Rule], sampling: SamplingParams
) -> DistributionSpec | None:
    """Return which draft distributions resolved rules need that follow each other in one output.

    The drafter sends the same ones for all of it. Raises `InvalidArgumentError` if two rules need
    different ones.
    """
    first: Rule | None = None
    found: DistributionSpec | None = None
    for rule in rules:
        spec = distribution_spec(rule, sampling)
        if spec is None:
            continue
        if first is not None and (spec != found or (spec.draw_from_it and rule.name != first.name)):
            raise InvalidArgumentError(
                f"speculation.phases: the rules {first.name!r} and {rule.name!r} need different "
                "draft distributions, but a drafter sends the same kind for all of an output; give "
                "them one rule.divergence_top_k or use only one of them"
            )
        first, found = first or rule, spec
    return found


def distribution_warnings(
    rule: Rule, spec: DistributionSpec | None, num_speculative_tokens: int, vocab_size: int
) -> list[str]:
    """Return a warning if sending distributions over the whole vocabulary is expensive."""
    if spec is None or spec.top_k:
        return []
    megabytes = num_speculative_tokens * vocab_size * BYTES_PER_LOG_PROB / 1e6
    if megabytes <= DISTRIBUTION_WARNING_ABOVE_MB:
        return []
    needs = RULE_PRESETS[rule.name].draft
    instead = "; set rule.divergence_top_k to send only the most likely tokens"
    if needs is not None and needs.whole:
        instead = ""
    return [
        f"rule {rule.name!r} sends the draft's distributions over the whole vocabulary: up to "
        f"{megabytes:.1f} MB per round to the target{instead}"
    ]

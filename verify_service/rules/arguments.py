"""Checks the arguments of `judge` for consistency. Errors name allowed and actual values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule
from flyspec.values.rounds import DistributionSpec, OpenWindow, RuleSegment
from verify_service.rules.presets import window_of


def check_hidden(rule: Rule, hidden_rows: Tensor | None, num_rows: int, size: int) -> None:
    """Check for one hidden row of that size per row of logits."""
    if hidden_rows is None or list(hidden_rows.shape) != [num_rows, size]:
        raise InvalidArgumentError(
            f"hidden_rows: the rule {rule.name!r} needs {num_rows} of size {size}, one per row of "
            f"logits, got {None if hidden_rows is None else tuple(hidden_rows.shape)}"
        )


def check_drafts(draft_token_ids: Sequence[int], target_logits: Tensor) -> None:
    """Check for one more row of logits than drafts, and for drafts within the vocabulary."""
    expected = len(draft_token_ids) + 1
    if target_logits.dim() != 2 or target_logits.shape[0] != expected:
        raise InvalidArgumentError(
            f"target_logits must have {expected} rows for {expected - 1} drafted tokens, "
            f"got shape {tuple(target_logits.shape)}"
        )
    last = target_logits.shape[1] - 1
    if expected > 1 and not 0 <= min(draft_token_ids) <= max(draft_token_ids) <= last:
        wrong = next(token for token in draft_token_ids if not 0 <= token <= last)
        raise InvalidArgumentError(f"draft_token_ids must be between 0 and {last}, got {wrong}")


def check_segments(segments: Sequence[RuleSegment], num_rules: int, start_position: int) -> None:
    """Check that the segments cover the round, in order, with rules that there are."""
    if not segments:
        return
    if segments[0].start_position > start_position:
        raise InvalidArgumentError(
            f"rule_segments[0].start_position must be at most {start_position}, that of the first "
            f"draft, got {segments[0].start_position}"
        )
    last = -1
    for index, segment in enumerate(segments):
        name = f"rule_segments[{index}]"
        if segment.start_position <= last:
            raise InvalidArgumentError(
                f"{name}.start_position must be above {last}, that of the segment before, got "
                f"{segment.start_position}"
            )
        last = segment.start_position
        if not 0 <= segment.rule_index < num_rules:
            raise InvalidArgumentError(
                f"{name}.rule_index must be between 0 and {num_rules - 1}, as there are "
                f"{num_rules} rules, got {segment.rule_index}"
            )
        cost = segment.budget.loose_cost_nats
        if cost is not None and not cost >= 0:  # NaN too
            raise InvalidArgumentError(
                f"{name}.remaining_loose_cost_nats must be at least 0, got {cost}"
            )


def check_open_window(
    rules: Sequence[Rule], open_window: OpenWindow | None, start_position: int
) -> None:
    """Check that a rule can have left the window open, at a position before the round."""
    if open_window is None:
        return
    if not any(window_of(rule).across_rounds for rule in rules):
        raise InvalidArgumentError(
            f"open_window: the windows of the rule {rules[0].name!r} end with their round; "
            "set window_scope to across_rounds or send no open_window"
        )
    if not 0 <= open_window.position < start_position:
        raise InvalidArgumentError(
            f"open_window.position must be between 0 and {start_position - 1} (before the round), "
            f"got {open_window.position}"
        )
    if open_window.remaining_matches < 1:
        raise InvalidArgumentError(
            f"open_window.remaining_matches must be at least 1, got {open_window.remaining_matches}"
        )


def check_distributions(
    rule: Rule, spec: DistributionSpec, draft: Distributions | None, logits_shape: torch.Size
) -> None:
    """Check for one distribution per draft, whole where the rule compares whole ones."""
    num_drafts, vocab_size = logits_shape[0] - 1, logits_shape[1]
    if draft is None:
        raise InvalidArgumentError(
            f"distributions: the rule {rule.name!r} needs the distribution that each token was "
            f"drafted from; send {num_drafts}, one per drafted token, before their round"
        )
    rows, width = draft.log_probs.shape
    if rows != num_drafts:
        raise InvalidArgumentError(
            f"distributions: need {num_drafts}, one per drafted token, got {rows}"
        )
    if draft.token_ids is None and width != vocab_size:
        raise InvalidArgumentError(
            f"distributions: need {vocab_size} log-probabilities, one per token of the target's "
            f"vocabulary, or token_ids with them; got {width}"
        )
    # A list of one token is a point mass, which counts as whole.
    if not spec.top_k and not spec.draw_from_it and draft.token_ids is not None and width > 1:
        raise InvalidArgumentError(
            f"distributions: the rule {rule.name!r} compares whole distributions; send "
            f"{vocab_size} log-probabilities without token_ids, got a list of up to {width} tokens"
        )

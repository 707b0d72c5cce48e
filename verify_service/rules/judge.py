"""`judge`: the one function that decides what stands of a round."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from flyspec.errors import InvalidArgumentError
from flyspec.types import Budget, Decision, Outcome, Rule, SamplingParams, Verdict
from verify_service.rules.guard import Guard, Purse
from verify_service.rules.observe import observe
from verify_service.rules.presets import compose

_GREEDY = SamplingParams()
_UNBOUNDED = Budget()
_NOT_REACHED = Decision(Outcome.NOT_REACHED)


def judge(
    rule: Rule | str,
    draft_token_ids: Sequence[int],
    target_logits: Tensor,
    *,
    sampling: SamplingParams = _GREEDY,
    seed: int = 0,
    start_position: int = 0,
    eos_token_ids: Collection[int] = (),
    control_token_ids: Collection[int] = (),
    budget: Budget = _UNBOUNDED,
    exact_until_position: int = 0,
) -> Verdict:
    """Decide which of K drafted tokens stand, given the target's raw logits [K + 1, V].

    Row i is the target's prediction of the token at absolute position `start_position` + i, the
    last row that of the bonus. Tokens before the first rejected one are accepted, then comes the
    target's own token there; with none rejected, all are accepted and the bonus comes next. The
    round ends at its first drafted EOS: what follows it is not reached. K = 0 is plain decoding.

    A mismatch stands if the rule's criterion and window let it, neither token is a control token
    (`control_token_ids` and `eos_token_ids`), its processed probability is not 0, its position is
    not before `exact_until_position` and its cost fits into `budget`. Before that position, and
    once either bound of the budget is used up, all is judged exactly: of `fly-reference`'s two
    samples only the first counts then. A match with the second one is EXACT and costs nothing.

    Logits of any floating type on any device; half precision is computed in float32.
    """
    if isinstance(rule, str):
        rule = Rule(rule)
    _check(draft_token_ids, target_logits)
    drafts = _until_eos(draft_token_ids, eos_token_ids)
    parts = compose(rule, len(drafts))
    rows = target_logits[: len(drafts) + 1]
    seen = observe(parts, drafts, rows, sampling, seed, start_position)
    guard = Guard(control_token_ids, eos_token_ids)
    purse = Purse(budget)
    decisions: list[Decision] = []

    for index, draft in enumerate(drafts):
        own = seen.own[index]
        exactly = start_position + index < exact_until_position or purse.spent
        if draft == own or (seen.matches[index] and not exactly):
            decisions.append(Decision(Outcome.EXACT, draft))
            continue
        number, gap = None, seen.gaps[index]
        loose = (
            not exactly
            and not parts.criterion.never
            and seen.possible[index]
            and guard.allows(draft, own)
            and purse.affords(gap)
            and parts.window.holds(index, seen.matches)
        )
        if loose and not parts.criterion.always:
            number = seen.measure(index)
            loose = parts.criterion.accepts(number)
        if not loose:
            decisions.append(Decision(Outcome.REJECTED, own, number, gap))
            return _verdict(index, own, decisions, len(draft_token_ids))
        purse.pay(gap)
        decisions.append(Decision(Outcome.LOOSE, own, number, gap))
    return _verdict(len(drafts), seen.own[-1], decisions, len(draft_token_ids))


def _verdict(accepted: int, next_token_id: int, decisions: list[Decision], drafted: int) -> Verdict:
    not_reached = [_NOT_REACHED] * (drafted - len(decisions))
    return Verdict(accepted, next_token_id, (*decisions, *not_reached))


def _until_eos(draft_token_ids: Sequence[int], eos_token_ids: Collection[int]) -> list[int]:
    """The drafts up to the first EOS, which is the last token that can stand."""
    drafts = []
    for token in draft_token_ids:
        drafts.append(int(token))
        if token in eos_token_ids:
            break
    return drafts


def _check(draft_token_ids: Sequence[int], target_logits: Tensor) -> None:
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

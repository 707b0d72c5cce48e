"""`judge`, the function that decides which drafts of a round are accepted, and its first half."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from flyspec.engine.autojudge import AutoJudge
from flyspec.engine.distributions import Distributions
from flyspec.engine.model import History
from flyspec.rules import Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule
from flyspec.validation import distribution_spec
from flyspec.values.rounds import Budget, Decision, OpenWindow, Outcome, Verdict
from flyspec.values.tokens import SamplingParams
from verify_service.rules.arguments import (
    check_distributions,
    check_drafts,
    check_hidden,
    check_open_window,
)
from verify_service.rules.guard import Guard, Purse
from verify_service.rules.hearings import alone
from verify_service.rules.inquiry import Answers, Hearing, Round
from verify_service.rules.observe import inquire, observe
from verify_service.rules.presets import compose
from verify_service.rules.referee import Referee
from verify_service.rules.speculative_sampling import inquire_sampling, speculative_sampling
from verify_service.rules.window import AcrossRounds, RoundEnd, WindowWalk, WithinRound

_GREEDY = SamplingParams()
_UNBOUNDED = Budget()
_NOT_REACHED = Decision(Outcome.NOT_REACHED)


def hear(
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
    open_window: OpenWindow | None = None,
    draft_distributions: Distributions | None = None,
    history: History | None = None,
    num_speculative_tokens: int = 0,
    hidden_rows: Tensor | None = None,
    autojudge: AutoJudge | None = None,
) -> Hearing:
    """Decide which of K drafted tokens are accepted, given the target's raw logits [K + 1, V].

    Row i is the target's prediction of the token at absolute position `start_position` + i, the
    last row that of the bonus token. Tokens before the first rejected one are accepted, followed by
    the target's own token; if none is rejected, all are accepted, followed by the bonus token. The
    round ends at its first drafted EOS; later drafts are not reached. K = 0 is plain decoding.

    A mismatch is accepted if the rule's criterion and window allow it, neither token is guarded
    (`control_token_ids`, `eos_token_ids`, the rule's own `guarded_token_ids`), its processed
    probability is not 0, its position is not before `exact_until_position` and its cost fits into
    `budget`. Before that position, and once either limit of the budget is used up, all tokens are
    judged exactly: of `fly-reference`'s two samples only the first counts then, and
    `fuzzy-reference` accepts every match. A match with the second sample is EXACT and costs
    nothing.

    Across rounds, `open_window` is the window that the last verdict left open; its token is already
    deducted from `budget`. If a mismatch fails it, or the sequence ends, or nothing was drafted,
    the verdict has `failed`: no draft is accepted and the sequence goes back to the window's
    position. A window that opens and fails in this round is an ordinary rejection.

    A window size that `rule` leaves to its preset follows from the default K, not from this
    round's: 6 for `fly`.

    More than `num_speculative_tokens` drafts (0: no limit) are judged as consecutive rounds of that
    many: in place of the bonus token between two of them only the target's own token is accepted,
    and no window within a round extends past it. So the text does not depend on how many such
    rounds are drafted at once. Windows across rounds ignore it.

    `rejection` at temperature > 0 accepts with probability p / q and ignores guards and budgets;
    `ensemble` and `cactus` loosen that within them. They and the fuzzy rules need
    `draft_distributions`, K rows. `history` is the sequence before the first draft, needed if
    `sampling` has penalties or `min_tokens`. `autojudge` needs the judge of that name, and the
    target's `hidden_rows` [K + 1, hidden size] of the layer that it reads, each from the same
    position as the row of logits.

    Logits may have any floating type and be on any device; half precision is computed in float32.
    Raises `InvalidArgumentError` for inconsistent arguments, and `FloatingPointError` for
    non-finite logits where a token is chosen. `hear` raises the former and leaves the rest, for
    `decide_all` to do for many rounds together; `judge` does it all.
    """
    check_drafts(draft_token_ids, target_logits)
    drafts = _until_eos(draft_token_ids, eos_token_ids)
    rule = resolve_rule(Rule(rule) if isinstance(rule, str) else rule)
    parts = compose(rule, autojudge if RULE_PRESETS[rule.name].hidden_layers else None)
    check_open_window(rule, parts, open_window, start_position)
    spec = distribution_spec(rule, sampling)
    samples = spec is not None and spec.draw_from_it
    if drafts and spec and (samples or not parts.criterion.never):
        check_distributions(rule, spec, draft_distributions, target_logits.shape)
    hidden = None
    if drafts and parts.criterion.needs_hidden:
        assert autojudge is not None
        check_hidden(rule, hidden_rows, target_logits.shape[0], autojudge.hidden_size)
        assert hidden_rows is not None
        hidden = hidden_rows[1 : len(drafts) + 1]  # the first row precedes the first draft
    round_ = Round(
        drafts,
        target_logits[: len(drafts) + 1],
        sampling,
        seed,
        start_position,
        history,
        draft_distributions,
        hidden,
    )
    inquiry = inquire_sampling(round_, parts.loosening) if samples else inquire(parts, round_)
    exact_until = exact_until_position - start_position

    def decide(answers: Answers) -> Verdict:
        window: WindowWalk
        guard = Guard(control_token_ids, eos_token_ids, parts.guarded_token_ids)
        purse = Purse(budget)
        if samples:
            window = WithinRound(parts.window, start_position, ())  # of size 0: no window
            lenience = (guard, purse) if parts.loosening else None
            end = speculative_sampling(round_, answers, lenience, exact_until)
        else:
            seen = observe(inquiry, answers)
            if parts.window.across_rounds:
                window = AcrossRounds(parts.window.following, start_position, open_window)
            else:
                window = WithinRound(
                    parts.window, start_position, seen.matches, num_speculative_tokens
                )
            referee = Referee(round_, seen, parts.criterion, window, guard, purse, exact_until)
            end = _walk(referee, window, eos_token_ids)
        verdict = window.verdict(end)
        not_reached = [_NOT_REACHED] * (len(draft_token_ids) - len(verdict.decisions))
        return replace(verdict, decisions=(*verdict.decisions, *not_reached))

    return Hearing(inquiry, decide)


judge = alone(hear)
"""Judge one round by itself: `hear` and its verdict."""


def _walk(referee: Referee, window: WindowWalk, eos_token_ids: Collection[int]) -> RoundEnd:
    """Decide on the drafts in order, up to the first rejection."""
    drafts, own = referee.round.drafts, referee.seen.own
    decisions: list[Decision] = []
    for index in range(len(drafts)):
        decision = referee.decide(index)
        decisions.append(decision)
        if decision.outcome is Outcome.REJECTED:
            return RoundEnd(decisions, own[index], rejected=True)
        window.passed(index, decision)
    bonus = own[-1]
    final = not drafts or drafts[-1] in eos_token_ids or bonus in eos_token_ids
    return RoundEnd(decisions, bonus, final=final)


def _until_eos(draft_token_ids: Sequence[int], eos_token_ids: Collection[int]) -> list[int]:
    """Return the drafts up to the first EOS, the last token that can be accepted."""
    drafts = []
    for token in draft_token_ids:
        drafts.append(int(token))
        if token in eos_token_ids:
            break
    return drafts

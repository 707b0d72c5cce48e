"""`judge`, the function that decides which drafts of a round are accepted, and its first half.

A round is divided into stretches: consecutive drafts that one rule judges.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from flyspec.engine.autojudge import AutoJudge
from flyspec.engine.distributions import Distributions
from flyspec.engine.model import History
from flyspec.engine.sampling import SECOND_STREAM, TARGET_STREAM
from flyspec.rules import Rule
from flyspec.rules.resolve import resolve_rule
from flyspec.validation import distribution_spec
from flyspec.values.rounds import (
    Budget,
    Decision,
    DistributionSpec,
    OpenWindow,
    Outcome,
    RuleSegment,
    Verdict,
)
from flyspec.values.tokens import SamplingParams
from verify_service.rules.arguments import (
    check_distributions,
    check_drafts,
    check_hidden,
    check_open_window,
    check_segments,
)
from verify_service.rules.criteria import Measure
from verify_service.rules.deciding import alone
from verify_service.rules.guard import Guard, Purse
from verify_service.rules.inquiry import (
    THREE_LOGITS,
    Answers,
    Inquiry,
    PendingVerdict,
    Round,
    observe,
)
from verify_service.rules.presets import Composition, compose
from verify_service.rules.referee import Referee
from verify_service.rules.speculative_sampling import Chance, Correction, SamplingReferee
from verify_service.rules.window import WindowWalk


class Stretch(NamedTuple):
    """The drafts from index `first` on, up to the next stretch, and their resolved rule.

    `budget` is the rule's own. `spec` says which draft distributions it needs.
    """

    first: int
    rule_index: int
    rule: Rule
    budget: Budget
    parts: Composition
    spec: DistributionSpec | None

    @property
    def samples(self) -> bool:
        """True if drafts are judged by p / q instead of by a criterion."""
        return self.spec is not None and self.spec.draw_from_it

    @property
    def num_samples(self) -> int:
        """Number of the target's samples that a draft may match, at temperature > 0."""
        return 1 if self.samples else self.parts.preset.samples

    @property
    def measures(self) -> Sequence[Measure]:
        """Questions about its drafts, besides `THREE_LOGITS`."""
        if self.samples:
            return Chance(self.parts.loosening), Correction(self.parts.loosening)
        criterion = self.parts.criterion
        return () if criterion.never or criterion.always else (criterion,)


def stretches_of(
    rules: Sequence[Rule],
    segments: Sequence[RuleSegment],
    sampling: SamplingParams,
    start_position: int,
    num_drafts: int,
    autojudge: AutoJudge | None = None,
) -> list[Stretch]:
    """Divide a round's drafts among resolved rules; without drafts there is one stretch of none.

    Each segment's `start_position` is absolute, the first not after the round's.
    """
    found: list[Stretch] = []
    for segment in segments or (RuleSegment(start_position),):
        first = max(0, segment.start_position - start_position)
        if found and first >= num_drafts:
            break
        if found and found[-1].first == first:
            found.pop()
        rule = rules[segment.rule_index]
        spec = distribution_spec(rule, sampling)
        parts = compose(rule, autojudge)
        found.append(Stretch(first, segment.rule_index, rule, segment.budget, parts, spec))
    return found


def inquire(stretches: Sequence[Stretch], round_: Round) -> Inquiry:
    """Return what their rules need to know of a round."""
    num_samples = max(stretch.num_samples for stretch in stretches)
    if round_.sampling.greedy:
        num_samples = 1
    measures = dict.fromkeys(m for stretch in stretches for m in stretch.measures)
    streams = (TARGET_STREAM, SECOND_STREAM)[:num_samples]
    return Inquiry(round_, streams, (THREE_LOGITS, *measures))


_GREEDY = SamplingParams()
_UNBOUNDED = Budget()
_NOT_REACHED = Decision(Outcome.NOT_REACHED)


def prepare(
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
    other_rules: Sequence[Rule] = (),
    rule_segments: Sequence[RuleSegment] = (),
    hidden_rows: Tensor | None = None,
    autojudge: AutoJudge | None = None,
    resolved: bool = False,
) -> PendingVerdict:
    """Decide which of K drafted tokens are accepted, given the target's raw logits [K + 1, V].

    Row i is the target's prediction of the token at absolute position `start_position` + i, the
    last row that of the bonus token. Tokens before the first rejected one are accepted, followed by
    the target's own token; if none is rejected, all are accepted, followed by the bonus token. The
    round ends at its first drafted EOS; later drafts are not reached. K = 0 is plain decoding.

    `eos_token_ids` are all tokens that end the text, the request's stop tokens among them.

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
    round's: 6 for `fly`. `resolved`: the rules are what `resolve_rule` returned, once for many
    rounds.

    More than `num_speculative_tokens` drafts (0: no limit) are judged as consecutive rounds of that
    many: in place of the bonus token between two of them only the target's own token is accepted,
    and no window within a round extends past it. So the text does not depend on how many such
    rounds are drafted at once. Windows across rounds ignore it.

    `rule_segments` say from which positions on others of `rule` and `other_rules` judge (none:
    `rule` everywhere). A segment's rule decides on its drafts as if the round had no other; it has
    the segment's budget within the round's. Windows run on past a segment's end, where only matches
    count as ever, so that the text up to there is what the segment's rule alone gives. The same
    holds for `open_window`, which any of the rules may have left.

    `rejection` at temperature > 0 accepts with probability p / q and ignores guards and budgets;
    `ensemble` and `cactus` loosen that within them. They and the fuzzy rules need
    `draft_distributions`, K rows. `history` is the sequence before the first draft, needed if
    `sampling` has penalties or `min_tokens`. `autojudge` needs the judge of that name, and the
    target's `hidden_rows` [K + 1, hidden size] of the layer that it reads, each from the same
    position as the row of logits.

    Logits may have any floating type and be on any device; half precision is computed in float32.
    Raises `InvalidArgumentError` for inconsistent arguments, and `FloatingPointError` for
    non-finite logits where a token is chosen. `prepare` raises the former and leaves the rest, for
    `decide_all` to do for many rounds together; `judge` does it all.
    """
    check_drafts(draft_token_ids, target_logits)
    drafts = _until_eos(draft_token_ids, eos_token_ids)
    rules = [Rule(rule) if isinstance(rule, str) else rule, *other_rules]
    if not resolved:
        rules = [*map(resolve_rule, rules)]
    check_segments(rule_segments, len(rules), start_position)
    check_open_window(rules, open_window, start_position)
    stretches = stretches_of(rules, rule_segments, sampling, start_position, len(drafts), autojudge)
    for stretch in stretches if drafts else ():
        if stretch.spec and (stretch.samples or not stretch.parts.criterion.never):
            check_distributions(
                stretch.rule, stretch.spec, draft_distributions, target_logits.shape
            )
    hidden = None
    for stretch in stretches if drafts else ():
        if stretch.parts.criterion.needs_hidden:
            assert autojudge is not None
            size = autojudge.hidden_size
            check_hidden(stretch.rule, hidden_rows, target_logits.shape[0], size)
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
    inquiry = inquire(stretches, round_)
    exact_until = exact_until_position - start_position
    ends = [*(stretch.first for stretch in stretches[1:]), len(drafts)]
    judged_by = [s for s, end in zip(stretches, ends, strict=True) for _ in range(s.first, end)]

    def decide(answers: Answers) -> Verdict:
        if all(stretch.samples for stretch in stretches):
            seen = None
            own = _own_tokens(stretches, round_, answers, exact_until, num_speculative_tokens)
            matches: Sequence[bool] = (False,) * len(drafts)  # no windows
        else:
            seen = observe(inquiry, answers, [s.num_samples for s in judged_by])
            own, matches = seen.own, seen.matches
        window = WindowWalk(
            [stretch.parts.window for stretch in judged_by],
            start_position,
            matches,
            num_speculative_tokens,
            open_window,
        )
        whole = Purse(budget)
        purses: dict[int, Purse] = {}  # by rule, all of them within the round's
        referees: dict[int, Referee | SamplingReferee] = {}  # by their first draft
        for stretch in stretches:
            parts = stretch.parts
            purse = purses.setdefault(stretch.rule_index, Purse(stretch.budget, whole))
            guard = Guard(control_token_ids, eos_token_ids, parts.guarded_token_ids)
            if seen is None or stretch.samples:
                referees[stretch.first] = SamplingReferee(
                    round_, answers, own, parts.loosening, window, guard, purse, exact_until
                )
            else:
                referees[stretch.first] = Referee(
                    round_, seen, parts.criterion, window, guard, purse, exact_until
                )
        by_draft = [referees[stretch.first] for stretch in judged_by]
        verdict = _walk(by_draft, own[-1], drafts, window, eos_token_ids)
        not_reached = [_NOT_REACHED] * (len(draft_token_ids) - len(verdict.decisions))
        return replace(verdict, decisions=(*verdict.decisions, *not_reached))

    return PendingVerdict(inquiry, decide)


judge = alone(prepare)
"""Judge one round by itself: `prepare` and its verdict."""


def _own_tokens(
    stretches: Sequence[Stretch],
    round_: Round,
    answers: Answers,
    exact_until: int,
    num_speculative_tokens: int,
) -> Sequence[int]:
    """Return the target's own tokens as speculative sampling needs them, the bonus token last.

    Those of drafts that are neither judged exactly nor guarded are left out.
    """
    count = len(round_.drafts)
    guards = any(stretch.parts.loosening for stretch in stretches)
    several = 0 < num_speculative_tokens < count  # rounds, with bonus tokens between them
    needed = count if guards or several else min(count, max(0, exact_until))
    (bonus,) = answers.tokens(TARGET_STREAM, count, count + 1)
    return (*answers.tokens(TARGET_STREAM, 0, needed), bonus)


def _walk(
    referees: Sequence[Referee | SamplingReferee],
    bonus: int,
    drafts: Sequence[int],
    window: WindowWalk,
    eos_token_ids: Collection[int],
) -> Verdict:
    """Let each draft's referee decide on it in order, up to the first rejection."""
    decisions: list[Decision] = []
    for index, referee in enumerate(referees):
        decision = referee.decide(index)
        decisions.append(decision)
        if decision.outcome is Outcome.REJECTED:
            assert decision.target_token_id is not None
            return window.verdict(decisions, decision.target_token_id, rejected=True)
        window.passed(index, decision)
    final = not drafts or drafts[-1] in eos_token_ids or bonus in eos_token_ids
    return window.verdict(decisions, bonus, final=final)


def _until_eos(draft_token_ids: Sequence[int], eos_token_ids: Collection[int]) -> list[int]:
    """Return the drafts up to the first EOS, the last token that can be accepted."""
    drafts = []
    for token in draft_token_ids:
        drafts.append(int(token))
        if token in eos_token_ids:
            break
    return drafts

"""`judge` on single rounds: its verdicts, what it reads, what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.engine.model import History
from flyspec.engine.sampling import choose
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.rounds import Budget, OpenWindow, Outcome, Verdict
from flyspec.values.tokens import SamplingParams
from tests.autojudges import random_judge
from verify_service.rules import judge
from verify_service.rules.criteria.entropy import Entropy
from verify_service.rules.criteria.typical import Typical

ACROSS = WindowScope.ACROSS_ROUNDS
EXACT, LOOSE, PROVISIONAL = Outcome.EXACT, Outcome.LOOSE, Outcome.PROVISIONAL
REJECTED, NOT_REACHED = Outcome.REJECTED, Outcome.NOT_REACHED


def outcomes(verdict: Verdict) -> list[Outcome]:
    return [decision.outcome for decision in verdict.decisions]


def wanting(tokens: list[int], gap: float = 0.1, vocab: int = 8) -> Tensor:
    """Logits whose most likely tokens are these, by `gap` before all others."""
    rows = torch.zeros(len(tokens), vocab, dtype=torch.float64)
    rows[range(len(tokens)), tokens] = gap
    return rows


def point_masses(tokens: list[int], vocab: int = 8) -> Distributions:
    rows = torch.full((len(tokens), vocab), -torch.inf)
    rows[range(len(tokens)), tokens] = 0.0
    return Distributions(rows, None)


def test_exact_measures_no_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(Entropy, "measure", refuse)
    verdict = judge("exact", [0, 0, 3, 0], torch.zeros(5, 8))
    assert verdict.num_accepted == 2
    assert verdict.decisions[2].gap_nats == 0.0
    assert [d.entropy for d in verdict.decisions] == [None] * 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_looks_no_further_than_it_must(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row on a CPU, all rows at once on a GPU, the one after the drafts included."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    measured, original = [], Typical.measure

    def measure(self: Typical, at: Any) -> Tensor:
        measured.append(at.raw.shape[0])
        return original(self, at)

    monkeypatch.setattr(Typical, "measure", measure)
    logits = wanting([1, 2, 3, 4, 5, 6], gap=9.0).to(device)
    verdict = judge("typical", [1, 2, 0, 0, 0], logits)
    assert outcomes(verdict) == [EXACT, EXACT, REJECTED, NOT_REACHED, NOT_REACHED]
    assert measured == ([1] if device == "cpu" else [6])


def test_a_short_round_keeps_the_window_that_was_requested() -> None:
    """If not given, W is the default K's: 6, in a round of 4 as in one of 8."""
    rows = wanting([0, 1, 2, 3, 4, 5, 6, 7, 0], gap=0.5)
    assert outcomes(judge("fly", [7, 1, 2, 3], rows[:5]))[0] is REJECTED
    assert outcomes(judge(Rule("fly", 3), [7, 1, 2, 3], rows[:5]))[0] is LOOSE
    assert outcomes(judge("fly", [7, 1, 2, 3, 4, 5, 6, 7], rows))[0] is LOOSE
    assert outcomes(judge("fly", [7, 1, 2, 3, 4, 5], rows[:7]))[0] is REJECTED


def test_fly_reference_with_a_window_as_long_as_the_round_accepts_nothing() -> None:
    rows = wanting([0, 1, 2, 3, 4, 5, 6, 7], gap=0.5)
    for window, outcome in ((7, REJECTED), (6, LOOSE)):
        drafts = [7, 1, 2, 3, 4, 5, 6]
        assert outcomes(judge(Rule("fly-reference", window), drafts, rows))[0] is outcome


def test_no_drafts_is_plain_decoding() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    for rule in ("exact", "fly", "margin", "fuzzy", "rejection"):
        assert judge(rule, [], logits, start_position=7) == Verdict(7, 1, start_length=7)
    hot = judge("rejection", [], logits, sampling=SamplingParams(1.0), start_position=7)
    assert (hot.num_accepted, hot.keep_length) == (0, 7)


def test_an_accepted_eos_ends_the_round() -> None:
    logits = torch.eye(4)[[1, 2, 3, 0]]
    verdict = judge("fly", [1, 2, 0], logits, eos_token_ids=[2])
    assert (verdict.num_accepted, verdict.next_token_id) == (2, 3)
    assert outcomes(verdict) == [EXACT, EXACT, NOT_REACHED]


@pytest.mark.parametrize("rule", ["fly", "margin", "typical", "random"])
def test_impossible_tokens_cost_infinitely_and_never_stand(rule: str) -> None:
    logits = torch.zeros(2, 4)
    logits[0, 3] = -math.inf
    verdict = judge(rule, [3], logits)
    assert verdict.num_accepted == 0
    assert verdict.decisions[0].gap_nats == math.inf
    truncated = judge(
        Rule("random", random_acceptance=1.0, fly_window_size=0),
        [3],
        torch.tensor([[9.0, 0.0, 0.0, 0.0]] * 2),
        sampling=SamplingParams(1.0, top_k=1),
    )
    assert outcomes(truncated) == [REJECTED]


def test_a_window_opens_is_carried_and_closes() -> None:
    """τ = 0.3, W = 4: three rounds inside one window."""
    rule = Rule("margin", fly_window_size=4)
    first = judge(rule, [1, 0], wanting([1, 2, 3]), start_position=10)
    assert outcomes(first) == [EXACT, PROVISIONAL]
    opened = first.open_window
    assert opened is not None
    assert opened[:3] == (11, 2, 4)
    assert opened.gap_nats == pytest.approx(0.1)
    assert first.keep_length == 12

    second = judge(rule, [1, 2], wanting([1, 2, 3]), start_position=13, open_window=opened)
    assert outcomes(second) == [EXACT, EXACT]
    assert second.open_window == opened._replace(remaining_matches=2)

    # The third closes it with its second draft, and its third opens another.
    third = judge(
        rule, [1, 2, 0, 4], wanting([1, 2, 3, 4, 5]), start_position=16,
        open_window=second.open_window,
    )  # fmt: skip
    assert outcomes(third) == [EXACT, EXACT, PROVISIONAL, EXACT]
    assert third.open_window is not None
    assert third.open_window[:3] == (18, 3, 3)
    assert not third.failed


def test_a_window_that_came_open_fails_at_any_mismatch() -> None:
    rule = Rule("margin", fly_window_size=4)
    opened = OpenWindow(11, 2, 3, 0.1)
    verdict = judge(rule, [1, 0, 3], wanting([1, 2, 3, 4]), start_position=13, open_window=opened)
    assert outcomes(verdict) == [EXACT, REJECTED, NOT_REACHED]
    assert verdict.failed
    assert (verdict.num_accepted, verdict.keep_length, verdict.next_token_id) == (0, 11, 2)
    assert verdict.open_window is None


def test_a_window_of_this_round_fails_like_a_rejection() -> None:
    rule = Rule("margin", fly_window_size=4)
    verdict = judge(rule, [1, 0, 0, 4], wanting([1, 2, 3, 4, 5]), start_position=10)
    assert outcomes(verdict) == [EXACT, REJECTED, NOT_REACHED, NOT_REACHED]
    assert (verdict.num_accepted, verdict.keep_length, verdict.next_token_id) == (1, 11, 2)
    assert not verdict.failed
    assert verdict.decisions[1].measure == pytest.approx(0.1)


@pytest.mark.parametrize("bonus_ends", [False, True])
def test_an_open_window_fails_at_the_end_of_the_sequence(bonus_ends: bool) -> None:
    rule = Rule("margin", fly_window_size=4)
    opened = OpenWindow(11, 2, 3, 0.1)
    eos = [3] if bonus_ends else [2]
    verdict = judge(
        rule, [1, 2], wanting([1, 2, 3]), start_position=13, open_window=opened, eos_token_ids=eos
    )
    assert outcomes(verdict) == [EXACT, EXACT]
    assert verdict.failed
    assert (verdict.num_accepted, verdict.keep_length, verdict.next_token_id) == (0, 11, 2)
    # One match fewer to go, and the drafted EOS closes it first.
    closing = opened._replace(remaining_matches=2)
    verdict = judge(
        rule, [1, 2], wanting([1, 2, 3]), start_position=13, open_window=closing, eos_token_ids=eos
    )
    assert (verdict.num_accepted, verdict.failed, verdict.open_window) == (2, False, None)


def test_nothing_drafted_fails_an_open_window() -> None:
    opened = OpenWindow(11, 2, 3, 0.1)
    verdict = judge("margin", [], torch.zeros(1, 8), start_position=13, open_window=opened)
    assert verdict == Verdict(11, 2, start_length=13)


def test_a_window_that_judge_opens_takes_its_share_of_the_budget() -> None:
    rule = Rule("margin", fly_window_size=1)
    logits, drafts = wanting([1, 2, 3, 4, 5]), [0, 2, 0, 4]
    verdict = judge(rule, drafts, logits, budget=Budget(loose_tokens=1))
    assert outcomes(verdict) == [LOOSE, EXACT, REJECTED, NOT_REACHED]
    verdict = judge(rule, drafts, logits, budget=Budget(loose_cost_nats=0.15))
    assert outcomes(verdict) == [LOOSE, EXACT, REJECTED, NOT_REACHED]
    assert outcomes(judge(rule, drafts, logits)) == [LOOSE, EXACT, LOOSE, EXACT]


def test_rules_name_tokens_that_are_never_loose() -> None:
    rule = Rule("margin", fly_window_size=0)
    logits = wanting([1, 2])
    assert outcomes(judge(rule, [0], logits)) == [LOOSE]
    for token in (0, 1):  # the drafted one, the target's own
        guarded = Rule("margin", fly_window_size=0, guarded_token_ids=(token,))
        assert outcomes(judge(guarded, [0], logits)) == [REJECTED]


def test_fuzzy_reference_rejects_matches_too() -> None:
    logits = wanting([1, 2, 3])
    verdict = judge("fuzzy-reference", [1, 2], logits, draft_distributions=point_masses([1, 2]))
    assert outcomes(verdict) == [REJECTED, NOT_REACHED]
    decision = verdict.decisions[0]
    assert (decision.target_token_id, decision.gap_nats, decision.measure) == (1, None, math.inf)
    assert (verdict.num_accepted, verdict.next_token_id) == (0, 1)
    near = Distributions(logits[:2].log_softmax(-1).float(), None)
    assert (
        outcomes(judge("fuzzy-reference", [1, 2], logits, draft_distributions=near)) == [EXACT] * 2
    )
    # Where all is judged exactly, a match is a match.
    verdict = judge(
        "fuzzy-reference", [1, 2], logits, draft_distributions=point_masses([1, 2]),
        exact_until_position=9,
    )  # fmt: skip
    assert outcomes(verdict) == [EXACT] * 2


def test_penalties_see_the_history_and_the_drafts_before() -> None:
    sampling = SamplingParams(0.8, frequency_penalty=1.5, repetition_penalty=1.2)
    logits = torch.zeros(6, 16)
    history = History([3, 1, 4, 1, 5, 9], 2)
    drafts: list[int] = []
    for j in range(5):  # the target's own tokens, one after the other
        own = choose(logits[: j + 1], sampling, 6, 7, history=history, draft_token_ids=drafts)
        drafts.append(int(own[j]))
    given = {"sampling": sampling, "seed": 7, "start_position": 6, "history": history}
    assert judge("exact", drafts, logits, **given).num_accepted == 5  # type: ignore[arg-type]
    without = judge("exact", drafts, logits, sampling=SamplingParams(0.8), seed=7, start_position=6)
    assert without.num_accepted < 5


def rejection_with(logits: Tensor, drafts: list[int], q: Distributions, **given: Any) -> Verdict:
    return judge(
        "rejection", drafts, logits, sampling=SamplingParams(1.0), draft_distributions=q, **given
    )


def test_rejection_knows_no_guards_and_no_budget() -> None:
    logits = torch.zeros(3, 8, dtype=torch.float64)
    q = Distributions(logits[:2].log_softmax(-1).float(), None)
    verdict = rejection_with(
        logits, [3, 4], q, budget=Budget(0, 0.0), control_token_ids=[3], eos_token_ids=[4]
    )
    assert outcomes(verdict) == [EXACT, EXACT]
    assert [d.measure for d in verdict.decisions] == pytest.approx([1.0, 1.0])


def test_rejection_judges_an_exact_prefix_by_match() -> None:
    logits = torch.zeros(3, 8, dtype=torch.float64)
    own = choose(logits, SamplingParams(1.0), 10, 0).tolist()
    q = Distributions(logits[:2].log_softmax(-1).float(), None)
    other = (own[0] + 1) % 8
    verdict = rejection_with(logits, [other, 0], q, start_position=10, exact_until_position=11)
    assert outcomes(verdict) == [REJECTED, NOT_REACHED]
    assert verdict.next_token_id == own[0]
    assert verdict.decisions[0].measure is None
    verdict = rejection_with(logits, [own[0], 0], q, start_position=10, exact_until_position=11)
    assert outcomes(verdict) == [EXACT, EXACT]


def test_rejection_of_what_the_target_cannot_say() -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = -math.inf
    verdict = rejection_with(logits, [3], point_masses([3]))
    assert outcomes(verdict) == [REJECTED]
    assert verdict.decisions[0].measure == 0.0
    assert verdict.next_token_id != 3


def test_greedy_rejection_is_exact_and_needs_no_distributions() -> None:
    logits = wanting([1, 2, 3])
    assert judge("rejection", [1, 0], logits) == judge("exact", [1, 0], logits)


@pytest.mark.parametrize(
    ("drafts", "rows", "message"),
    [([1], 3, "must have 2 rows"), ([9], 2, "between 0 and 3"), ([-1], 2, "between 0 and 3")],
)
def test_arguments_that_cannot_be_judged(drafts: list[int], rows: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        judge("exact", drafts, torch.zeros(rows, 4))


@pytest.mark.parametrize(
    ("rule", "draft", "message"),
    [
        (Rule("fuzzy"), None, "distributions: .*'fuzzy' needs .* send 2"),
        (Rule("fuzzy-reference"), None, "'fuzzy-reference' needs"),
        (Rule("rejection"), None, "'rejection' needs"),
        (Rule("fuzzy"), Distributions(torch.zeros(1, 8), None), "2, one per drafted token, got 1"),
        (Rule("fuzzy"), Distributions(torch.zeros(2, 7), None), "need 8 log-prob.*; got 7"),
        (
            Rule("fuzzy", divergence_top_k=0),
            Distributions(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)),
            "compares whole distributions.* list of up to 3",
        ),
    ],
)
def test_distributions_that_are_needed(
    rule: Rule, draft: Distributions | None, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        judge(
            rule, [1, 2], torch.zeros(3, 8), sampling=SamplingParams(1.0),
            draft_distributions=draft,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "window", "message"),
    [
        ("fly", OpenWindow(3, 0, 1, 0.0), "'fly' end with their round"),
        ("margin", OpenWindow(9, 0, 1, 0.0), "position must be between 0 and 8.*got 9"),
        ("margin", OpenWindow(3, 0, 0, 0.0), "remaining_matches must be at least 1, got 0"),
    ],
)
def test_windows_that_cannot_be_open(rule: str, window: OpenWindow, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        judge(rule, [1], torch.zeros(2, 8), start_position=9, open_window=window)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8)], ids=["greedy", "1"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 2, 3])
@pytest.mark.parametrize("name", RULE_PRESETS)
def test_logits_that_are_not_finite_are_refused(
    name: str, row: int, value: float, sampling: SamplingParams
) -> None:
    drafts = [0, 1, 2]
    logits = wanting([0, 1, 2, 3], gap=30.0)
    given = {"sampling": sampling, "draft_distributions": point_masses(drafts)}
    given |= {"hidden_rows": torch.zeros(4, 3), "autojudge": random_judge(3)}
    judge(name, drafts, logits, **given)
    logits[row, 5] = value
    with pytest.raises(FloatingPointError, match="not finite"):
        judge(name, drafts, logits, **given)

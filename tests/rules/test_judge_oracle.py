"""`judge` against the rules' restatement, on random cases, and mutants that must be caught."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from restatement import Case, Expected
from rule_cases import arguments, cases

from flyspec.errors import InvalidArgumentError
from flyspec.types import EntropyMeasure, Outcome, Rule, SamplingParams, Verdict
from verify_service.rules import judge
from verify_service.rules.criteria.entropy import Entropy
from verify_service.rules.guard import Guard, Purse
from verify_service.rules.window import Window

RULES = ["exact", "fly", "fly-paper", "fly-reference"]
ANY_RULE = ["K=1", "tie", "-inf", "before EOS"]
LOOSE_RULES = [*ANY_RULE, "j+W=K", "j+W=K+1", "theta=H", "W=0", "W>=K", "control", "impossible"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def differences(case: Case, expected: Expected, got: Verdict) -> list[str]:
    found = []
    if got.num_accepted != expected.num_accepted:
        found.append(f"accepted {got.num_accepted}, not {expected.num_accepted}")
    if got.next_token_id != expected.next_token:
        found.append(f"next token {got.next_token_id}, not {expected.next_token}")
    if [d.outcome.name for d in got.decisions] != expected.outcomes:
        found.append(f"{[d.outcome.name for d in got.decisions]}, not {expected.outcomes}")
    for j, decision in enumerate(got.decisions, start=1):
        if decision.outcome is not Outcome.NOT_REACHED:
            if decision.target_token_id != expected.targets.get(j):
                found.append(f"target at {j}: {decision.target_token_id}")
            found += compare(f"gap at {j}", decision.gap_nats, expected.gaps.get(j), 1e-9)
            tolerance = 1e-9 if case.tolerance < 1e-6 else 1e-5
            h = expected.entropies.get(j)
            found += compare(f"entropy at {j}", decision.entropy, h, tolerance)
    return found


def compare(what: str, got: float | None, expected: float | None, tolerance: float) -> list[str]:
    if (got is None) != (expected is None):
        return [f"{what}: {got}, not {expected}"]
    if got is None or expected is None or got == expected or abs(got - expected) <= tolerance:
        return []
    return [f"{what}: {got}, not {expected}"]


def run(rule: str, count: int, seed: int = 1) -> tuple[Counter[str], list[str]]:
    """How often each boundary occurred, and all that differed."""
    tags: Counter[str] = Counter()
    found = []
    for number, (case, expected) in enumerate(cases(rule, count, seed)):
        tags.update(expected.tags)
        wrong = differences(case, expected, judge(**arguments(case)))  # type: ignore[arg-type]
        if wrong:
            found.append(f"case {number}: {'; '.join(wrong)}")
    return tags, found


def check(rule: str, count: int, at_least: int) -> None:
    tags, found = run(rule, count)
    print(rule, count, dict(tags))
    assert not found, f"{len(found)} of {count}: {found[:3]}"
    for tag in ANY_RULE if rule == "exact" else LOOSE_RULES:
        assert tags[tag] >= at_least, f"{tag} occurred {tags[tag]} times"
    if rule != "exact":
        assert tags["loose"] >= count / 5


@pytest.mark.parametrize("rule", RULES)
def test_judge_agrees_with_the_restatement(rule: str) -> None:
    check(rule, 4000, at_least=50)


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_judge_agrees_with_the_restatement_on_20000_cases(rule: str) -> None:
    check(rule, 20_000, at_least=100)


def shifted(window: int, reach: int) -> Callable[[Window, int, list[bool]], bool]:
    def holds(self: Window, index: int, matches: list[bool]) -> bool:
        if index + 1 + max(0, self.reach + reach) > len(matches):
            return False
        return all(matches[index + 1 : index + 1 + max(0, self.following + window)])

    return holds


MUTANTS: dict[str, tuple[type, str, Any]] = {
    "> for >=": (Entropy, "accepts", lambda self, value: value > self.threshold),
    "< for >=": (Entropy, "accepts", lambda self, value: value < self.threshold),
    "no gate": (Entropy, "accepts", lambda self, value: True),
    "W + 1": (Window, "holds", shifted(1, 1)),
    "W - 1": (Window, "holds", shifted(-1, -1)),
    "one match fewer": (Window, "holds", shifted(-1, 0)),
    "one match more": (Window, "holds", shifted(1, 0)),
    "window past the round": (Window, "holds", shifted(0, -1)),
    "window short of the round": (Window, "holds", shifted(0, 1)),
    "no guard": (Guard, "allows", lambda self, draft, target: True),
    "guards the draft only": (Guard, "allows", lambda self, draft, _: not self._is_control(draft)),
    "guards the target only": (Guard, "allows", lambda self, _, own: not self._is_control(own)),
    "no cost bound": (Purse, "affords", lambda self, cost: True),
    "never pays": (Purse, "pay", lambda self, cost: None),
}


@pytest.mark.parametrize("rule", ["fly", "fly-paper", "fly-reference"])
def test_mutants_are_caught(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = [(case, expected, arguments(case)) for case, expected in cases(rule, 2000)]
    pool = [c for c in pool if c[1].gaps]  # without a mismatch nothing can differ
    survivors = []
    for name, (owner, method, mutant) in MUTANTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, mutant)
            if not any(differences(c, e, judge(**a)) for c, e, a in pool):  # type: ignore[arg-type]
                survivors.append(name)
    assert not survivors


# At temperature > 0 the second sample of `fly-reference` is a match of its own, whatever the gate.
@pytest.mark.parametrize(
    ("rule", "temperature"),
    [("fly", 0.0), ("fly", 0.8), ("fly-paper", 0.0), ("fly-paper", 0.8), ("fly-reference", 0.0)],
)
def test_limits_give_exact(rule: str, temperature: float) -> None:
    """θ = 1 with the normalized measure, and W >= K; uniform rows make the entropy 1 exactly."""
    generator = torch.Generator().manual_seed(3)
    closed = Rule(rule, 0, 1.0, None, EntropyMeasure.NORMALIZED)
    wide = Rule(rule, 8, 0.0)
    for seed in range(100):
        logits = torch.randn(9, 16, generator=generator)
        logits[seed % 9] = 0.0
        drafts = torch.randint(0, 16, (8,), generator=generator).tolist()
        exact, at_one, beyond = (
            judge(r, drafts, logits, sampling=SamplingParams(temperature), seed=seed)
            for r in ("exact", closed, wide)
        )
        assert at_one == exact
        assert beyond == exact


def test_exact_measures_no_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(Entropy, "measure", refuse)
    logits = torch.zeros(5, 8)
    verdict = judge("exact", [0, 0, 3, 0], logits)
    assert verdict.num_accepted == 2
    assert verdict.decisions[2].gap_nats == 0.0
    assert [d.entropy for d in verdict.decisions] == [None] * 4


def test_no_drafts_is_plain_decoding() -> None:
    verdict = judge("fly", [], torch.tensor([[0.0, 2.0, 1.0]]))
    assert verdict == Verdict(0, 1)


def test_an_accepted_eos_ends_the_round() -> None:
    logits = torch.eye(4)[[1, 2, 3, 0]]
    verdict = judge("fly", [1, 2, 0], logits, eos_token_ids=[2])
    assert (verdict.num_accepted, verdict.next_token_id) == (2, 3)
    assert [d.outcome for d in verdict.decisions] == [
        Outcome.EXACT,
        Outcome.EXACT,
        Outcome.NOT_REACHED,
    ]


def test_impossible_tokens_cost_infinitely_and_never_stand() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 3] = -math.inf
    verdict = judge("fly", [3], logits)
    assert verdict.num_accepted == 0
    assert verdict.decisions[0].gap_nats == math.inf


@pytest.mark.parametrize(
    ("drafts", "rows", "message"),
    [([1], 3, "must have 2 rows"), ([9], 2, "between 0 and 3"), ([-1], 2, "between 0 and 3")],
)
def test_arguments_that_cannot_be_judged(drafts: list[int], rows: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        judge("exact", drafts, torch.zeros(rows, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", RULES)
def test_cuda_judges_as_the_cpu(rule: str) -> None:
    for case, expected in cases(rule, 500):
        on_gpu = arguments(case) | {"target_logits": case.logits.cuda()}
        assert not differences(case, expected, judge(**on_gpu))  # type: ignore[arg-type]

"""Compares verdicts with what the restatement expects."""

from __future__ import annotations

from collections import Counter
from functools import cache

from flyspec.values.rounds import OpenWindow, Outcome, Verdict
from tests.rules.rule_case import Case, Expected, Open
from tests.rules.rule_cases import arguments, cases
from verify_service.rules import judge


def differences(case: Case, expected: Expected, got: Verdict) -> list[str]:
    found = []
    for what, value, wanted in (
        ("accepted", got.num_accepted, expected.num_accepted),
        ("next token", got.next_token_id, expected.next_token),
        ("keep_length", got.keep_length, expected.keep_length),
        ("failed", got.failed, expected.failed is not None),
        ("outcomes", [d.outcome.name for d in got.decisions], expected.outcomes),
    ):
        if value != wanted:
            found.append(f"{what}: {value}, not {wanted}")
    found += compare_windows("open window", got.open_window, expected.open)
    tolerance = 1e-9 if case.tolerance < 1e-6 else 1e-5
    for j, decision in enumerate(got.decisions, start=1):
        if decision.outcome is Outcome.NOT_REACHED:
            continue
        if decision.target_token_id != expected.targets.get(j):
            found.append(f"target at {j}: {decision.target_token_id}")
        found += compare(f"gap at {j}", decision.gap_nats, expected.gaps.get(j), 1e-9)
        entropy, measure = expected.entropies.get(j), expected.measures.get(j)
        found += compare(f"entropy at {j}", decision.entropy, entropy, tolerance)
        found += compare(f"measure at {j}", decision.measure, measure, tolerance)
    return found


def compare_windows(what: str, got: OpenWindow | None, expected: Open | None) -> list[str]:
    if got is None or expected is None:
        return [] if got is expected else [f"{what}: {got}, not {expected}"]
    if got[:3] != expected[:3] or abs(got.gap_nats - expected.gap) > 1e-9:
        return [f"{what}: {got}, not {expected}"]
    return []


def compare(what: str, got: float | None, expected: float | None, tolerance: float) -> list[str]:
    if (got is None) != (expected is None):
        return [f"{what}: {got}, not {expected}"]
    if got is None or expected is None or got == expected:
        return []
    if abs(got - expected) <= tolerance * max(1.0, abs(expected)):
        return []
    return [f"{what}: {got}, not {expected}"]


@cache
def first_cases(rule: str, count: int, scope: str | None) -> list[tuple[Case, Expected]]:
    """Kept for the tests that judge them in other ways; the long forms generate theirs."""
    return list(cases(rule, count, scope))


def run(rule: str, count: int, scope: str | None = None) -> tuple[Counter[str], list[str]]:
    """Count the boundaries that cases touch; return the counts and all differences."""
    tags: Counter[str] = Counter()
    found = []
    drawn = first_cases(rule, count, scope) if count < 5000 else cases(rule, count, scope)
    for number, (case, expected) in enumerate(drawn):
        tags.update(expected.tags)
        wrong = differences(case, expected, judge(**arguments(case)))
        if wrong:
            found.append(f"case {number}: {'; '.join(wrong)}")
    return tags, found

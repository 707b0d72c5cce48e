"""A hundred generations of each kind: how many an audit tells, as a table.

`pytest -m full -s tests/lab/audit/test_audit_at_length.py` prints what docs/audit.md shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from flyspec.bundled import DRAFT, TARGET
from flyspec.client.recordings import RecordedLine
from flyspec.config import VerifySettings
from flyspec.rules import Rule
from flyspec.rules.resolve import resolve_rule
from flyspec.values.requests import GenerateOptions
from flyspec_lab.audit import AuditedTarget, Auditor, AuditReport
from tests.lab.audit.recorded import claiming, forged, mixed_options, quantised, record, with_token
from tests.orchestrator.stacks import start_stack

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
COUNT = 100
ONE_THREAD = {"dtype": "auto", "threads": 1}
CLAIMS = {"exact": "fly", "fly": "exact", "margin": "fly", "typical": "relaxed", "mars": "kl"}
"""Rules that texts are made with, and those that are claimed."""


def auditor() -> Auditor:
    settings = VerifySettings(model=str(TARGET), max_sessions=1, threads=1)
    return Auditor(AuditedTarget.load(settings))


async def recordings(target, options: Sequence[GenerateOptions]) -> list[RecordedLine]:
    models = str(target), str(DRAFT)
    async with start_stack(models, draft=ONE_THREAD, verify=ONE_THREAD) as stack:
        return await record(stack.client, options)


def without_logprobs(line: RecordedLine) -> RecordedLine:
    return forged(line, lambda r: replace(r, output=replace(r.output, logprobs=())))


def told(what: str, reports: Sequence[AuditReport]) -> int:
    follow = sum(report.follows for report in reports)
    print(f"| {what} | {len(reports)} | {follow} | {len(reports) - follow} |")
    return follow


async def test_a_hundred_of_each(tmp_path) -> None:
    judge = auditor()
    drafted = [
        GenerateOptions(rule=Rule(rule), num_speculative_tokens=15, max_tokens=128)
        for rule in CLAIMS
    ]
    honest = await recordings(TARGET, [mixed_options(i) for i in range(COUNT)])
    ruled = await recordings(TARGET, [drafted[i % len(drafted)] for i in range(COUNT)])
    served = await recordings(quantised(tmp_path), [mixed_options(i) for i in range(COUNT)])
    print("\n| recordings | audited | follow | do not |\n|---|---|---|---|")
    assert told("honest, all rules", [judge.audit(line) for line in honest]) == COUNT
    assert told("honest, K = 15", [judge.audit(line) for line in ruled]) == COUNT

    caught = [judge.audit(line) for line in served]
    assert told("8-bit target", caught) <= 5
    bare = [judge.audit(without_logprobs(line)) for line in served]
    told("8-bit target, without log-probabilities", bare)
    gaps = [judge.audit(without_logprobs(claim)) for claim in await quantised_drafts(tmp_path)]
    assert told("8-bit target, K = 15, without log-probabilities", gaps) <= 5

    other = [
        claiming(line, rule=resolve_rule(Rule(CLAIMS[line.recording.started.rule.name])))
        for line in ruled
    ]
    assert told("another rule claimed, K = 15", [judge.audit(line) for line in other]) <= 15

    draw = random.Random(3)
    for careful in (False, True):
        changed, places = [], []
        for line in honest:
            ids = line.recording.output.token_ids
            place = draw.randrange(len(ids))
            token = draw.choice([t for t in range(6, 4000) if t != ids[place]])
            changed.append(with_token(line, place, token, careful))
            places.append(place)
        reports = [judge.audit(line) for line in changed]
        what = "one token changed" + (", in its round, too" if careful else "")
        assert told(what, reports) == 0
        found = [r.discrepancy.token_index if r.discrepancy else -1 for r in reports]
        print(f"  at the changed token: {sum(map(int.__eq__, found, places))}")
    seeds = [claiming(line, seed=7) for line in honest]
    sampled = [line for line in seeds if not line.recording.started.sampling.greedy]
    assert told("another seed claimed", [judge.audit(line) for line in sampled]) == 0


async def quantised_drafts(folder) -> list[RecordedLine]:
    options = GenerateOptions(rule=Rule("exact"), num_speculative_tokens=15, max_tokens=128)
    return await recordings(folder, [options] * COUNT)

"""Recordings of the bundled pair: honest ones follow, others do not, from the right token on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flyspec.bundled import AUTOJUDGE, DRAFT, TARGET
from flyspec.client.recordings import RecordedLine, from_line, to_line
from flyspec.config import VerifySettings
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule
from flyspec.rules.resolve import resolve_rule
from flyspec.values.phases import Phase
from flyspec.values.requests import GenerateOptions
from flyspec.values.tokens import SamplingParams
from flyspec_lab.audit import SIGNIFICANT, AuditedTarget, Auditor
from flyspec_lab.audit.report import DiscrepancyKind, Reason
from tests.lab.audit.recorded import (
    RULES,
    claiming,
    forged,
    mixed_options,
    quantised,
    record,
    with_token,
)
from tests.orchestrator.stacks import start_stack

pytestmark = pytest.mark.slow

NUM_MIXED = len(RULES)
DRAFTED = {"num_speculative_tokens": 15, "max_tokens": 64}


def load(model: Path, dtype: str = "auto") -> AuditedTarget:
    settings = VerifySettings(model=str(model), dtype=dtype, max_sessions=1, threads=1)
    return AuditedTarget.load(settings)


@pytest.fixture(scope="module")
def auditor() -> Auditor:
    return Auditor(load(TARGET))


@pytest.fixture(scope="module")
async def stack():
    draft = {"dtype": "auto", "threads": 1}
    async with start_stack((str(TARGET), str(DRAFT)), draft=draft, verify=draft) as running:
        yield running


@pytest.fixture(scope="module")
async def mixed(stack) -> list[RecordedLine]:
    """One generation for each rule, of all kinds of requests."""
    return await record(stack.client, [mixed_options(i, 64) for i in range(NUM_MIXED)])


@pytest.fixture(scope="module")
async def exact(stack) -> RecordedLine:
    """A generation with drafts, some of them rejected."""
    (line,) = await record(stack.client, [GenerateOptions(rule=Rule("exact"), **DRAFTED)])
    return line


def test_honest_generations_follow(auditor, mixed) -> None:
    rules = {line.recording.started.rule.name for line in mixed}
    assert rules == {rule.name for rule in RULES}
    for line in mixed:
        report = auditor.audit(line)
        assert report.follows, str(report)
        assert report.num_numbers >= report.num_tokens > 0
        assert not report.notes
        assert report.reason is None


def test_a_recording_survives_its_file(auditor, mixed) -> None:
    for line in mixed[:3]:
        read = from_line(to_line(line.recording))
        assert to_line(read) == to_line(line.recording)
        assert auditor.audit(RecordedLine("again", read)).follows


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The bundled target, quantised."""
    return quantised(tmp_path_factory.mktemp("quantised"))


def test_a_quantised_target_is_caught(mixed, folder) -> None:
    """Whichever of the two is quantised, the same numbers differ."""
    auditor = Auditor(load(folder))
    for line in mixed[:4]:
        report = auditor.audit(line)
        assert not report.follows
        assert report.reason is Reason.OTHER_WEIGHTS
        assert "recorded on weights" in report.notes[0]


async def test_another_rule_is_caught(auditor, stack) -> None:
    """A text can follow from two rules, if no draft is judged otherwise."""
    done = await record(stack.client, [GenerateOptions(rule=Rule("fly"), **DRAFTED)] * 3)
    claims = [Rule("exact"), Rule("margin"), Rule("fly", fly_entropy_threshold=0.9)]
    caught = 0
    for line in done:
        for claim in claims:
            report = auditor.audit(claiming(line, rule=resolve_rule(claim)))
            caught += not report.follows
            if not report.follows:
                assert report.reason in (Reason.OTHER_RULE, Reason.INCONSISTENT), str(report)
    assert caught >= 5


def test_another_seed_is_caught(auditor, mixed) -> None:
    sampled = [line for line in mixed if not line.recording.started.sampling.greedy]
    assert len(sampled) > 6
    reports = [auditor.audit(claiming(line, seed=7)) for line in sampled[:6]]
    assert not any(report.follows for report in reports)
    assert {report.reason for report in reports} <= {Reason.OTHER_SEED, Reason.ALTERED}


def test_one_changed_token_is_caught_where_it_is(auditor, mixed) -> None:
    """Or at a loosely accepted token before it, whose window fails by it."""
    places = []
    for number, line in enumerate(mixed[:10]):
        count = len(line.recording.output.token_ids)
        index = 7 * number % count
        other = 300 if line.recording.output.token_ids[index] != 300 else 301
        for rounds_too in (False, True):
            report = auditor.audit(with_token(line, index, other, rounds_too))
            assert report.discrepancy is not None
            places.append(index - report.discrepancy.token_index)
            if not rounds_too:
                assert places[-1] == 0
                assert report.reason is Reason.ALTERED
    assert all(0 <= place <= 6 for place in places)
    assert places.count(0) >= 18


def test_changed_text_is_caught_at_its_token(auditor, exact) -> None:
    recording = exact.recording
    texts = [auditor.target.local.tokenizer.decode([t]) for t in recording.output.token_ids]
    at = len("".join(texts[:9]))
    text = recording.output.text
    changed = text[:at] + ("X" if text[at] != "X" else "Y") + text[at + 1 :]
    line = forged(exact, lambda r: replace(r, output=replace(r.output, text=changed)))
    report = auditor.audit(line)
    assert report.discrepancy is not None
    assert (report.discrepancy.kind, report.discrepancy.token_index) == (DiscrepancyKind.RECORD, 9)
    assert report.reason is Reason.ALTERED


def test_a_cut_text_is_caught(auditor, exact) -> None:
    """Without its end, and with rounds that are missing."""

    def cut(recording):
        output = recording.output
        return replace(
            recording,
            output=replace(
                output,
                token_ids=output.token_ids[:-2],
                origins=output.origins[:-2],
                logprobs=output.logprobs[:-2],
            ),
        )

    report = auditor.audit(forged(exact, cut))
    assert report.discrepancy is not None
    assert report.discrepancy.token_index == len(exact.recording.output.token_ids) - 2
    shorter = forged(exact, lambda r: replace(r, rounds=r.rounds[:-1]))
    assert not auditor.audit(shorter).follows


def test_one_changed_number_is_caught(auditor, exact) -> None:
    def change(recording):
        logprobs = list(recording.output.logprobs)
        logprobs[5] = logprobs[5]._replace(logprob=logprobs[5].logprob - 0.01)
        return replace(recording, output=replace(recording.output, logprobs=logprobs))

    report = auditor.audit(forged(exact, change))
    assert report.discrepancy is not None
    assert (report.discrepancy.kind, report.discrepancy.token_index) == (DiscrepancyKind.NUMBER, 5)
    assert report.reason is Reason.ALTERED_NUMBER


async def test_other_budgets_are_caught(auditor, stack) -> None:
    options = GenerateOptions(rule=Rule("fly", fly_window_size=0), max_loose_tokens=9, **DRAFTED)
    (line,) = await record(stack.client, [options])
    assert auditor.audit(line).follows
    report = auditor.audit(claiming(line, max_loose_tokens=0))
    assert report.discrepancy is not None
    assert report.discrepancy.kind is DiscrepancyKind.RECORD


async def test_a_repeating_output_follows_with_its_loop_guard(auditor, stack) -> None:
    options = GenerateOptions(
        rule=Rule("fly", fly_window_size=0), ignore_eos=True, max_tokens=300,
        num_speculative_tokens=8,
    )  # fmt: skip
    for line in await record(stack.client, [options]):
        report = auditor.audit(line)
        assert report.follows, str(report)


def test_rounding_to_half_precision_is_told_from_other_weights(mixed, folder) -> None:
    """Allowed rounding hides what quantisation changes of a single number."""
    elsewhere = [claiming(line, numerics="bfloat16, native step of another machine")
                 for line in mixed[:5]]  # fmt: skip
    for model, other in ((TARGET, False), (folder, True)):
        auditor = Auditor(load(model), lambda model=model: load(model, "float32"))
        reports = [auditor.audit(line) for line in elsewhere]
        assert all(report.tolerance_nats > 0.1 for report in reports)
        chance = auditor.chance_of_rounding()
        assert (chance is not None and chance < SIGNIFICANT) == other


@pytest.fixture(scope="module")
def elsewhere(folder) -> tuple[Auditor, Auditor]:
    """Auditors that compute otherwise than the stack: of its target, and of a quantised one."""
    return Auditor(load(TARGET, "float32")), Auditor(load(folder, "float32"))


async def test_other_numerics_follow_within_rounding(elsewhere) -> None:
    """Single precision, whose bits depend on the batch: 8 bits are far beyond its rounding."""
    honest, other = elsewhere
    single = {"dtype": "float32", "threads": 1}
    models = str(TARGET), str(DRAFT)
    async with start_stack(models, draft=single, verify=single) as running:
        lines = await record(running.client, [mixed_options(i, 48) for i in range(5)])
    for line in lines:
        report = honest.audit(line)
        assert report.follows, str(report)
        assert 0 < report.tolerance_nats < 0.01
        report = other.audit(line)
        assert not report.follows
        assert report.reason is Reason.OTHER_WEIGHTS


PHASES = (
    GenerateOptions(
        phases=(Phase(Rule("typical"), until=("####",)), Phase(Rule("exact"))), seed=5, **DRAFTED
    ),
    GenerateOptions(
        phases=(
            Phase(Rule("margin"), until=("sum",), max_loose_tokens=2),
            Phase(Rule("relaxed", relaxed_ratio=0.3), until=("####",)),
            Phase(Rule("exact")),
        ),
        sampling=SamplingParams(temperature=1.0),
        seed=6,
        **DRAFTED,
    ),
    GenerateOptions(rule=Rule("typical"), exact_inside=("json",), seed=7, **DRAFTED),
)


async def test_phases_follow_and_others_do_not(auditor, stack) -> None:
    done = await record(stack.client, PHASES)
    for line in done:
        report = auditor.audit(line)
        assert report.follows, str(report)
    exact = resolve_rule(Rule("exact"))
    for line in done[:2]:
        phases = [replace(phase, rule=exact) for phase in line.recording.started.phases]
        assert not auditor.audit(claiming(line, phases=phases)).follows


async def test_a_trained_judge_is_needed_to_audit_it(auditor) -> None:
    settings = {"dtype": "auto", "threads": 1}
    verify = {**settings, "autojudge_file": str(AUTOJUDGE)}
    options = GenerateOptions(rule=Rule("autojudge"), **DRAFTED)
    async with start_stack((str(TARGET), str(DRAFT)), draft=settings, verify=verify) as stack:
        (line,) = await record(stack.client, [options])
    assert any(d.measure is not None for r in line.recording.rounds for d in r.decisions)
    with_judge = AuditedTarget.load(
        VerifySettings(model=str(TARGET), max_sessions=1, threads=1, autojudge_file=str(AUTOJUDGE))
    )
    report = Auditor(with_judge).audit(line)
    assert report.follows, str(report)
    with pytest.raises(InvalidArgumentError, match="--autojudge-file"):
        auditor.audit(line)

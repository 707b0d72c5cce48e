"""Recordings and their replay, against the models themselves; certificates, their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from flyspec import bundled
from flyspec.config import DraftSettings, VerifySettings
from flyspec.errors import ConfigError
from flyspec.rule_files import read_rules
from flyspec.rules import Rule
from flyspec.rules.resolve import resolve_rule
from flyspec_lab.local_model import LocalModel
from flyspec_lab.tasks import TASKS
from flyspec_lab.tuning.recording import Recorder, TuningRecord
from flyspec_lab.tuning.replay import (
    Replayed,
    RuleReplay,
    distributions_of,
    drafted_divergences,
)
from flyspec_lab.tuning.search import (
    AXES,
    Promise,
    candidates,
    certified,
    certify,
    fastest,
    recovery_low,
)
from flyspec_lab.tuning.tune import rules_file
from verify_service.rules import judge

K, COUNT, MAX_TOKENS = 7, 4, 96


@pytest.fixture(scope="module")
def models():
    target = VerifySettings(model=str(bundled.TARGET), threads=1)
    draft = DraftSettings(model=str(bundled.DRAFT), threads=1)
    return [LocalModel(settings) for settings in (target, draft)]


@pytest.fixture(scope="module")
def task():
    return TASKS["word_problems"](limit=COUNT, seed=11)


@pytest.fixture(scope="module")
def recording(models, task):
    return Recorder(*models, task, K, MAX_TOKENS).record(task.problems())


@pytest.fixture(scope="module")
def texts(models, task):
    """Prompts and the target's own texts."""
    target, _ = models
    prompts = [target.encode(problem.prompt) for problem in task.problems()]
    return prompts, target.continued(prompts, [MAX_TOKENS] * COUNT)


def test_the_models_continue_as_one_token_at_a_time(models, texts):
    target, _ = models
    prompts, outputs = texts
    sequence = list(prompts[0])
    for token in outputs[0][:12]:
        (row,) = (of.logits for of in target.rows([sequence], [1]))
        assert int(row[-1].argmax()) == token
        sequence.append(token)
    assert outputs[0][-1] in target.eos


def test_it_is_read_as_written(recording, tmp_path):
    path = tmp_path / "recording.npz"
    recording.save(path)
    again = TuningRecord.load(path)
    assert (again.info, list(again.texts)) == (recording.info, list(recording.texts))
    for one, other in zip(recording.rounds, again.rounds, strict=True):
        for name, value in vars(one).items():
            np.testing.assert_array_equal(value, getattr(other, name))


@pytest.mark.parametrize("content", [b"", b"PAR1 and more"])
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as a recording"):
        TuningRecord.load(path)


def test_rounds_are_those_of_exact_decoding(models, recording, texts):
    _, draft = models
    prompts, outputs = texts
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        at = 1
        for round_ in (r for r in recording.rounds if r.text == index):
            assert round_.start == at
            (drafts,) = draft.continued([prompt + output[:at]], [K])
            assert round_.draft_token_ids == drafts
            while at < len(output) and drafts[:1] == output[at : at + 1]:
                at, drafts = at + 1, drafts[1:]
            at += 1
        assert at >= len(output)


@pytest.fixture(scope="module")
def whole(models, recording, texts):
    """Each round's tokens before, and all logits of the target."""
    prompts, outputs = texts
    before = [prompts[r.text] + outputs[r.text][: r.start] for r in recording.rounds]
    sequences = [ids + r.draft_token_ids for ids, r in zip(before, recording.rounds, strict=True)]
    counts = [len(r.draft_token_ids) + 1 for r in recording.rounds]
    logits = [of.logits.clone() for of in models[0].rows(sequences, counts)]
    return list(zip(before, logits, strict=True))


@pytest.fixture(scope="module")
def replay(recording):
    return RuleReplay(recording)


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_a_verdict_is_that_on_the_whole_logits(axis, models, recording, texts, whole, replay):
    """The rebuilt rest of a row moves an entropy by little: verdicts agree but near a threshold."""
    target, _ = models
    _, outputs = texts
    for value in axis.values[::4]:
        rule = resolve_rule(axis.at(value), K)
        found = replay.by(rule)
        total = 0
        for round_, (before, logits) in zip(recording.rounds, whole, strict=True):
            verdict = judge(
                rule, round_.draft_token_ids, logits, start_position=len(before),
                eos_token_ids=target.eos, control_token_ids=target.bundle.control_token_ids,
                draft_distributions=distributions_of(round_) if "div" in axis.parameter else None,
            )  # fmt: skip
            kept = min(verdict.num_accepted + 1, len(outputs[round_.text]) - round_.start)
            total += kept
        assert abs(found.num_tokens.sum() - total) <= 1 + 0.05 * total


def test_a_fork_has_the_score_of_the_text_after_it(models, task, recording, texts):
    target, _ = models
    prompts, outputs = texts
    problems = task.problems()
    forks = 0
    for round_ in recording.rounds:
        for index in np.flatnonzero(~np.isnan(round_.fork_scores))[: 1 if forks < 8 else 0]:
            part = outputs[round_.text][: round_.start] + round_.draft_token_ids[: index + 1]
            (rest,) = target.continued([prompts[round_.text] + part], [MAX_TOKENS - len(part)])
            score = task.score(problems[round_.text], target.tokenizer.decode(part + rest))
            assert round_.fork_scores[index] == score.value
            forks += 1
    assert forks > 3


def test_looser_thresholds_draft_more_and_promise_no_more(replay):
    found = candidates(replay, AXES, 0.8)
    for axis in AXES:
        own = [c for c in found if c.axis == axis.name]
        lows = [c.recovery_low for c in own]
        assert lows == sorted(lows, reverse=True)
        assert own[-1].replayed.tokens_per_round >= own[0].replayed.tokens_per_round
    assert fastest(found, 1.01).axis == "exact"
    best = fastest(found, 0.0)
    assert best.replayed.tokens_per_round == max(c.replayed.tokens_per_round for c in found)
    for chosen, certificate in certified(found, AXES, Promise(0.01, 0.9)).values():
        assert chosen is None
        assert "needs at least" in certificate.problem


def replayed(changes):
    n = len(changes)
    zeros = np.zeros(n, np.int64)
    return Replayed(Rule("fly"), zeros, zeros, np.ones(n), np.array(changes), np.zeros(n, bool))


@pytest.mark.parametrize(
    ("losses", "confidence", "low"),
    # The bound on a Poisson mean after no event, and after two.
    [(0, 0.8, 1 - 1.6094 / 200), (2, 0.9, 1 - 5.3223 / 200)],
)
def test_a_bound_is_poissons(losses, confidence, low):
    changes = [-1.0] * losses + [0.0] * (200 - losses)
    assert recovery_low(replayed(changes), confidence) == pytest.approx(low, abs=1e-4)


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_a_preset_is_read_by_the_orchestrator(axis, tmp_path):
    rule = resolve_rule(axis.at(axis.values[1]), 15)
    path = tmp_path / "rules.toml"
    path.write_text(rules_file("tuned", rule, "Evidence. " * 30))
    found = read_rules(path).resolve(Rule("tuned"), 15)
    assert found == rule


def test_rebuilt_rows_keep_the_normalizer(recording, replay):
    for index, round_ in enumerate(recording.rounds):
        totals = replay.logits(index).double().logsumexp(dim=-1)
        torch.testing.assert_close(
            totals.float(), torch.from_numpy(round_.log_totals), atol=1e-3, rtol=0
        )


def test_divergences_are_those_of_both_models(models, recording, texts):
    """Over the tokens that the draft lists and one bucket for the rest, by scipy's distance."""
    target, draft = models
    prompts, outputs = texts
    found = drafted_divergences(recording)
    expected, matches = [], []
    for round_ in recording.rounds:
        before = prompts[round_.text] + outputs[round_.text][: round_.start]
        sequence, count = before + round_.draft_token_ids, len(round_.draft_token_ids)
        (p,) = (of.logits.double().softmax(-1) for of in target.rows([sequence], [count + 1]))
        (q,) = (of.logits.double().softmax(-1) for of in draft.rows([sequence[:-1]], [count]))
        for i, token in enumerate(round_.draft_token_ids):
            listed = q[i].topk(round_.draft_ids.shape[1]).indices
            pair = [torch.cat([row[listed], 1 - row[listed].sum(0, True)]) for row in (p[i], q[i])]
            expected.append(float(jensenshannon(*pair)) ** 2)
            matches.append(int(p[i].argmax()) == token)
    np.testing.assert_allclose(found.values, expected, atol=2e-3)
    assert list(found.matches) == matches
    assert (found.values >= 0).all()


def test_without_forks_rounds_are_the_same(models, task, recording):
    found = Recorder(*models, task, K, MAX_TOKENS).record(task.problems()[:2], forks=False)
    assert [r.draft_token_ids for r in found.rounds if r.text == 0] == [
        r.draft_token_ids for r in recording.rounds if r.text == 0
    ]
    assert all(np.isnan(text.score) for text in found.texts)
    assert all(np.isnan(round_.fork_scores).all() for round_ in found.rounds)


def slow(columns, num_prompts, max_rate, risk):
    """The loosest certified threshold, from the binomial's definition."""
    found = None
    for index, count in enumerate(columns):
        p = sum(
            math.comb(num_prompts, k) * max_rate**k * (1 - max_rate) ** (num_prompts - k)
            for k in range(count + 1)
        )
        if p > risk:
            break
        found = index
    return found


@given(
    columns=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    num_prompts=st.integers(12, 300),
    max_rate=st.sampled_from([0.01, 0.02, 0.1]),
    confidence=st.sampled_from([0.8, 0.9, 0.95]),
)
def test_equals_the_definition(columns, num_prompts, max_rate, confidence):
    flips = np.arange(num_prompts)[:, None] < np.array(columns)
    promise = Promise(max_rate, confidence)
    certificate = certify(flips, promise)
    assert certificate.index == slow(columns, num_prompts, max_rate, promise.risk)
    shown = columns[certificate.index or 0]
    assert (certificate.num_prompts, certificate.num_flips) == (num_prompts, shown)
    assert bool(certificate.problem) == (certificate.index is None)


@pytest.mark.parametrize("max_rate", [0.005, 0.01, 0.05])
def test_the_smallest_sample_is_the_smallest(max_rate):
    promise = Promise(max_rate, 0.9)
    enough = promise.min_prompts
    assert certify(np.zeros((enough, 1), bool), promise).index == 0
    too_few = certify(np.zeros((enough - 1, 1), bool), promise)
    assert too_few.index is None
    assert f"needs at least {enough}" in too_few.problem


def test_too_many_flips_are_named():
    flips = np.ones((500, 2), bool)
    assert "flips 500 of 500" in certify(flips, Promise(0.01, 0.9)).problem


def test_the_promise_holds_for_draws_from_a_known_law():
    """Rates around the limit, where breaking it is likeliest."""
    promise, rng = Promise(0.02, 0.9), np.random.default_rng(1)
    rates = np.array([0.005, 0.012, 0.0201, 0.03])
    broken, trials = 0, 2000
    for _ in range(trials):
        index = certify(rng.random((400, 4)) < rates, promise).index
        broken += index is not None and rates[index] > promise.max_rate
    assert broken / trials <= promise.risk + 3 * math.sqrt(
        promise.risk * (1 - promise.risk) / trials
    )


def test_certificates_that_share_a_risk_hold_together():
    assert Promise(0.02, 0.9).shared(8).risk == pytest.approx(0.0125)
    assert Promise(0.02, 0.9).shared(8).min_prompts == 217

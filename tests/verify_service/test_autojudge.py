"""The rule `autojudge` in the verify service: its rows, and who gets a judge at all."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from flyspec import wire
from flyspec.config import VerifySettings
from flyspec.engine.autojudge import read_judge, write_judge
from flyspec.engine.loading import load_model
from flyspec.engine.runner import ModelRunner
from flyspec.errors import ConfigError, InvalidArgumentError, UnavailableError
from flyspec.rules import Rule
from flyspec.v1 import verify_pb2
from flyspec.values.admin import JudgeInfo, VerifyServiceInfo
from flyspec.values.rounds import Outcome, VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.autojudges import facts_of, random_judge, tensors_of
from tests.tiny import HIDDEN_SIZE
from tests.verify_service.conftest import CACHES, JUDGE
from tests.verify_service.sessions import PROMPT, answers, opening
from verify_service.engine import VerifyEngine
from verify_service.rules import judge
from verify_service.service import VerifyServicer
from verify_service.warm_target import fitted


def rows_of(module, tokens, count):
    """Logits and last hidden states of transformers after the last `count` tokens."""
    with torch.inference_mode():
        found = module(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return found.logits[0, -count:], found.hidden_states[-1][0, -count:]


@pytest.mark.parametrize(
    ("engine", "sampling"),
    [*zip(CACHES, (SamplingParams(0.9), SamplingParams(), SamplingParams(0.9)), strict=True)],
    indirect=["engine"],
)
async def test_verdicts_are_those_of_transformers_own_hidden_states(engine, loaded, sampling):
    rng, outcomes = random.Random(5), set()
    for threshold in (None, 0.2, 0.6, 0.999):
        rule = Rule("autojudge", judge_threshold=threshold)
        session = engine.open(opening(PROMPT, rule, sampling, seed=3))
        tokens = PROMPT[:]
        for round_id in range(1, 5):
            drafts = [rng.randrange(3, 400) for _ in range(6)]
            (found,) = await answers(
                engine, session, VerifyRound(round_id, len(tokens), [], drafts)
            )
            logits, hidden = rows_of(loaded.model, [*tokens, *drafts], 7)
            expected = judge(
                rule, drafts, logits, sampling=sampling, seed=3, start_position=len(tokens),
                eos_token_ids=(1,), control_token_ids=(0, 1, 2),
                hidden_rows=hidden, autojudge=JUDGE,
            )  # fmt: skip
            assert found.keep_length == expected.keep_length
            assert found.next_token_id == expected.next_token_id
            for one, other in zip(found.decisions, expected.decisions, strict=True):
                assert one.outcome == other.outcome
                assert (one.measure is None) == (other.measure is None)
                assert one.measure == pytest.approx(other.measure or 0.0) or other.measure is None
                outcomes.add(one.outcome)
            tokens += [*drafts[: found.num_accepted], found.next_token_id]
        engine.close(session)
    assert outcomes >= {Outcome.LOOSE, Outcome.REJECTED}, outcomes


async def test_only_rounds_that_need_them_ask_for_hidden_rows(engine, monkeypatch):
    asked, forward = [], engine.model.forward

    def watched(steps):
        asked.append([step.hidden_layers for step in steps])
        return forward(steps)

    monkeypatch.setattr(engine.model, "forward", watched)
    count = len(PROMPT)

    async def layers(rule, round_, logprobs=None):
        asked.clear()
        session = engine.open(replace(opening(PROMPT, rule), logprobs=logprobs))
        await answers(engine, session, round_)
        engine.close(session)
        return {each for step in asked for each in step}

    drafts = VerifyRound(1, count, [], [5, 6])
    forced = VerifyRound(1, count, [], [5, 6], teacher_forced=True)
    assert await layers(Rule("autojudge"), drafts) == {(-1,)}
    assert await layers(Rule("fly"), drafts) == {()}
    assert await layers(Rule("autojudge"), forced, logprobs=0) == {()}
    assert await layers(Rule("autojudge"), VerifyRound(1, count, [], [], max_plain_tokens=3)) == {
        ()
    }


def test_a_generation_keeps_to_its_judge(engine):
    open_ = opening(PROMPT, Rule("autojudge"))
    engine.close(engine.open(replace(open_, judge_fingerprint=JUDGE.fingerprint)))
    with pytest.raises(UnavailableError, match=r"open\.judge_fingerprint: the generation"):
        engine.open(replace(open_, judge_fingerprint="0" * 31 + "9"))


async def test_without_a_judge_the_rule_is_neither_offered_nor_taken(engine, loaded):
    def described(engine):
        servicer = VerifyServicer(engine, loaded.tokenizer, VerifySettings(model="x"))
        return servicer.Describe(verify_pb2.VerifyServiceDescribeRequest(), None)

    without = VerifyEngine(engine.model, loaded.tokenizer, 8)
    info = wire.decode(VerifyServiceInfo, await described(without))
    assert info.judge is None
    assert "autojudge" not in info.rules
    assert "random" in info.rules
    with pytest.raises(InvalidArgumentError, match=r"needs a judge, and .* has none; start"):
        without.open(opening(PROMPT, Rule("autojudge")))
    with pytest.raises(UnavailableError, match="has 'no judge'"):
        without.open(
            VerifyOpen(PROMPT, 8, Rule("autojudge"), SamplingParams(), 0, judge_fingerprint="a")
        )
    info = wire.decode(VerifyServiceInfo, await described(engine))
    assert info.judge == JudgeInfo(JUDGE.fingerprint, JUDGE.facts.threshold)
    assert "autojudge" in info.rules


@pytest.fixture(scope="module")
def runner(target_dir):
    return ModelRunner(load_model(target_dir, "cpu", "float32"), 2)


def test_a_file_is_loaded_for_its_target_only(runner, tmp_path):
    file = tmp_path / "judge.safetensors"

    def write(size=HIDDEN_SIZE, **facts):
        facts = {"weights_fingerprint": runner.info.weights_fingerprint, **facts}
        return write_judge(
            file, tensors_of(size, np.random.default_rng(1)), facts_of(size, **facts)
        )

    written = write()
    loaded = fitted(read_judge(file), runner, str(file))
    assert loaded.info == written.info
    assert loaded.weight.dtype == torch.float64
    assert runner.cache.num_free == 2
    other = write(weights_fingerprint="ab")
    with pytest.raises(ConfigError, match=r"judge.safetensors: it was trained for .* weights ab"):
        fitted(other, runner, str(file))
    other = write(size=7)
    with pytest.raises(ConfigError, match="for hidden rows of size 7, the target's have 48"):
        fitted(other, runner, str(file))


@pytest.mark.parametrize("rows", [None, torch.zeros(2, 4), torch.zeros(3, 5)])
def test_judging_needs_a_row_for_each_row_of_logits(rows):
    given = {"hidden_rows": rows, "autojudge": random_judge(4)}
    with pytest.raises(InvalidArgumentError, match=r"hidden_rows: .* needs 3 of size 4"):
        judge("autojudge", [1, 2], torch.zeros(3, 8), **given)
    assert judge("autojudge", [], torch.zeros(1, 8), **given).next_token_id == 0  # plain decoding


def test_judging_needs_a_judge():
    with pytest.raises(InvalidArgumentError, match="needs a judge, and this target has none"):
        judge("autojudge", [1], torch.zeros(2, 8), hidden_rows=torch.zeros(2, 4))

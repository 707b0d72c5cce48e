"""The rule `autojudge` through a stack: offered where there is a judge, and kept to that judge."""

from __future__ import annotations

import numpy as np
import pytest

from flyspec.client import GenerateOptions
from flyspec.engine.autojudge import write_judge
from flyspec.engine.loading import load_model
from flyspec.errors import ConfigError, InvalidArgumentError, TargetChangedError
from flyspec.rules import Rule
from flyspec.values.tokens import Origin
from tests.autojudges import facts_of, tensors_of
from tests.orchestrator.stacks import orchestrator_over, slow, start_stack
from tests.tiny import HIDDEN_SIZE
from tests.waiting import until

PROMPT = "The cat sat on the mat, and the dog sat"


@pytest.fixture(scope="module")
def judge_of(model_dirs, tmp_path_factory):
    """Writes a judge of the target with such a threshold; returns its file."""
    fingerprint = load_model(model_dirs[0], "cpu", "float64").info.weights_fingerprint
    folder = tmp_path_factory.mktemp("judges")

    def write(threshold: float) -> str:
        file = folder / f"{threshold}.safetensors"
        tensors = tensors_of(HIDDEN_SIZE, np.random.default_rng(5))
        facts = facts_of(HIDDEN_SIZE, weights_fingerprint=fingerprint, threshold=threshold)
        write_judge(file, tensors, facts)
        return str(file)

    return write


def options(**changes):
    parameters = {"max_tokens": 30, "ignore_eos": True, "num_speculative_tokens": 5, "seed": 1}
    return GenerateOptions(**{"rule": Rule("autojudge"), **parameters, **changes})


async def test_texts_follow_the_judges_threshold(model_dirs, judge_of):
    async with start_stack(model_dirs, verify={"autojudge_file": judge_of(0.75)}) as stack:
        assert "autojudge" in (await stack.client.list_models()).rules
        text = await stack.client.complete(PROMPT, options(disable_loop_guard=True))
        assert text.started.rule.judge_threshold == 0.75
        exact, own, all_ = [
            await stack.client.complete(
                PROMPT,
                options(rule=Rule("autojudge", judge_threshold=threshold), disable_loop_guard=True),
            )
            for threshold in (0.0, 0.75, 1.0)
        ]
        plain = await stack.client.complete(PROMPT, options(num_speculative_tokens=0))
        assert exact.token_ids == plain.token_ids
        assert own.token_ids == text.token_ids
        loose = [
            sum(origin is Origin.LOOSE for origin in each.origins) for each in (exact, own, all_)
        ]
        assert loose[0] == 0 < loose[1]
        assert loose[1] < loose[2]


async def test_without_a_judge_a_request_is_refused_before_it_runs(model_dirs):
    async with start_stack(model_dirs) as stack:
        assert "autojudge" not in (await stack.client.list_models()).rules
        with pytest.raises(InvalidArgumentError, match=r"rule\.name: 'autojudge' needs a judge"):
            await stack.client.complete(PROMPT, options())
        assert stack.verify_engine.sessions.opened_total == 0
        with pytest.raises(ConfigError, match=r"--rule autojudge: the target .* has no judge"):
            async with orchestrator_over(stack, rule="autojudge"):
                pass


async def test_a_replica_without_the_judge_gets_the_other_rules_only(model_dirs, judge_of):
    async with (
        start_stack(model_dirs) as without,
        start_stack(model_dirs, verify={"autojudge_file": judge_of(0.5)}) as having,
        orchestrator_over(without, having) as (client, admin),
    ):

        async def offered() -> bool:
            return "autojudge" in (await client.list_models()).rules

        await until(offered)
        assert all(target.ready for target in (await admin.status()).targets)
        for n in range(4):
            await client.complete(f"{n} {PROMPT}", options())
        assert without.verify_engine.sessions.opened_total == 0
        assert having.verify_engine.sessions.opened_total == 4
        # A prompt has its own replica, by a hash of its tokens and of addresses with random ports.
        for n in range(24):
            await client.complete(f"{n} {PROMPT}", options(rule=Rule("fly"), max_tokens=2))
        assert without.verify_engine.sessions.opened_total > 0


async def test_a_generation_does_not_go_on_with_another_judge(model_dirs, judge_of):
    async with (
        start_stack(model_dirs, verify={"autojudge_file": judge_of(0.5)}) as one,
        start_stack(model_dirs, verify={"autojudge_file": judge_of(0.6)}) as two,
        orchestrator_over(one) as (client, _),
    ):
        slow(one)
        restarted = False

        async def generate() -> None:
            nonlocal restarted
            async for event in client.generate(PROMPT, options(max_tokens=60)):
                if hasattr(event, "token_ids") and not restarted:
                    restarted = True
                    one.verify_servicer = two.verify_servicer
                    await one.restart_verify()

        with pytest.raises(TargetChangedError, match=r"the judge of .* was replaced while"):
            await generate()
        text = await client.complete(PROMPT, options())
        assert text.started.rule.judge_threshold == 0.6

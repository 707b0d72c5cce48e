"""Tokens drawn on the device: those of single steps, read once; rounds judged with one read."""

import random
from itertools import product

import pytest
import torch

from flyspec.engine import stepwise
from flyspec.engine.captured.shapes import continuations
from flyspec.engine.captured.steps import MAX_DRAWN
from flyspec.engine.model import Draw, Step
from flyspec.values.rounds import Verdict
from flyspec.values.tokens import SamplingParams
from tests.gpu.calls import EVENT_WAITS, GRAPHS, KERNELS, WAITS, count_calls
from tests.gpu.devices import MARKS, ON_CUDA, VOCABULARY, runner_of
from verify_service.rules import decide_all, prepare

pytestmark = MARKS

F64, F32 = torch.float64, torch.float32
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9)
TRUNCATED = SamplingParams(temperature=0.8, top_p=0.8, top_k=20)
MIXED = [GREEDY, SAMPLED, TRUNCATED]
SAMPLINGS = {"greedy": [GREEDY], "sampled": [SAMPLED], "truncated": [TRUNCATED], "mixed": MIXED}


def draws_of(runner, samplings, count, batch):
    rng = random.Random(7)
    draws = []
    for index in range(batch):
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 2]))]
        draws.append(
            Draw(
                Step(index, 0, ids),
                samplings[index % len(samplings)],
                seed=rng.randrange(2**53),
                max_tokens=count,
                confidences=True,
            )
        )
    return draws


@pytest.mark.parametrize(
    ("dtype", "attention", "way"),
    [(F64, "sdpa", "fixed"), (F64, "sdpa", "graphs"), (F32, "flex", "graphs"),
     (F32, "sdpa", "compiled")],
    ids=lambda value: str(value).removeprefix("torch."),
)  # fmt: skip
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_draws_are_those_of_single_steps(dtype, attention, way, kind):
    """The same noise at the same positions: of keys alone, whatever drew it."""
    runner = runner_of(dtype, attention, way, num_slots=4)
    for count, batch in product((15, 1, 7), (1, 3)):
        draws = draws_of(runner, SAMPLINGS[kind], count, batch)
        expected = stepwise.draw(runner.forward, draws)
        for _ in range(2):  # the second time replays
            found = runner.draw(draws)
            for one, other in zip(found, expected, strict=True):
                assert one.token_ids == other.token_ids
                assert one.confidences == pytest.approx(other.confidences, abs=1e-3)


def assert_one_wait(calls):
    """Whatever it was, the host waited once, for the read."""
    assert calls.of(WAITS) == (1 if ON_CUDA else 0), calls


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("count", [15, 1, MAX_DRAWN])
def test_a_proposal_waits_for_the_device_once(kind, count):
    runner = runner_of(F32, "sdpa", "graphs", num_slots=4)
    draws = draws_of(runner, SAMPLINGS[kind], count, 3)
    for _ in range(2):
        runner.draw(draws)
    calls = count_calls(lambda: runner.draw(draws))
    assert_one_wait(calls)
    if ON_CUDA:
        programs = 1 + len(continuations(count - 1))
        assert calls.of(GRAPHS) == programs, calls
        # Each program's last transfer, which is long over.
        assert calls.of(EVENT_WAITS) <= programs, calls
        assert calls.of(KERNELS) < 6 * programs, calls


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("sampling", MIXED, ids=["greedy", "sampled", "truncated"])
def test_a_verify_step_waits_for_the_device_once(sampling, attention):
    """A forward and the judging of all its rounds, in every rule: together one read."""
    runner = runner_of(F32, attention, "graphs", num_slots=8)
    rng = random.Random(8)
    rounds = [[rng.randrange(VOCABULARY) for _ in range(9)] for _ in range(8)]
    steps = [Step(slot, 0, ids, 9) for slot, ids in enumerate(rounds)]
    rules = ["exact", "fly", "typical", "margin"] * 2
    verdicts = []

    def step():
        rows = runner.forward(steps)
        verdicts[:] = decide_all([
            prepare(rule, ids[1:], logits, sampling=sampling, seed=index, start_position=1)
            for index, (rule, ids, (logits, _)) in enumerate(zip(rules, rounds, rows, strict=True))
        ])  # fmt: skip

    for _ in range(3):
        step()
    assert_one_wait(count_calls(step))
    assert all(isinstance(verdict, Verdict) for verdict in verdicts)
    assert count_calls(lambda: runner.forward(steps)).of(WAITS) == 0
    # Judged alone, on a CPU, each is the same.
    logits = [rows.logits.cpu() for rows in runner.forward(steps)]
    alone = decide_all([
        prepare(rule, ids[1:], own, sampling=sampling, seed=index, start_position=1)
        for index, (rule, ids, own) in enumerate(zip(rules, rounds, logits, strict=True))
    ])  # fmt: skip
    for one, other in zip(verdicts, alone, strict=True):
        assert isinstance(other, Verdict)
        assert (one.num_accepted, one.next_token_id) == (other.num_accepted, other.next_token_id)

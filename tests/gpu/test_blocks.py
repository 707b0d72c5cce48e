"""Steps on the device, in every way they can run, equal each sequence alone."""

import random

import pytest
import torch

from flyspec.engine.cache_table import Claim
from flyspec.engine.captured.shapes import AHEAD, CONTINUATIONS, LENGTHS
from flyspec.engine.captured.steps import CapturedSteps
from flyspec.engine.model import Step
from tests.gpu.devices import BLOCK, MARKS, VOCABULARY, assert_near, expected_logits, runner_of

pytestmark = [
    *MARKS,
    # Unfused, it computes all scores: what happens once torch compiles no further shapes.
    pytest.mark.filterwarnings("error:flex_attention called without torch.compile"),
]

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
KINDS = [("sdpa", F64), ("sdpa", F32), ("flex", F32), ("flex", BF16), ("flashinfer", BF16)]
WAYS = ("exact", "fixed", "graphs", "compiled")
CASES = [
    pytest.param(attention, dtype, way, id=f"{attention}-{str(dtype)[6:]}-{way}")
    for attention, dtype in KINDS
    for way in WAYS
    # Compiling takes long: once for each attention.
    if way != "compiled" or (attention, dtype) != ("sdpa", F64)
] + [pytest.param("slots", dtype, "exact", id=f"slots-{str(dtype)[6:]}") for dtype in (F64, BF16)]
NUM_SLOTS = 32


def text(rng, length):
    return [rng.randrange(VOCABULARY) for _ in range(length)]


class Sequences:
    """Contents that each slot of a runner should have, and steps that are compared with it."""

    def __init__(self, runner, dtype):
        self._runner, self._dtype = runner, dtype
        self.held = {}

    def run(self, parts):
        """Run one step: each part is a slot, how many tokens of it to keep, and what follows."""
        steps = []
        for slot, kept, new in parts:
            self.held[slot] = [*self.held.get(slot, [])[:kept], *new]
            steps.append(Step(slot, kept, new, len(new)))
        for step, rows in zip(steps, self._runner.forward(steps), strict=True):
            expected = expected_logits(self._dtype, self.held[step.slot])
            assert_near(rows.logits, expected[step.start :], self._dtype)


@pytest.mark.parametrize(("attention", "dtype", "way"), CASES)
def test_steps_equal_each_sequence_alone(attention, dtype, way):
    """A prompt in chunks, short prompts together, rounds, rollbacks; batches of 1 to 32.

    The shapes are few, since each is compiled: an exact step and a fixed one for each line.
    """
    runner = runner_of(dtype, attention, way)
    rng = random.Random(1)
    sequences = Sequences(runner, dtype)
    slots = [runner.cache.acquire().slot for _ in range(NUM_SLOTS)]
    rng.shuffle(slots)
    first = slots[0]
    sequences.run([(first, 0, text(rng, 160))])
    sequences.run([(first, 160, text(rng, 160))])
    for turn in range(2):  # the second time replays
        sequences.run([(slot, 0, text(rng, 5)) for slot in slots[1:]])
        everything = rng.sample(slots, NUM_SLOTS)
        sequences.run([(s, len(sequences.held[s]), text(rng, 1)) for s in everything])
        sequences.run([(slot, 3 + turn, text(rng, 16)) for slot in slots[1:9]])
        sequences.run([(first, 310 - turn, text(rng, 16))])
        sequences.run([(first, 317, text(rng, 1))])
        sequences.run([(slot, 9, text(rng, 24)) for slot in slots[4:6]])  # K = 23: many rows


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_shared_blocks_are_read_by_all_and_copied_before_they_are_written(attention):
    runner = runner_of(F32, attention, "graphs", num_slots=4)
    rng = random.Random(3)
    sequences = Sequences(runner, F32)
    common = text(rng, 2 * BLOCK + 7)
    one = runner.cache.acquire(common)
    sequences.run([(one.slot, 0, common)])
    other = runner.cache.acquire(common)
    assert (one.length, other.length) == (0, 2 * BLOCK)
    sequences.held[other.slot] = common[: other.length]
    sequences.run([(other.slot, 2 * BLOCK, text(rng, 16))])
    # Back into a shared block: the other's is as it was.
    sequences.run([(other.slot, BLOCK + 3, text(rng, 16))])
    sequences.run([(one.slot, len(common), text(rng, 16))])


def test_prefixes_of_slots_are_found_and_copied():
    runner = runner_of(F64, "slots", num_slots=3)
    rng = random.Random(1)
    sequences = Sequences(runner, F64)
    shared = text(rng, 60)
    first = runner.cache.acquire(shared).slot
    sequences.run([(first, 0, shared)])
    second, length = runner.cache.acquire([*shared[:40], *text(rng, 9)])
    assert length == 40
    sequences.held[second] = shared[:40]
    sequences.run([(second, 40, text(rng, 9)), (first, 59, shared[59:])])


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_a_preempted_sequence_is_computed_again(attention):
    runner = runner_of(F32, attention, "graphs", num_slots=2, num_blocks=24)
    rng = random.Random(4)
    sequences = Sequences(runner, F32)
    cache = runner.cache
    old, young = (cache.acquire().slot for _ in range(2))
    sequences.run([(old, 0, text(rng, 300)), (young, 0, text(rng, 300))])
    lost = sequences.held[young]
    assert cache.make_room([Claim(old, 300, 200), Claim(young, 300, 1)]) == [True, False]
    assert (cache.length(young), cache.preemptions) == (0, 1)
    sequences.run([(old, 300, text(rng, 200))])
    cache.release(old)
    assert cache.make_room([Claim(young, 0, len(lost))]) == [True]
    sequences.run([(young, 0, lost)])


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [(F32, "sdpa"), (F32, "flex"), (BF16, "flex"), (BF16, "auto"), (F64, "slots")],
)
def test_what_a_service_does_at_startup(dtype, attention):
    """The trial of the model, then all that is captured ahead, of compiled layers."""
    runner = runner_of(dtype, attention, num_slots=2)
    runner.warm_up()
    runner = runner_of(dtype, attention, "compiled", num_slots=2)
    if not isinstance(runner._steps, CapturedSteps):
        return  # slots, or a CPU, which attends by segments
    count = runner._steps.capture_ahead()
    # Two sizes of a batch: rounds of each length, a drafter's first steps, and what it draws after.
    rounds = sum(length <= AHEAD[1] for length in LENGTHS)
    assert count >= 2 * (rounds + 2 + len(CONTINUATIONS[1:]))
    assert runner._steps._graphs.fixed
    rng = random.Random(5)
    sequences = Sequences(runner, dtype)
    sequences.run([(runner.cache.acquire().slot, 0, text(rng, 16))])
    assert runner._steps.capture_ahead() == count

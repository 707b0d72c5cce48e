"""The batch-invariant mode: the bits of a token's logits do not depend on the rest of a step."""

import random

import pytest
import torch

from flyspec.engine import batch_invariance
from flyspec.engine.batch_invariance import tiles
from flyspec.engine.batch_invariance.tiles import AlignedActivation, Sizes, TiledLinear
from flyspec.engine.model import Step
from flyspec.engine.runner import ModelRunner
from flyspec.engine.slots import MIN_REUSE
from flyspec.errors import ConfigError
from tests.engine.random_models import VOCABULARY, loaded_model, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 45
# No multiple of a vector or of a block of keys: a slot's end is read beyond.
CONTEXT = 133
MODELS = {
    "qwen2": {},  # has biases
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7, "head_dim": 6},
}


def invariant_runner(kind, dtype, **changes):
    model = make_model(kind, dtype=dtype, **{**MODELS[kind], **changes})
    runner = ModelRunner(loaded_model(model, CONTEXT), 4, batch_invariant=True)
    runner.warm_up()
    assert runner.batch_invariant
    return runner


def alone(runner, token_ids):
    """Return the logits after each token, one token per step."""
    slot = runner.cache.acquire().slot
    rows = [runner.forward([Step(slot, i, [t])])[0].logits for i, t in enumerate(token_ids)]
    runner.cache.release(slot)
    runner.cache.forget()
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen2", torch.bfloat16),
        ("mistral", torch.float32),
        pytest.param("gemma2", torch.bfloat16, marks=pytest.mark.full),
    ],
)
def test_a_sequences_logits_are_the_same_in_any_company(kind, dtype):
    runner = invariant_runner(kind, dtype)
    draw = random.Random(5)
    sequences = [[draw.randrange(3, VOCABULARY) for _ in range(LENGTH)] for _ in range(3)]
    # Two that begin alike, so that one may start from the other's prefix.
    sequences.append(sequences[0][: MIN_REUSE + 9] + sequences[1][MIN_REUSE + 9 :])
    expected = [alone(runner, ids) for ids in sequences]
    hits = 0
    for _ in range(2):
        draw.shuffle(order := list(range(len(sequences))))
        leases = {i: runner.cache.acquire(sequences[i]) for i in order}
        hits += sum(lease.length for lease in leases.values())
        at = {i: min(leases[i].length, LENGTH - 1) for i in order}
        while any(place < LENGTH for place in at.values()):
            steps, rows = [], []
            for i in order:
                # Often what one round brings, now and then a piece of a prompt.
                count = min(draw.choice([1, 1, 2, 3, 5, 9, 16, 17, 18, 33, 70]), LENGTH - at[i])
                if count and draw.random() < 0.8:
                    piece = sequences[i][at[i] : at[i] + count]
                    steps.append(Step(leases[i].slot, at[i], piece, count))
                    rows.append(expected[i][at[i] : at[i] + count])
                    # What is rolled back is run again.
                    at[i] += count if draw.random() < 0.7 else draw.randrange(count) + 1
            if steps:
                for got, wanted in zip(runner.forward(steps), rows, strict=True):
                    assert torch.equal(got.logits, wanted)
        for lease in leases.values():
            runner.cache.release(lease.slot)
    assert hits


def test_long_sequences_and_windows_over_blocks_of_keys():
    for kind in ("llama", "mistral"):
        model = make_model(
            kind,
            dtype=torch.float32,
            max_position_embeddings=1300,
            **({"sliding_window": 200} if kind == "mistral" else {}),
        )
        runner = ModelRunner(loaded_model(model, 1300), 2, batch_invariant=True)
        ids = [(7 * i * i + 3 * i) % VOCABULARY for i in range(1250)]
        (whole,) = runner.forward([Step(0, 0, ids, len(ids))])
        for first, last in ((500, 530), (700, 705), (1020, 1030), (1240, 1250)):
            for start in range(first, last):
                runner.forward([Step(1, 0, ids[:5]), Step(0, start, ids[start : start + 1])])
            *_, got = runner.forward([Step(1, 0, ids[:9]), Step(0, first, ids[first:last], 4)])
            assert torch.equal(got.logits, whole.logits[last - 4 : last])


def test_a_model_that_cannot_have_it_is_refused_or_left_as_it_is():
    """Experts are not linear layers: their results depend on what else is routed to them."""
    runner = ModelRunner(
        loaded_model(make_model("mixtral", dtype=torch.float32), CONTEXT), 4, batch_invariant=True
    )
    with pytest.raises(ConfigError, match="use --no-batch-invariant"):
        runner.warm_up()


def test_left_open_it_is_on_in_bfloat16_only_where_small_steps_need_no_filling(monkeypatch):
    full = Sizes(tiles.SMALL)
    monkeypatch.setattr(tiles, "linear_sizes", lambda *key: full)
    for dtype, expected in ((torch.bfloat16, True), (torch.float32, False)):
        model = make_model("llama", dtype=dtype)
        assert batch_invariance.apply("m", model, None) is expected
    monkeypatch.setattr(tiles, "linear_sizes", lambda *key: Sizes([16, 32]))
    model = make_model("llama", dtype=torch.bfloat16)
    assert batch_invariance.apply("m", model, None) is False
    assert not any(
        isinstance(module.forward, TiledLinear | AlignedActivation) for module in model.modules()
    )


def test_only_on_cpus():
    with pytest.raises(ConfigError, match="only on CPUs"):
        batch_invariance.apply("m", make_model("llama").to("meta"), True)

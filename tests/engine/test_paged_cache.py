"""Blocks pass the tests of slots, with every attention over them, and say the same as slots."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from flyspec.config import VerifySettings
from flyspec.engine.captured.graphs import eagerly
from flyspec.engine.kv_memory import KVLayer
from flyspec.engine.model import Step
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.errors import ResourceExhaustedError
from tests.engine.random_models import loaded_model, make_model
from tests.engine.test_captured import text
from tests.engine.test_slot_cache import KINDS, MAX_LENGTH, Session, Slots, drive, models
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("one_thread", "uncompiled")


class Blocks(Slots):
    """The machine of slots, with blocks: what a slot held is not its own once it is released."""

    @initialize(
        variant=st.integers(0, 3),
        num_slots=st.sampled_from([3, 4, 5, 2, 1]),
        padded=st.sampled_from(["auto", "sdpa", "flex"]),
        size=st.sampled_from([16, 32]),
        fixed=st.booleans(),
    )
    def begin(self, variant: int, num_slots: int, padded: Any, size: int, fixed: bool) -> None:
        model, self.reference = models(self.kind, variant)
        paging = Paging(size, attention=padded)
        self.runner = ModelRunner(loaded_model(model, MAX_LENGTH), num_slots, paging=paging)
        if fixed:
            self.runner.accelerate(eagerly, compiled=False)
            self.runner.cache.forget()
        self.cache, self.model, self.size = self.runner.cache, model, size
        self.cache.queries = self.cache.hits = 0
        self.open: list[Session] = []
        self.free = list(range(num_slots))
        self.held: list[list[int]] = [[] for _ in range(num_slots)]
        self.hits = self.queries = 0
        self.fresh = 100
        self.refused = False

    def acquire(self, tokens: list[int]) -> None:
        if not self.free:
            with pytest.raises(ResourceExhaustedError, match="--max-sessions"):
                self.cache.acquire(tokens)
            self.refused = True
            return
        slot, length = self.cache.acquire(tokens)
        assert slot in self.free
        assert length % self.size == 0
        assert length <= len(tokens)
        self.free.remove(slot)
        self.held[slot] = tokens[:length]
        self.queries += len(tokens)
        self.hits += length
        self.open.append(Session(slot, tokens, length))

    def end(self, session: Session) -> None:
        super().end(session)
        self.held[session.slot] = []


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_any_history_gives_the_logits_of_recomputing(kind: str) -> None:
    drive(kind, examples(15), 25, Blocks)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_any_long_history_gives_the_logits_of_recomputing(kind: str) -> None:
    drive(kind, 300, 50, Blocks)


def test_a_batch_invariant_model_has_the_same_bits_in_blocks() -> None:
    """The attention of the mode reads blocks as it reads slots, so its shapes hold there too."""
    found = []
    for paging in (None, Paging(16)):
        model = make_model("llama", dtype=torch.bfloat16, hidden_size=32)
        runner = ModelRunner(loaded_model(model), 3, batch_invariant=True, paging=paging)
        runner.warm_up()
        rng = random.Random(0)
        prompts = [text(rng, length) for length in (40, 75, 9)]
        slots = [runner.cache.acquire(prompt).slot for prompt in prompts]
        whole = [Step(slot, 0, ids) for slot, ids in zip(slots, prompts, strict=True)]
        alone = [runner.forward([step])[0].logits for step in whole]
        steps = [Step(slot, 5, ids[5:]) for slot, _, ids, *_ in whole]
        together = [rows.logits for rows in runner.forward(steps)]
        assert all(map(torch.equal, alone, together))
        found.append(torch.cat(alone))
    assert torch.equal(*found)


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["auto", "sdpa", "flex"])
def test_numbers_that_are_none_end_with_their_session(attention: Any) -> None:
    """A step that failed leaves NaN in its blocks; the next sequence in them must not see it."""
    model = make_model("llama")
    runner = ModelRunner(loaded_model(model), 2, paging=Paging(16, attention=attention))
    rng = random.Random(0)
    ids = text(rng, 40)
    slot = runner.cache.acquire(ids).slot
    (before,) = runner.forward([Step(slot, 0, ids, 40)])
    expected = before.logits.clone()
    for layer in runner.cache.kv_layers:
        for states in (layer.keys, layer.values):
            states[torch.from_numpy(runner.cache.blocks[slot, :3]).long()] = torch.nan
    (rows,) = runner.forward([Step(slot, 39, ids[39:])])
    assert rows.logits.isnan().any()
    runner.cache.forget(slot)
    runner.cache.release(slot)
    for _ in range(2):
        slot = runner.cache.acquire(ids).slot
        (rows,) = runner.forward([Step(slot, 0, ids, 40)])
        torch.testing.assert_close(rows.logits, expected)


def test_moves_that_fail_are_made_at_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(loaded_model(make_model("llama")), 3, paging=Paging(16, attention="sdpa"))
    rng = random.Random(0)
    ids = text(rng, 32)
    slots = [runner.cache.acquire(ids).slot]
    runner.forward([Step(slots[0], 0, ids, 0)])
    expected = runner.forward([Step(slots[0], 31, ids[31:])])[0].logits.clone()
    slots.append(runner.cache.acquire(ids).slot)  # shares its blocks, and must copy the last one
    copy, calls = KVLayer.copy, iter([True])

    def fails_once(self: KVLayer, move: Any) -> None:
        if next(calls, False):
            raise RuntimeError("no memory")
        copy(self, move)

    monkeypatch.setattr(KVLayer, "copy", fails_once)
    with pytest.raises(RuntimeError, match="no memory"):
        runner.forward([Step(slots[1], 31, ids[31:])])
    for slot in slots[::-1]:
        torch.testing.assert_close(runner.forward([Step(slot, 31, ids[31:])])[0].logits, expected)


@pytest.mark.parametrize("sessions", [1, 2, 40])
def test_a_service_has_blocks_for_a_whole_context_at_least(sessions: int) -> None:
    settings = VerifySettings(model="x", max_sessions=sessions, block_size=16)
    loaded = loaded_model(make_model("llama", max_position_embeddings=2048), 2048)
    cache = ModelRunner.planned(loaded, settings).cache
    assert cache.num_slots == sessions
    assert 128 <= cache.num_blocks <= sessions * 128
    assert cache.num_blocks > 0.96 * sessions * 128

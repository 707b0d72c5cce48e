"""The cache, in slots and in blocks: whatever the history, logits are those of recomputing."""

import copy
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flyspec.engine.attention.base import MAX_FOLDED_ROWS
from flyspec.engine.cache_table import Copy
from flyspec.engine.kv_memory import KVLayer
from flyspec.engine.model import Step
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.engine.slots import MIN_REUSE, SlotTable
from flyspec.errors import ResourceExhaustedError
from tests.engine.random_models import (
    VOCABULARY,
    eagerly,
    float64_throughout,
    loaded_model,
    make_model,
    make_runner,
    reference_logits,
)
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("one_thread", "uncompiled")

TOLERANCE = 1e-11
MAX_LENGTH = 160
KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"]


@lru_cache(maxsize=16)
def models(kind, variant):
    """A random model and its copy with transformers' own attention."""
    changes = {
        "num_attention_heads": (4, 6, 4, 3)[variant],
        "num_key_value_heads": (2, 2, 4, 1)[variant],
        "num_hidden_layers": (2, 3, 2, 2)[variant],
        "hidden_size": 24,
        "head_dim": (6, 8, 4, 10)[variant],
    }
    window = (8, 5, 21, 1)[variant]
    if kind == "qwen2":
        del changes["head_dim"]  # it has none of its own
    if kind in ("mistral", "gemma2", "gemma3_text"):
        changes["sliding_window"] = window
    if kind in ("gemma2", "gemma3_text"):
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        changes["layer_types"] = layers[: changes["num_hidden_layers"]]
        changes["query_pre_attn_scalar"] = 7
    if kind == "gemma2":
        changes["attn_logit_softcapping"] = 3.0
    model = make_model(kind, seed=variant, **changes)
    reference = copy.deepcopy(model)
    # Of transformers' own, only "eager" caps logits.
    reference.set_attn_implementation("eager" if kind == "gemma2" else "sdpa")
    return model, reference


def text(seed):
    """Return a sequence of maximum length, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (MAX_LENGTH,), generator=generator).tolist()


def common_length(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class Broken(Exception):
    """Raised inside a model's forward."""


class Session:
    """A client's knowledge: its slot, the slot's contents, and what is still to run."""

    def __init__(self, slot, tokens, cached):
        self.slot, self.tokens, self.cached = slot, tokens, cached


class Slots(RuleBasedStateMachine):
    """Sessions come, run, roll back and go; every logit is compared with the reference."""

    kind = "llama"

    @initialize(variant=st.integers(0, 3), num_slots=st.sampled_from([3, 4, 5, 2, 1]))
    def begin(self, variant, num_slots):
        self.model, self.reference = models(self.kind, variant)
        self.start(make_runner(self.model, num_slots, MAX_LENGTH))

    def start(self, runner):
        self.runner, self.cache, num_slots = runner, runner.cache, runner.cache.num_slots
        self.open = []
        self.free = list(range(num_slots))
        # What each slot is known to hold, as far as it may be reused.
        self.held = [[] for _ in range(num_slots)]
        self.hits = self.queries = 0
        self.fresh = 100
        self.refused = False

    def new_tokens(self, count):
        self.fresh += 1
        return text(self.fresh)[:count]

    @precondition(lambda self: self.free or not self.refused)
    @rule(
        family=st.sampled_from([0, 0, 0, 1]),
        shared=st.sampled_from([40, 90, MIN_REUSE, MIN_REUSE - 1, 25, 0, MAX_LENGTH]),
        own=st.sampled_from([1, 0, 7, 30, 100]),
    )
    def open_session(self, family, shared, own):
        """A prompt that begins like others do."""
        tokens = [*text(family)[:shared], *self.new_tokens(own)][:MAX_LENGTH]
        self.acquire(tokens or [1])

    @precondition(lambda self: any(len(held) > MIN_REUSE for held in self.held))
    @rule(
        moves=st.lists(
            st.tuples(
                st.integers(0, 4), st.sampled_from([1.0, 0.8, 0.5]), st.sampled_from([1, 20])
            ),
            min_size=2,
            max_size=6,
        )
    )
    def reopen(self, moves):
        """Prompts that begin like what slots hold, busy or free; no forward runs between them.

        Where no slot is free, a session ends: with copies to or from its slot still to be made.
        """
        for number, share, own in moves:
            known = [held for held in self.held if len(held) > MIN_REUSE]
            if not known:
                return
            if not self.free:
                self.end(self.open[number % len(self.open)])
            held = known[number % len(known)]
            tokens = [*held[: int(len(held) * share)], *self.new_tokens(own)]
            self.acquire(tokens[:MAX_LENGTH])

    def acquire(self, tokens):
        if not self.free:
            with pytest.raises(ResourceExhaustedError, match="--max-sessions"):
                self.cache.acquire(tokens)
            self.refused = True
            return
        slot, length = self.cache.acquire(tokens)
        assert slot in self.free
        self.check_lease(slot, length, tokens)
        self.free.remove(slot)
        self.held[slot] = tokens[:length]
        self.queries += len(tokens)
        self.hits += length
        self.open.append(Session(slot, tokens, length))

    def check_lease(self, slot, length, tokens):
        common = [common_length(held, tokens) for held in self.held]
        assert length <= max(common)
        assert length > max(common) - MIN_REUSE
        if max(common[s] for s in self.free) < MIN_REUSE:
            assert slot == self.free[0], "the least recently used one"
        if length:
            event("its own prefix" if common[slot] >= length else "another's prefix")

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data):
        self.end(data.draw(st.sampled_from(self.open)))

    def end(self, session):
        self.open.remove(session)
        self.cache.release(session.slot)
        self.free.append(session.slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def roll_back(self, data):
        """Roll back to any earlier length; nothing runs yet, and the cache is not notified."""
        session = data.draw(st.sampled_from(self.open))
        kept = data.draw(st.integers(1, len(session.tokens)))
        session.tokens = session.tokens[:kept]
        session.cached = min(session.cached, kept)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def step(self, data):
        """Some sessions at once: prompts in chunks, drafts, single tokens."""
        self.forward(data, data.draw(st.lists(st.sampled_from(self.open), min_size=1, unique=True)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def step_all(self, data):
        """All sessions at once."""
        self.forward(data, self.open)

    def forward(self, data, chosen):
        steps = [self.draw_step(session, data) for session in chosen]
        with float64_throughout():
            logits = [rows.logits for rows in self.runner.forward(steps)]
        assert [len(rows) for rows in logits] == [step.num_logits for step in steps]
        for session, step, rows in zip(chosen, steps, logits, strict=True):
            session.cached = step.start + len(step.token_ids)
            self.held[session.slot] = session.tokens[: session.cached]
            self.compare(session, rows)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), layer=st.integers(0, 1))
    def fail(self, data, layer):
        """A forward fails halfway; its session ends, as in the engines."""
        session = data.draw(st.sampled_from(self.open))
        step = self.draw_step(session, data)

        def broken(*args):
            raise Broken

        hook = self.model.model.layers[layer].mlp.register_forward_pre_hook(broken)
        with pytest.raises(Broken):
            self.runner.forward([step])
        hook.remove()
        self.end(session)
        self.held[session.slot] = self.held[session.slot][: step.start]

    def draw_step(self, session, data):
        """Continue a session's sequence with what is not cached, or with new tokens."""
        size = data.draw(st.sampled_from([9, 1, 17, 2, MAX_FOLDED_ROWS, 70, MAX_LENGTH]))
        start = session.cached
        if start == len(session.tokens) and (size == 1 or start == MAX_LENGTH):
            start -= 1  # its last token again, for the logits
        if size > len(session.tokens) - start and size != 1:
            room = MAX_LENGTH - len(session.tokens)
            extra = self.new_tokens(min(room, size - (len(session.tokens) - start)))
            session.tokens = [*session.tokens, *extra]
        token_ids = session.tokens[start : start + size]
        count = len(token_ids)
        num_logits = data.draw(st.sampled_from([count, min(1, count), 0, (count + 1) // 2]))
        event(f"step of {'<=' if count <= MAX_FOLDED_ROWS else '>'} {MAX_FOLDED_ROWS} rows")
        return Step(session.slot, start, token_ids, num_logits)

    def compare(self, session, rows):
        if not len(rows):
            return
        with float64_throughout():
            expected = reference_logits(self.reference, session.tokens[: session.cached])
        assert (expected[-len(rows) :] - rows).abs().max() < TOLERANCE

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        assert cache.num_free == len(self.free)
        assert cache.num_free + len(self.open) == cache.num_slots
        assert len({*self.free, *(s.slot for s in self.open)}) == cache.num_slots
        assert (cache.queries, cache.hits) == (self.queries, self.hits)
        assert [cache.held(slot) for slot in range(cache.num_slots)] == self.held

    def teardown(self):
        """Whatever a slot is said to hold, busy or free, continues like the reference."""
        if not hasattr(self, "cache"):
            return
        for slot, held in enumerate(self.held):
            if held:
                session = Session(slot, [*held, 5][:MAX_LENGTH], 0)
                start = len(session.tokens) - 1
                with float64_throughout():
                    (rows,) = self.runner.forward([Step(slot, start, session.tokens[start:], 1)])
                session.cached = len(session.tokens)
                self.compare(session, rows.logits)


def drive(kind, examples, steps, of):
    machine = type("Machine", (of,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )


def run(runner, *steps):
    with float64_throughout():
        return [rows.logits for rows in runner.forward(steps)]


def test_a_step_beyond_the_end_of_its_slot_writes_nothing():
    model, reference = models("llama", 0)
    runner = make_runner(model, 2, MAX_LENGTH)
    run(runner, Step(0, 0, text(0)[:20], 0), Step(1, 0, text(1)[:20], 0))
    with pytest.raises(ValueError, match="exceed a slot of 160"):
        run(runner, Step(0, MAX_LENGTH - 5, text(2)[:6], 1))
    with float64_throughout():
        expected = reference_logits(reference, [*text(1)[:20], 3])[-1:]
    assert (run(runner, Step(1, 20, [3]))[0] - expected).abs().max() < TOLERANCE


def test_without_reuse_every_prompt_is_computed():
    runner = make_runner(models("llama", 0)[0], 2, MAX_LENGTH)
    cache, tokens = runner.cache, text(1)[:50]
    slot, _ = cache.acquire(tokens)
    run(runner, Step(slot, 0, tokens, 0))
    cache.reuse = False
    assert cache.acquire(tokens).length == 0
    cache.release(slot)
    cache.reuse = True
    cache.forget()
    assert cache.acquire(tokens).length == 0


PROMPT = [*range(40)]
ANSWER = [*range(100, 200)]


@pytest.fixture
def slots():
    """Three free slots; the first holds a prompt and its answer."""
    table = SlotTable(3, 256)
    slot = table.acquire(PROMPT).slot
    table.record(slot, 0, [*PROMPT, *ANSWER])
    table.release(slot)
    return table


@pytest.mark.parametrize(
    ("tokens", "slot", "length", "copied"),
    [
        ([*PROMPT, *ANSWER, 7], 0, 140, 0),  # the next turn
        (PROMPT, 0, 40, 0),  # again, for another answer
        ([*PROMPT[:30], *range(300, 330)], 1, 30, 30),  # the same beginning: both are kept
        (PROMPT[: MIN_REUSE - 1], 1, 0, 0),
        ([9] * 50, 1, 0, 0),
    ],
)
def test_a_sequence_keeps_what_may_be_asked_for_again(slots, tokens, slot, length, copied):
    assert slots.acquire(tokens) == (slot, length)
    assert slots.take_moves().copies == ([Copy(0, slot, copied)] if copied else [])


def test_a_busy_slot_is_copied(slots):
    slots.acquire(PROMPT)
    slots.record(0, 0, PROMPT)
    assert slots.acquire([*PROMPT, 5]) == (1, 40)
    assert slots.take_moves().copies == [Copy(0, 1, 40)]
    slots.acquire()
    with pytest.raises(ResourceExhaustedError, match="all 3 sessions are in use"):
        slots.acquire()


class Blocks(Slots):
    """The machine of slots, with blocks: what a slot held is not its own once it is released."""

    @initialize(
        variant=st.integers(0, 3),
        num_slots=st.sampled_from([3, 4, 5, 2, 1]),
        attention=st.sampled_from(["auto", "sdpa", "flex"]),
        size=st.sampled_from([16, 32]),
        fixed=st.booleans(),
    )
    def begin(self, variant, num_slots, attention, size, fixed):
        self.model, self.reference = models(self.kind, variant)
        paging = Paging(size, attention=attention)
        runner = ModelRunner(loaded_model(self.model, MAX_LENGTH), num_slots, paging=paging)
        if fixed:
            runner.accelerate(eagerly, compiled=False)
            runner.cache.forget()
        runner.cache.queries = runner.cache.hits = 0
        self.size = size
        self.start(runner)

    def check_lease(self, slot, length, tokens):
        assert length % self.size == 0
        assert length <= len(tokens)

    def end(self, session):
        super().end(session)
        self.held[session.slot] = []


@pytest.mark.parametrize(
    ("machine", "kind"),
    [(Slots, "qwen3"), (Slots, "mistral"), (Blocks, "gemma2"), (Blocks, "gemma3_text")],
)
def test_any_history_gives_the_logits_of_recomputing(machine, kind):
    drive(kind, examples(6), 25, machine)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [Slots, Blocks])
@pytest.mark.parametrize("kind", KINDS)
def test_any_long_history_gives_the_logits_of_recomputing(machine, kind):
    drive(kind, 300, 50, machine)


def test_a_batch_invariant_model_has_the_same_bits_in_blocks():
    """The attention of the mode reads blocks as it reads slots, so its shapes hold there too."""
    found = []
    for paging in (None, Paging(16)):
        model = make_model("llama", dtype=torch.bfloat16, hidden_size=32)
        runner = ModelRunner(loaded_model(model), 3, batch_invariant=True, paging=paging)
        runner.warm_up()
        prompts = [text(length)[:length] for length in (40, 75, 9)]
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
def test_numbers_that_are_none_end_with_their_session(attention):
    """A step that failed leaves NaN in its blocks; the next sequence in them must not see it."""
    model = make_model("llama")
    runner = ModelRunner(loaded_model(model), 2, paging=Paging(16, attention=attention))
    ids = text(0)[:40]
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


def test_moves_that_fail_are_made_at_the_next_try(monkeypatch):
    runner = ModelRunner(loaded_model(make_model("llama")), 3, paging=Paging(16, attention="sdpa"))
    ids = text(0)[:32]
    slots = [runner.cache.acquire(ids).slot]
    runner.forward([Step(slots[0], 0, ids, 0)])
    expected = runner.forward([Step(slots[0], 31, ids[31:])])[0].logits.clone()
    slots.append(runner.cache.acquire(ids).slot)  # shares its blocks, and must copy the last one
    copy, calls = KVLayer.copy, iter([True])

    def fails_once(self, move):
        if next(calls, False):
            raise RuntimeError("no memory")
        copy(self, move)

    monkeypatch.setattr(KVLayer, "copy", fails_once)
    with pytest.raises(RuntimeError, match="no memory"):
        runner.forward([Step(slots[1], 31, ids[31:])])
    for slot in slots[::-1]:
        torch.testing.assert_close(runner.forward([Step(slot, 31, ids[31:])])[0].logits, expected)

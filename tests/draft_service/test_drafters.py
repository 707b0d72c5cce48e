"""Drafters' tokens and distributions, compared with transformers and with a fresh start."""

import copy
from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.multi_level import MultiLevelDrafter
from flyspec.engine.distributions import decode, encode
from flyspec.engine.logits import History, process_logits
from flyspec.engine.model import Draw
from flyspec.engine.sampling import DRAFT_STREAM, choose_processed, sample_among
from flyspec.values.rounds import DistributionSpec, DraftOpen
from flyspec.values.tokens import Drafted, Origin, SamplingParams, TokenDistribution
from tests.draft_service.draft_harness import (
    EOS,
    GREEDY,
    PENALTIES,
    SAMPLINGS,
    SPECS,
    CountingRunner,
    drive,
    drive_all,
    lookup_drafter,
)
from tests.examples import examples
from tests.tiny import CONTEXT_LENGTH, VOCAB_SIZE

ALL = [*SAMPLINGS, *PENALTIES]


def generate(loaded, tokens, max_tokens):
    """Transformers' own greedy continuation."""
    output = loaded.model.generate(
        torch.tensor([tokens]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=EOS
    )
    return output[0, len(tokens) :].tolist()


def test_model_equals_generate(loaded, runner, prompt):
    drafter = ModelDrafter(runner, [EOS])
    for length in (1, 2, 9, 23):
        session = drafter.open(DraftOpen(prompt[:length], GREEDY, 0))
        tokens, origins = drive(runner, session, 24)
        assert tokens == generate(loaded, prompt[:length], 24)
        assert set(origins) == {Origin.EXACT_MODEL}
        assert list(session.token_ids) == prompt[:length] + tokens
        session.close()


def test_model_with_penalties_equals_generate(loaded, runner, prompt):
    sampling = SamplingParams(
        repetition_penalty=1.4, min_tokens=10, logit_bias=((EOS, 6.0), (17, 3.0))
    )
    output = loaded.model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, pad_token_id=EOS,
        repetition_penalty=1.4, min_new_tokens=10, sequence_bias={(EOS,): 6.0, (17,): 3.0},
    )  # fmt: skip
    expected = output[0, len(prompt) :].tolist()
    assert 10 < len(expected) < 30
    for kind in (ModelDrafter, MultiLevelDrafter):
        session = kind(runner, [EOS]).open(DraftOpen(prompt, sampling, 0))
        assert drive(runner, session, 30)[0] == expected
        session.close()
        # Reopened in the midst of the output.
        begun = [*prompt, *expected[:6]]
        session = kind(runner, [EOS]).open(DraftOpen(begun, sampling, 0, "", len(prompt)))
        assert drive(runner, session, 30)[0] == expected[6:]
        session.close()


@pytest.mark.parametrize("sampling", ALL)
def test_multi_level_equals_model(runner, prompt, sampling):
    model, levels = ModelDrafter(runner, [EOS]), MultiLevelDrafter(runner, [EOS])
    for max_tokens in (1, 25):
        session = model.open(DraftOpen(prompt, sampling, 3))
        expected, _ = drive(runner, session, max_tokens)
        session.close()
        session2, before = levels.open(DraftOpen(prompt, sampling, 3)), runner.steps
        tokens, origins = drive(runner, session2, max_tokens)
        session2.close()
        assert tokens == expected
        assert len(origins) == len(tokens)
        assert runner.steps - before <= len(tokens)


def test_multi_level_takes_fewer_steps_on_repetitive_text(loaded):
    # Without attention a model's next token depends on the last alone: it ends in a cycle.
    model = copy.deepcopy(loaded.model)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    runner = CountingRunner(replace(loaded, model=model), num_slots=2)
    session = ModelDrafter(runner, []).open(DraftOpen([5], GREEDY, 0))
    text, _ = drive(runner, session, 100)
    tokens, before = text[:60], runner.steps
    session2 = MultiLevelDrafter(runner, []).open(DraftOpen(tokens, GREEDY, 0))
    proposed, origins = drive(runner, session2, 40)
    assert proposed == text[60:]
    assert runner.steps - before == 3
    assert origins.count(Origin.EXACT_MODEL) == 2


@pytest.mark.parametrize("kind", [ModelDrafter, MultiLevelDrafter])
def test_stops_behind_end_of_text(kind, runner, prompt):
    session = kind(runner, []).open(DraftOpen(prompt, GREEDY, 0))
    free, _ = drive(runner, session, 20)
    session.close()
    for eos in set(free):
        session = kind(runner, [eos]).open(DraftOpen(prompt, GREEDY, 0))
        tokens, _ = drive(runner, session, 20)
        assert tokens == free[: free.index(eos) + 1]
        # What is cached stays right.
        session.move(len(prompt) + len(tokens), [5])
        after, _ = drive(runner, session, 5)
        fresh = kind(runner, [eos]).open(DraftOpen([*prompt, *tokens, 5], GREEDY, 0))
        assert after == drive(runner, fresh, 5)[0]
        session.close()
        fresh.close()


@pytest.mark.parametrize("kind", [ModelDrafter, MultiLevelDrafter])
def test_context_limit_gives_fewer_tokens(kind, runner):
    tokens = [1 + i % 9 for i in range(CONTEXT_LENGTH)]
    for length, expected in [(CONTEXT_LENGTH - 3, 3), (CONTEXT_LENGTH, 0)]:
        session = kind(runner, []).open(DraftOpen(tokens[:length], GREEDY, 0))
        assert len(drive(runner, session, 8)[0]) == expected
        session.move(CONTEXT_LENGTH, [4, 4])
        assert drive(runner, session, 8)[0] == []
        session.move(CONTEXT_LENGTH - 5, [])
        assert len(drive(runner, session, 8)[0]) == 5
        session.close()


def test_prompt_lookup_drafts_up_to_its_limit():
    session = lookup_drafter(max_length=9).open(DraftOpen([1, 2, 3, 1, 2], GREEDY, 0))
    (drafted,) = session.propose(8)
    assert drafted == Drafted([3, 1, 2, 3], [Origin.EXACT_LOOKUP] * 4)
    assert list(session.propose(8)) == []


class Rounds(RuleBasedStateMachine):
    """Any sequence of rounds proposes what a fresh session with the whole sequence proposes."""

    @initialize(
        tokens=st.lists(st.integers(0, 9), min_size=1, max_size=40),
        sampling=st.sampled_from(ALL),
        seed=st.integers(0, 2**64 - 1),
        spec=st.sampled_from([None, *SPECS]),
        data=st.data(),
    )
    def open(self, tokens, sampling, seed, spec, data):
        self.prompt_length = data.draw(st.integers(1, len(tokens)))
        self.tokens, self.key = tokens, (sampling, seed, "", self.prompt_length, spec)
        self.session = self.drafter.open(DraftOpen(tokens, *self.key))

    @rule(
        drop=st.integers(0, 20),
        append=st.lists(st.integers(0, VOCAB_SIZE - 1) | st.integers(0, 9), max_size=12),
        max_tokens=st.integers(0, 10),
    )
    def advance(self, drop, append, max_tokens):
        keep = max(len(self.tokens) - drop, 0)
        append += [1] * (self.prompt_length - keep - len(append))
        self.session.move(keep, append)
        self.tokens = self.tokens[:keep] + append
        proposed = drive_all(self.runner, self.session, max_tokens)
        fresh = self.drafter.open(DraftOpen(self.tokens, *self.key))
        assert proposed[:2] == drive(self.runner, fresh, max_tokens)
        fresh.close()
        assert len(proposed[2]) == (0 if self.key[-1] is None else len(proposed[0]))
        self.tokens = self.tokens + proposed[0]
        assert list(self.session.token_ids) == self.tokens

    @precondition(lambda self: len(self.tokens) > 1)
    @rule(steps=st.integers(0, 5))
    def abandon(self, steps):
        """A proposal that is closed early: the tokens so far are part of the sequence."""
        work = self.session.propose(8)
        item = next(work, None)
        for _ in range(steps):
            if item is None:
                break
            try:
                if isinstance(item, Draw):
                    most = min(item.max_tokens, 1 + steps % 3)
                    item = work.send(self.runner.draw([item._replace(max_tokens=most)])[0])
                else:
                    item = next(work)
            except StopIteration:
                break
        work.close()
        self.tokens = list(self.session.token_ids)

    def teardown(self):
        if hasattr(self, "session"):
            self.session.close()


@pytest.mark.parametrize("kind", ["model", "multi_level", "prompt_lookup"])
def test_any_rounds_equal_recomputing(kind, loaded):
    runner = CountingRunner(replace(loaded, model=copy.deepcopy(loaded.model)), num_slots=2)
    drafters = {
        "model": ModelDrafter(runner, [EOS]),
        "multi_level": MultiLevelDrafter(runner, [EOS]),
        "prompt_lookup": lookup_drafter(CONTEXT_LENGTH),
    }

    class Machine(Rounds):
        pass

    Machine.runner, Machine.drafter = runner, drafters[kind]
    run_machine(Machine, settings=settings(max_examples=examples(7), stateful_step_count=12))
    assert runner.cache.num_free == 2


def logits_behind(loaded, tokens):
    with torch.inference_mode():
        return loaded.model(torch.tensor([tokens])).logits[0, -1:]


@pytest.mark.parametrize(
    ("sampling", "spec"), [*product(SAMPLINGS[1:2], SPECS), *zip(ALL, SPECS * 2, strict=False)]
)
@pytest.mark.parametrize("kind", [ModelDrafter, MultiLevelDrafter])
def test_each_token_was_drawn_from_the_distribution_sent_with_it(
    kind, loaded, runner, prompt, sampling, spec
):
    """From the sequence alone, one forward per token: the distribution, and the draw from it."""
    session = kind(runner, [EOS]).open(DraftOpen(prompt, sampling, 21, "", 3, spec))
    tokens, _, distributions = drive_all(runner, session, 12)
    assert tokens
    assert len(distributions) == len(tokens)
    sequence = list(prompt)
    for token, sent in zip(tokens, distributions, strict=True):
        history, at = History(sequence, 3, [EOS]), len(sequence)
        processed = process_logits(logits_behind(loaded, sequence), sampling, history)
        if not spec.draw_from_it:
            assert token == choose_processed(processed, sampling, [at], 21).item()
            assert closely(sent, encode(processed, spec)[0])
        elif sampling.greedy:
            assert sent == TokenDistribution()
            assert token == processed.argmax().item()
        else:
            q = decode([sent], [token], VOCAB_SIZE, renormalise=True)
            drawn = sample_among(q.log_probs, q.token_ids, [at], 21, DRAFT_STREAM)
            assert drawn.item() == token
            (expected,) = encode(processed, spec)
            assert closely(sent, expected) or not (sent.token_ids and expected.token_ids)
        sequence.append(token)


def closely(one, other):
    """Equal up to a unit in the last place: forwards of other shapes differ."""
    values, others = (np.frombuffer(q.log_probs, "<f2").astype(np.float32) for q in (one, other))
    return one.token_ids == other.token_ids and np.allclose(values, others, rtol=2e-3, atol=1e-6)


def test_prompt_lookup_sends_point_masses():
    open_ = DraftOpen([1, 2, 3, 1, 2], GREEDY, 0, distribution=DistributionSpec(4, True))
    (drafted,) = lookup_drafter().open(open_).propose(3)
    assert list(drafted.distributions) == [TokenDistribution()] * 3


async def test_chunks_of_distributions_are_bounded(service_with, prompt, monkeypatch):
    """800 bytes each: three fit into 2,600; one larger than the bound goes alone."""
    async with service_with(chunk_tokens=64) as service:
        whole = None
        for bound, most in [(1 << 20, 64), (2600, 3), (700, 1)]:
            monkeypatch.setattr("draft_service.proposal.MAX_CHUNK_BYTES", bound)
            client = await service.client().open(prompt, distribution=DistributionSpec())
            chunks = await client.advance(len(prompt), max_tokens=20)
            client.call.cancel()
            assert max(len(chunk.token_ids) for chunk in chunks) == min(most, 20)
            assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            position, flat = len(prompt), []
            for chunk in chunks:
                assert chunk.start_position == position
                assert len(chunk.distributions) == len(chunk.token_ids) == len(chunk.origins)
                position += len(chunk.token_ids)
                flat += zip(chunk.token_ids, chunk.origins, chunk.distributions, strict=True)
            assert whole in (None, flat)
            whole = flat

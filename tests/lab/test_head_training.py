"""Training a head: what it learns from, its unrolled steps, and what is written; measuring it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig

from flyspec.bundled import TARGET
from flyspec.config import VerifySettings
from flyspec.engine.draft_heads.eagle3 import Eagle3Head
from flyspec.engine.draft_heads.eagle3_network import Eagle3Shape
from flyspec.engine.draft_heads.loading import load_head
from flyspec.engine.draft_heads.stepping import Piece
from flyspec.errors import ConfigError
from flyspec_lab.heads.measure import by_head, by_model, measure, outputs, tokens_per_round
from flyspec_lab.heads.options import HeadMeasureOptions, HeadTrainOptions
from flyspec_lab.heads.texts import LearntText, beginnings, continued
from flyspec_lab.heads.train import default_layers, train
from flyspec_lab.heads.training import HeadTrainer, batches, frequent_tokens
from flyspec_lab.local_model import LocalModel

LAYERS = (1, 3, 5)


@pytest.fixture(scope="module")
def model():
    settings = VerifySettings(model=str(TARGET), dtype="float32", threads=1, max_sessions=8)
    return LocalModel(settings, for_heads=True)


def make_trainer(model, steps=3, **changes):
    config = LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    shape = Eagle3Shape(config, 384, LAYERS, 50, **changes)
    return HeadTrainer(
        shape, model.head_target, torch.arange(50) * 3, ttt_steps=steps, seed=1, muon_lr=0.02,
        adam_lr=0.01, length=4096,
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"norm_output": True, "norm_before_residual": True}])
def test_an_unrolled_step_sees_what_it_sees_when_it_drafts(model, changes):
    """Each step's logits are those of the head that has read the text so far and then its own rows,
    with the text's tokens."""
    trainer = make_trainer(model, **changes)
    texts = [
        LearntText([7 * i % 250 + 3 for i in range(12)], 6),
        LearntText([5 * i + 3 for i in range(15)], 9),
    ]
    (batch,) = batches(texts, model, LAYERS, 4096, torch.Generator().manual_seed(0))
    with torch.no_grad():
        unrolled = [(read.clone(), learnt) for read, learnt in trainer.unrolled(batch, 3)]
    network = trainer.network
    for index, tokens in enumerate(batch.token_ids.tolist()):
        text = next(t for t in texts if t.token_ids == tokens[: len(t.token_ids)])
        for column in batch.learnt[index].nonzero()[:, 0].tolist():
            t = int(batch.places[index, column])
            head = Eagle3Head(network, trainer.embedding, None, 1, 4096, 1, "")
            hidden = tuple(rows[index, : t + 1].float() for rows in batch.aux)
            (slot,) = head._slots
            piece = Piece(slot, 0, text.token_ids[1 : t + 2], hidden, False, True)
            for j, (read, learnt) in enumerate(unrolled):
                if not learnt[index, column]:
                    continue
                slot.held = t + 1
                with torch.inference_mode():
                    logits, rows = head._read([piece])
                expected = read[index, column] @ network.lm_head.weight.T
                torch.testing.assert_close(logits[0], expected, rtol=1e-3, atol=1e-3)
                if t + 2 + j < len(text.token_ids):
                    token = [text.token_ids[t + 2 + j]]
                    piece = Piece(slot, t + 1 + j, token, (rows,), True, True)


def test_the_rows_to_be_learnt_are_those_before_the_answer_and_on(model):
    text = LearntText([*range(10, 22)], 7)
    (batch,) = batches([text], model, LAYERS, 64, torch.Generator())
    # The row at index t predicts the token at t + 2: from 7 to the last, 11.
    assert (batch.places + 2).tolist() == [[7, 8, 9, 10, 11]]
    assert bool(batch.learnt.all())
    assert batch.size == 12


def test_batches_hold_every_text_once_and_no_more_tokens_than_asked(model):
    texts = [LearntText([i + 3] * (5 + i % 7), 2) for i in range(40)]
    found = [*batches(texts, model, LAYERS, 48, torch.Generator().manual_seed(1))]
    assert sum(batch.size for batch in found) == sum(len(t.token_ids) for t in texts)
    assert sorted(int(row[0]) for b in found for row in b.token_ids) == [i + 3 for i in range(40)]
    assert max(batch.token_ids.numel() for batch in found) <= 48


def test_frequent_tokens_are_those_to_be_predicted():
    texts = [LearntText([9, 9, 9, 4, 5, 5], 3), LearntText([9, 7, 7, 7], 1)]
    assert frequent_tokens(texts, 2, 100).tolist() == [5, 7]
    assert frequent_tokens(texts, 5, 6).tolist() == [0, 1, 4, 5, 7]


def test_every_other_text_is_sampled_and_repeats(model):
    starts = beginnings(model, (("word_problems", 4), ("python", 4)), [], 9, 1)
    assert [each.first == len(each.token_ids) for each in starts] == [True] * 4 + [False] * 4
    assert all(each.first == 1 for each in starts[4:])
    texts = continued(model, starts, 12, 1, lambda _: None)
    assert texts == continued(model, starts, 12, 1, lambda _: None)
    assert texts != continued(model, starts, 12, 2, lambda _: None)
    greedy = {tuple(each.token_ids): each.first for each in starts[::2]}
    for text in texts[:4]:
        start = next(s for s in greedy if tuple(text.token_ids[: len(s)]) == s)
        (own,) = model.continued([start], [12])
        assert text.token_ids == [*start, *own]


def test_nothing_to_learn_is_refused(model):
    with pytest.raises(ConfigError, match="--corpora and --data: give one of them"):
        beginnings(model, (), [], 9, 1)


def test_default_layers_are_low_middle_and_high():
    assert default_layers(32) == (2, 16, 29)
    assert default_layers(6) == (1, 3, 5)
    with pytest.raises(ConfigError, match="3 layers is too small"):
        default_layers(3)


def test_tokens_per_round_count_the_targets_own_token():
    # How many drafts are right after each token; 7 tokens are left of the text after the first.
    accepted = [2, 0, 1, 3, 2, 1, 0]
    # Rounds of K = 1 begin after tokens 0, 2, 4 and 6, those of K = 2 after 0, 3 and 6.
    assert tokens_per_round([accepted], (1, 2)) == (7 / 4, 7 / 3)
    assert tokens_per_round([[1], [1]], (4,)) == (1.0,)


def test_a_head_is_trained_written_measured_and_trained_further(tmp_path):
    small = {
        "prompts": 10, "max_tokens": 8, "corpora": (("word_problems", 12),), "threads": 1,
        "intermediate_size": 48, "draft_vocab_size": 300, "ttt_steps": 2, "batch_tokens": 512,
    }  # fmt: skip
    folder = tmp_path / "eagle3"
    found = train(HeadTrainOptions(head_directory=folder, epochs=2, **small))
    assert (found.texts, found.steps > 2, len(found.agreement)) == (12, True, 2)
    facts = json.loads((folder / "config.json").read_text())["flyspec_training"]
    assert (facts["target"], facts["corpora"]) == ("target", ["word_problems"])
    options = HeadMeasureOptions(
        head=str(folder), corpora=(("word_problems", 2),), max_tokens=12, threads=1, k=(1, 3)
    )
    measured = measure(options)
    assert [row.drafter for row in measured] == ["eagle3 eagle3", "draft"]
    for row in measured:
        assert 1.0 <= row.tokens_per_round[0] <= 2.0
        assert row.tokens_per_round[0] <= row.tokens_per_round[1] <= 4.0
    again = train(HeadTrainOptions(head_directory=tmp_path / "b", init_head=folder, **small))
    assert again.parameters == found.parameters
    with pytest.raises(ConfigError, match=r"--head-directory .*: no directory"):
        train(HeadTrainOptions(head_directory=tmp_path / "no" / "b", **small))


def test_both_ways_of_measuring_agree_with_decoding(model, tmp_path):
    """What counts as right is what the target's text goes on with."""
    (text,) = outputs(model, [model.encode("def add(a, b):")], 12)
    (accepted,) = by_model(model, [text], 3)  # the target guesses all of its own tokens
    left = len(text.token_ids) - text.first - 1
    assert accepted == [min(3, left - i) for i in range(left)]
    train(
        HeadTrainOptions(
            prompts=10, max_tokens=4, corpora=(("word_problems", 10),), threads=1, ttt_steps=1,
            head_directory=tmp_path / "eagle3",
        )
    )  # fmt: skip
    head = load_head(tmp_path / "eagle3", model.head_target, 1)
    (accepted,) = by_head(model, head, [text], 3)
    assert len(accepted) == left

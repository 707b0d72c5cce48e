"""Training a head: what it learns from, its unrolled steps, and what is written."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig

from flyspec.bundled import TARGET
from flyspec.config import VerifySettings
from flyspec.engine.draft_heads.base import HeadStep
from flyspec.engine.draft_heads.eagle3 import Eagle3Head
from flyspec.engine.draft_heads.eagle3_network import Eagle3Shape
from flyspec.engine.draft_heads.loading import load_head
from flyspec.engine.draft_heads.stepping import Piece
from flyspec.errors import ConfigError
from flyspec_lab.local_model import LocalModel
from flyspec_lab.training.head import default_layers, train, write_texts
from flyspec_lab.training.head_trainer import HeadTrainer, LearntText, batches, frequent_tokens
from flyspec_lab.training.options import HeadTrainOptions

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


def test_every_other_text_is_sampled_and_repeats(model, tmp_path):
    (data := tmp_path / "prompts.txt").write_text("def add(a, b):\nimport\n")

    def written(seed):
        options = HeadTrainOptions(
            task=(("word_problems", None), ("open_ended", str(data))),
            problems=6,
            max_tokens=6,
            seed=seed,
        )
        return write_texts(model, options)

    texts = written(1)
    assert len(texts) == 5
    assert texts == written(1)
    assert texts[:3] != written(2)[:3]
    for text in texts[:3]:
        (own,) = model.continued([text.token_ids[: text.first]], [6])
        assert text.token_ids[text.first :] == own


def test_default_layers_are_low_middle_and_high():
    assert default_layers(32) == (2, 16, 29)
    assert default_layers(6) == (1, 3, 5)
    with pytest.raises(ConfigError, match="3 layers is too small"):
        default_layers(3)


@pytest.mark.slow
def test_a_head_is_trained_written_drafts_and_is_trained_further(model, tmp_path):
    small = {
        "problems": 10, "max_tokens": 4, "threads": 1,
        "draft_vocab_size": 300, "ttt_steps": 2, "batch_tokens": 1024,
    }  # fmt: skip
    folder = tmp_path / "eagle3"
    report = train(HeadTrainOptions(head_directory=folder, epochs=2, **small))
    found = report.document
    assert (found["texts"], found["steps"], len(found["agreement"])) == (10, 2, 2)
    assert "Wrote" in report.parts[0]
    facts = json.loads((folder / "config.json").read_text())["flyspec_training"]
    assert (facts["target"], facts["learnt_from"]) == ("target", ["word_problems"])
    head = load_head(folder, model.head_target, 1)
    tokens = model.encode("def add(a, b):")
    (read,) = model.rows([tokens], [len(tokens)], head.hidden_layers)
    rows = tuple(each[:-1] for each in read.hidden)
    (drafted,) = head.draft([HeadStep(0, 0, rows, tokens[1:], 3)])
    assert len(drafted.token_ids) == 3
    again = train(HeadTrainOptions(head_directory=tmp_path / "b", init_head=folder, **small))
    assert again.document["parameters"] == found["parameters"]
    with pytest.raises(ConfigError, match=r"--head-directory .*: no such directory"):
        train(HeadTrainOptions(head_directory=tmp_path / "no" / "b", **small))

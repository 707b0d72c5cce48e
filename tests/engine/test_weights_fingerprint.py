"""Fingerprints of weights: what changes them, and what does not."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flyspec.engine.loading import load_model
from tests.tiny import make_model


@pytest.fixture
def checkpoint(tmp_path):
    return make_model(tmp_path / "model", seed=3)


def fingerprint(directory):
    return load_model(str(directory), "cpu", "float32").info.weights_fingerprint


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_it_is_that_of_the_contents_wherever_they_are(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(checkpoint)
    assert len(fingerprint(copy)) == 32


def test_one_number_that_differs_changes_it(checkpoint):
    before = fingerprint(checkpoint)
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    name = sorted(weights)[-1]
    weights[name].view(-1)[0] += 1
    save_file(weights, file, metadata={"format": "pt"})
    assert fingerprint(checkpoint) != before


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ({"rms_norm_eps": 1e-3}, True),
        ({"max_position_embeddings": 128}, True),
        ({"transformers_version": "9.9.9"}, False),
        ({"_name_or_path": "somewhere/else"}, False),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_the_configuration_counts_where_it_changes_the_text(checkpoint, values, changes):
    before = fingerprint(checkpoint)
    change(checkpoint / "config.json", **values)
    assert (fingerprint(checkpoint) != before) == changes


def test_it_covers_every_file_of_an_index(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    sharded = shutil.copytree(checkpoint, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    model.save_pretrained(sharded, max_shard_size="60KB")
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 1
    before = fingerprint(sharded)
    weights = load_file(files[-1])
    save_file({k: torch.zeros_like(v) for k, v in weights.items()}, files[-1], {"format": "pt"})
    assert fingerprint(sharded) != before


def test_a_digest_that_a_hub_recorded_is_taken(checkpoint, tmp_path):
    """Its cache names a blob by the SHA-256 of its contents; nothing is read for that again."""
    plain = fingerprint(checkpoint)
    file = checkpoint / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    file.rename(blobs / digest)
    file.symlink_to(blobs / digest)
    assert fingerprint(checkpoint) == plain
    (blobs / digest).rename(blobs / ("0" * 64))
    file.unlink()
    file.symlink_to(blobs / ("0" * 64))
    assert fingerprint(checkpoint) != plain

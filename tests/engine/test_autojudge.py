"""A judge's file: what is written is read, and what is no judge is refused with the reason."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save

from flyspec.engine.autojudge import Operating, read_judge, write_judge
from flyspec.errors import ConfigError
from flyspec.values.admin import ModelInfo
from tests.autojudges import facts_of, random_judge, tensors_of

SIZE = 5


def write(path, **changes):
    return write_judge(path, tensors_of(SIZE, np.random.default_rng(2)), facts_of(SIZE, **changes))


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "judge.safetensors"
    point = Operating(quantile=0.5, threshold=0.2, recall=0.9, precision=None, accepted=0.5)
    written = write(file, thresholds=(point,), threshold=0.25)
    read = read_judge(file)
    assert read.facts == written.facts == facts_of(SIZE, thresholds=(point,), threshold=0.25)
    assert read.fingerprint == written.fingerprint
    assert len(read.fingerprint) == 32
    assert read.info.threshold == 0.25
    rows = torch.randn(7, SIZE, generator=torch.Generator().manual_seed(1))
    assert torch.equal(read.on("cpu").importance(rows), written.on("cpu").importance(rows))
    assert [file.name] == [each.name for each in tmp_path.iterdir()]


def test_another_threshold_is_another_judge(tmp_path):
    first, second = (write(tmp_path / "j", threshold=t) for t in (0.25, 0.3))
    assert first.fingerprint != second.fingerprint
    assert read_judge(tmp_path / "j").fingerprint == second.fingerprint


def test_importance_is_the_formula():
    judge = random_judge(SIZE, 4)
    rows = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    for row, found in zip(rows.double().tolist(), judge.importance(rows).tolist(), strict=True):
        z = float(judge.bias)
        for x, w, mean, scale in zip(
            row, judge.weight.tolist(), judge.mean.tolist(), judge.scale.tolist(), strict=True
        ):
            z += w * (x - mean) / scale
        assert found == pytest.approx(1 / (1 + math.exp(-z)), rel=1e-12)


def test_a_judge_is_for_the_weights_it_was_trained_with():
    judge = random_judge(SIZE, weights_fingerprint="abc", model="small")
    target = ModelInfo("large", "", 10, 10, weights_fingerprint="abc")
    assert judge.misfit(target) == ""
    other = judge.misfit(ModelInfo("large", "", 10, 10, weights_fingerprint="abd"))
    assert other.startswith("it was trained for small with weights abc, but those of large are abd")
    assert "are unknown" in judge.misfit(ModelInfo("large", "", 10, 10))


def content(facts=None, **tensors):
    """A file with these facts and tensors instead of proper ones."""
    given = {**tensors_of(SIZE, np.random.default_rng(2)), **tensors}
    said = facts_of(SIZE).model_dump_json() if facts is None else json.dumps(facts)
    return save(given, {"flyspec_autojudge": said})


def facts(**changes):
    return {**json.loads(facts_of(SIZE).model_dump_json()), **changes}


ONE = torch.ones(1)
BAD = {
    "empty": (b"", "not a safetensors file: "),
    "a pickle": (pickle.dumps({"weight": [1.0]}), "not a safetensors file: "),
    "cut": (content()[:-4], "not a safetensors file: "),
    "another checkpoint": (save({"weight": ONE}), "Invalid JSON"),
    "a newer format": (content(facts(format_version=2)), "format_version: Input should be 1"),
    "another layer": (content(facts(hidden_layer=-2)), "hidden_layer: "),
    "no target": (content(facts(weights_fingerprint="")), "weights_fingerprint: "),
    "no number": (content(facts(threshold=2)), "threshold: Input should be less than or equal to"),
    "unknown facts": (content(facts(colour=1)), "colour: Extra inputs are not permitted"),
    "a tensor more": (content(other=ONE), "has the tensors "),
    "a shape": (content(weight=torch.ones(4)), r"weight must be float32 \[5\], got torch.float32"),
    "a type": (content(bias=ONE.half()), r"bias must be float32 \[1\], got torch.float16 \[1\]"),
    "not finite": (content(mean=torch.full((SIZE,), math.nan)), "mean is not finite"),
    "no scale": (content(scale=torch.zeros(SIZE)), "scale must be positive"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_judge_is_refused(name, tmp_path):
    file = tmp_path / "judge.safetensors"
    data, message = BAD[name]
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        read_judge(file)
    assert str(caught.value).startswith(f"--autojudge-file {file}: ")
    assert "make one with `flyspec autojudge train`" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="none: cannot be read: No such file or directory"):
        read_judge(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_judge(tmp_path)


def test_facts_are_checked_when_made():
    with pytest.raises(ValidationError, match="auc"):
        facts_of(SIZE, auc=math.nan)

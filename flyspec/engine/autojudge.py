"""The judge of the rule `autojudge`: a logistic regression on hidden rows, and its file.

A file is safetensors: four float32 tensors, and `JudgeFacts` as JSON in its metadata. `flyspec
autojudge train` writes it, the verify service reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flyspec.errors import ConfigError
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.admin import JudgeInfo, ModelInfo

TENSORS = ("weight", "bias", "mean", "scale")
(HIDDEN_LAYER,) = RULE_PRESETS["autojudge"].hidden_layers
_KEY = "flyspec_autojudge"
_MOST_BYTES = 1 << 24
_Share = Annotated[float, Field(ge=0, le=1)]


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Operating(_Facts):
    """Effect of a threshold on the held-out tokens: it is a `quantile` of their probabilities.

    `recall`: the share of important tokens above it. `precision`: the share of those above it that
    are important; None if there are none. `accepted`: the share of all tokens that it accepts.
    """

    quantile: _Share
    threshold: _Share
    recall: _Share
    precision: _Share | None
    accepted: _Share


class JudgeFacts(_Facts):
    """Training data and quality of a judge.

    `threshold` is the one that requests get which name none: the largest of `thresholds` with a
    recall of at least `target_recall`. `auc` is on the held-out tokens, those of `held_out_prompts`
    of the `prompts`, `train_auc` on the others. `important` of the `labels` changed the answer.
    `regularization` is scikit-learn's C.
    """

    format_version: Literal[1] = 1
    model: str
    weights_fingerprint: Annotated[str, Field(min_length=1)]
    draft_model: str
    draft_weights_fingerprint: str
    hidden_size: Annotated[int, Field(ge=1)]
    hidden_layer: Annotated[int, Field(ge=HIDDEN_LAYER, le=HIDDEN_LAYER)] = HIDDEN_LAYER
    dtype: str
    task: str
    seed: Annotated[int, Field(ge=0)]
    max_tokens: Annotated[int, Field(ge=1)]
    prompts: Annotated[int, Field(ge=1)]
    held_out_prompts: Annotated[int, Field(ge=1)]
    labels: Annotated[int, Field(ge=1)]
    held_out_labels: Annotated[int, Field(ge=1)]
    important: Annotated[int, Field(ge=0)]
    auc: _Share
    train_auc: _Share
    regularization: Annotated[float, Field(gt=0)]
    target_recall: _Share
    threshold: _Share
    thresholds: tuple[Operating, ...]
    flyspec_version: str


@dataclass(frozen=True, eq=False)
class AutoJudge:
    """P(important) = sigmoid(w · (x - mean) / scale + b) of a hidden row x (arXiv 2504.20039).

    A mismatch is important if putting the draft's token in changes the final answer; x is the
    target's last hidden state, after the final norm, once it has read that token. `weight`, `mean`
    and `scale` are [hidden size], `bias` [1].
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    scale: Tensor
    facts: JudgeFacts
    fingerprint: str

    @property
    def info(self) -> JudgeInfo:
        return JudgeInfo(self.fingerprint, self.facts.threshold)

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[0]

    def importance(self, rows: Tensor) -> Tensor:
        """Return P(important) of hidden rows [n, hidden size] on the judge's device: float64 [n].

        After `on`, which converts the tensors.
        """
        standard = (rows.to(torch.float64) - self.mean) / self.scale
        return torch.sigmoid(standard @ self.weight + self.bias)

    def on(self, device: str) -> AutoJudge:
        """Return a copy for a device, that computes in float64."""
        tensors = {name: getattr(self, name).to(device, torch.float64) for name in TENSORS}
        return replace(self, **tensors)

    def misfit(self, target: ModelInfo) -> str:
        """Return why the judge cannot judge for a target; empty if it can."""
        if self.facts.weights_fingerprint == target.weights_fingerprint:
            return ""
        return (
            f"it was trained for {self.facts.model} with weights "
            f"{self.facts.weights_fingerprint:.120}, but those of {target.name} are "
            f"{target.weights_fingerprint or 'unknown'}; train one with `flyspec autojudge train "
            "--model` and the target's files"
        )


def write_judge(path: Path, tensors: Mapping[str, Tensor], facts: JudgeFacts) -> AutoJudge:
    """Write a judge's file and return the judge; an older file is replaced by a whole one only."""
    stored = {name: tensors[name].to(torch.float32).contiguous() for name in TENSORS}
    content = save(stored, {_KEY: facts.model_dump_json()})
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)
    return _judge_of(content)


def read_judge(path: Path) -> AutoJudge:
    """Read and check a judge's file. Raises `ConfigError` with what is wrong with it."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes are too many for a judge")
        return _judge_of(path.read_bytes())
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except SafetensorError as error:
        problem = f"not a safetensors file: {error}"
    except ValidationError as error:
        problem = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
    except ValueError as error:
        problem = str(error)
    raise ConfigError(
        f"--autojudge-file {path}: {problem:.400}; make one with `flyspec autojudge train`"
    )


def _judge_of(content: bytes) -> AutoJudge:
    """Raises `SafetensorError` or `ValueError` (`ValidationError` is one)."""
    tensors = load(content)  # checks the header and every offset
    facts = JudgeFacts.model_validate_json(_metadata(content).get(_KEY, ""))
    if set(tensors) != set(TENSORS):
        raise ValueError(f"has the tensors {', '.join(tensors)}, not {', '.join(TENSORS)}")
    for name, tensor in tensors.items():
        expected = [1 if name == "bias" else facts.hidden_size]
        if list(tensor.shape) != expected or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} must be float32 {expected}, got {tensor.dtype} {list(tensor.shape)}"
            )
        if not tensor.isfinite().all():
            raise ValueError(f"{name} is not finite")
    if not (tensors["scale"] > 0).all():
        raise ValueError("scale must be positive")
    digest = hashlib.sha256(content).hexdigest()[:32]
    return AutoJudge(**tensors, facts=facts, fingerprint=digest)


def _metadata(content: bytes) -> dict[str, str]:
    """The metadata in a header that `load` has accepted: 8 bytes of length, then JSON."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    found: dict[str, str] = header.get("__metadata__", {})
    return found

"""A judge of mined mismatches: a standardised logistic regression, chosen on held-out prompts.

As AutoJudge's released code does it (garipovroma/autojudge, src/train_head_gsm8k.py): its grid of
C, the best one by AUC, thresholds at 26 quantiles of the held-out probabilities. The split there is
by problem, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupShuffleSplit
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from flyspec.engine.autojudge import Operating
from flyspec.errors import ConfigError
from flyspec_lab.autojudge.mining import Mismatch

REGULARIZATION = (*((10**0.5) ** -n for n in range(14, 0, -1)), 1.0, 3.0, 10.0, 50.0, 100.0)
"""Values of scikit-learn's C, as in the released code."""
NUM_QUANTILES = 26
HELD_OUT = 0.2
"""Share of the prompts on which C and thresholds are chosen; the released code's is 0.1."""
_MOST_ITERATIONS = 2000
Numbers = np.ndarray[Any, np.dtype[np.float64]]


class FittedJudge(NamedTuple):
    """A regression as its file holds it, and what is known of it (see `JudgeFacts`)."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def fit(mismatches: Sequence[Mismatch], seed: int, recall: float) -> FittedJudge:
    """Train a judge whose own threshold rejects at least a share `recall` of important tokens.

    Raises `ConfigError` if there are too few mismatches of either kind to train or to measure.
    """
    rows = np.stack([each.hidden.numpy() for each in mismatches]).astype(np.float64)
    important = np.array([each.important for each in mismatches])
    groups = np.array([each.problem for each in mismatches])
    train, held_out = _split(important, groups, seed)
    scaler = StandardScaler().fit(rows[train])
    standard = scaler.transform(rows)
    best: tuple[float, float, LogisticRegression] | None = None
    for c in REGULARIZATION:
        model = LogisticRegression(C=c, max_iter=_MOST_ITERATIONS)
        model.fit(standard[train], important[train])
        auc = float(roc_auc_score(important[held_out], _probabilities(model, standard[held_out])))
        if best is None or auc > best[0]:
            best = auc, c, model
    assert best is not None
    auc, c, model = best
    tensors = {
        "weight": _stored(model.coef_[0]),
        "bias": _stored(model.intercept_),
        "mean": _stored(scaler.mean_),
        "scale": _stored(scaler.scale_),
    }
    # As the stored numbers have it, which are rounded: thresholds may be near each other.
    w, b, mean, scale = (tensor.double().numpy() for tensor in tensors.values())
    seen = expit((rows[held_out] - mean) / scale @ w + b)
    facts = {
        "prompts": len(np.unique(groups)),
        "held_out_prompts": len(np.unique(groups[held_out])),
        "labels": len(important),
        "held_out_labels": len(held_out),
        "important": int(important.sum()),
        "auc": auc,
        "train_auc": float(roc_auc_score(important[train], _probabilities(model, standard[train]))),
        "regularization": c,
        "target_recall": recall,
        "threshold": threshold_for(recall, seen, important[held_out]),
        "thresholds": operating_points(seen, important[held_out]),
    }
    return FittedJudge(tensors, facts)


def threshold_for(recall: float, probabilities: Numbers, important: Numbers) -> float:
    """Return the largest threshold that at least a share `recall` of important tokens exceed.

    It is one of the probabilities, or 0, at which nothing is accepted.
    """
    own = np.sort(probabilities[important.astype(bool)])
    needed = int(np.ceil(recall * len(own) - 1e-9))
    highest = own[len(own) - needed] if needed else np.inf
    below = probabilities[probabilities < highest]
    return float(below.max()) if len(below) else 0.0


def operating_points(probabilities: Numbers, important: Numbers) -> list[Operating]:
    """Return what thresholds at evenly spaced quantiles of the probabilities do."""
    found = []
    important = important.astype(bool)
    for quantile in np.linspace(0.0, 1.0, NUM_QUANTILES):
        threshold = float(np.quantile(probabilities, quantile))
        above = probabilities > threshold
        found.append(
            Operating(
                quantile=float(quantile),
                threshold=threshold,
                recall=float(above[important].mean()),
                precision=float(important[above].mean()) if above.any() else None,
                accepted=float(1.0 - above.mean()),
            )
        )
    return found


def _split(important: Numbers, groups: Numbers, seed: int) -> tuple[Numbers, Numbers]:
    """Return the indices of mismatches to train on, and of those of held-out prompts."""
    if len(np.unique(groups)) < 2:
        raise _too_few(important)
    split = GroupShuffleSplit(1, test_size=HELD_OUT, random_state=seed % (1 << 32))
    ((train, held_out),) = split.split(important, groups=groups)
    for part in (train, held_out):
        if len(np.unique(important[part])) < 2:
            raise _too_few(important)
    return train, held_out


def _too_few(important: Numbers) -> ConfigError:
    return ConfigError(
        f"{len(important)} mismatches, {int(important.sum())} of them important, are too few to "
        "train a judge and to measure it on other prompts; raise --problems, or use another task"
    )


def _stored(numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers).to(torch.float32)


def _probabilities(model: LogisticRegression, rows: Numbers) -> Numbers:
    found: Numbers = model.predict_proba(rows)[:, 1]
    return found

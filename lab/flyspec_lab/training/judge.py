"""From two models and a task to a judge's file: mines mismatches, trains on them, writes.

The judge is a standardised logistic regression, as AutoJudge's released code has it
(garipovroma/autojudge, src/train_head_gsm8k.py): its grid of C, the best one by AUC on held-out
prompts, thresholds at 26 quantiles of the held-out probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupShuffleSplit
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from flyspec.bundled import DRAFT, TARGET
from flyspec.cli.program import check_file
from flyspec.config import DraftSettings, VerifySettings
from flyspec.engine.autojudge import JudgeFacts, Operating, write_judge
from flyspec.errors import ConfigError
from flyspec.progress import progress, working
from flyspec.tables import Column, record_table
from flyspec.version import __version__
from flyspec_lab.interrupting import whatever_reached
from flyspec_lab.local_model import LocalModel
from flyspec_lab.report import Report
from flyspec_lab.training.mining import Mined, Miner, Mismatch
from flyspec_lab.training.options import JudgeTrainOptions

REGULARIZATION = (*((10**0.5) ** -n for n in range(14, 0, -1)), 1.0, 3.0, 10.0, 50.0, 100.0)
"""Values of scikit-learn's C, as in the released code."""
NUM_QUANTILES = 26
HELD_OUT = 0.2
"""Share of the prompts on which C and thresholds are chosen; the released code's is 0.1."""
_MOST_ITERATIONS = 2000
_COLUMNS: tuple[Column, ...] = (
    ("threshold", "{.threshold:.4f}"),
    ("important rejected", "{.recall:.1%}"),
    ("accepted", "{.accepted:.1%}"),
    ("rejected are important", lambda p: "–" if p.precision is None else f"{p.precision:.1%}"),
)
_OF_MISMATCH = "problem", "output_token_index", "target_token_id", "draft_token_id", "important"
Numbers = np.ndarray[Any, np.dtype[np.float64]]


def train(o: JudgeTrainOptions) -> Report:
    """Mine, train and write a judge, and report on it. Raises `ConfigError`.

    Raises `StoppedEarly` with the report on the judge of what was mined until then if Ctrl-C was
    pressed.
    """
    if not 0.0 < o.recall <= 1.0:  # NaN too
        raise ConfigError(f"--recall must be above 0 and at most 1, got {o.recall:g}")
    file = o.autojudge_file.expanduser()
    check_file("--autojudge-file", file)
    if o.model and not o.draft_model:
        raise ConfigError("--draft-model: give one; the bundled draft model fits no other target")
    problems = o.read()
    for task, problem in {task.name: (task, problem) for task, problem in problems}.values():
        if task.score(problem, "") is None:
            raise ConfigError(
                f"--task {task.name}: its texts have no answers, so nothing says what is "
                "important; use a task with answers"
            )
    same: dict[str, Any] = {
        "device": o.device, "threads": o.threads, "max_sessions": o.concurrency
    }  # fmt: skip
    with working("loading the models"):
        target = LocalModel(VerifySettings(model=o.model or str(TARGET), dtype=o.dtype, **same))
        draft = LocalModel(
            DraftSettings(model=o.draft_model or str(DRAFT), dtype=o.draft_dtype, **same)
        )
    if draft.info.tokenizer_fingerprint != target.info.tokenizer_fingerprint:
        raise ConfigError(
            f"--draft-model {draft.info.name}: its tokenizer differs from that of "
            f"{target.info.name}; a judge is trained on token ids that both models share"
        )
    most = o.max_tokens or max(task.max_tokens for task, _ in problems)
    began = time.perf_counter()

    def mined() -> Mined:
        with progress("mining", len(problems)) as advance:
            return Miner(target, draft, most, o.concurrency).run(problems, advance)

    def trained(found: Mined) -> Report:
        mining_s = time.perf_counter() - began
        with working("training"):
            tensors, fitted = fit(found.mismatches, o.seed, o.recall)
        facts = JudgeFacts(
            model=target.info.name,
            weights_fingerprint=target.info.weights_fingerprint,
            draft_model=draft.info.name,
            draft_weights_fingerprint=draft.info.weights_fingerprint,
            hidden_size=len(tensors["weight"]),
            dtype=target.info.dtype,
            task=",".join(name for name, _ in o.tasks),
            seed=o.seed,
            max_tokens=most,
            flyspec_version=__version__,
            **fitted,
        )
        judge = write_judge(file, tensors, facts)
        training_s = time.perf_counter() - began - mining_s
        document = {
            "autojudge_file": str(file),
            "fingerprint": judge.fingerprint,
            **facts.model_dump(),
            "unanswered": found.unanswered,
            "target_tokens": found.num_tokens,
            "mining_s": mining_s,
            "training_s": training_s,
        }
        summary = (
            f"AUC {facts.auc:.3f} on held-out prompts ({facts.train_auc:.3f} on the others). "
            f"{facts.labels:,} mismatches of {facts.prompts:,} prompts, "
            f"{facts.important / facts.labels:.1%} important; C {facts.regularization:.2g}. "
            f"Own threshold {facts.threshold:.4f}: rejects {facts.target_recall:.0%} of the "
            f"important ones. Mining took {mining_s:.0f} s, training {training_s:.0f} s. "
            f"Wrote {file}; serve it with --autojudge-file and --rule autojudge."
        )
        title = (
            f"Thresholds on {facts.held_out_labels:,} mismatches of {facts.held_out_prompts:,} "
            "held-out prompts"
        )
        table = record_table(_COLUMNS, facts.thresholds, title)
        mismatches = [{name: getattr(m, name) for name in _OF_MISMATCH} for m in found.mismatches]
        return Report(document, [table, summary], {"mismatches": mismatches})

    return whatever_reached(mined, trained)


# --- regression -------------------------------------------------------------------------------


def fit(
    mismatches: Sequence[Mismatch], seed: int, recall: float
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Return tensors and facts of a judge that rejects a share `recall` of important tokens.

    The facts are those of `JudgeFacts` that training tells. Raises `ConfigError` if there are too
    few mismatches of either kind to train or to measure.
    """
    rows = np.stack([each.hidden.numpy() for each in mismatches]).astype(np.float64)
    important = np.array([each.important for each in mismatches])
    groups = np.array([each.problem for each in mismatches])
    train, held_out = _split(important, groups, seed)
    scaler = StandardScaler().fit(rows[train])
    standard = scaler.transform(rows)

    def auc(model: LogisticRegression, of: Numbers) -> float:
        return float(roc_auc_score(important[of], model.decision_function(standard[of])))

    models = [
        LogisticRegression(C=c, max_iter=_MOST_ITERATIONS).fit(standard[train], important[train])
        for c in REGULARIZATION
    ]
    best = max(models, key=lambda model: auc(model, held_out))
    numbers = {
        "weight": best.coef_[0], "bias": best.intercept_,
        "mean": scaler.mean_, "scale": scaler.scale_,
    }  # fmt: skip
    tensors = {name: torch.from_numpy(of).to(torch.float32) for name, of in numbers.items()}
    # As the stored numbers have it, which are rounded: thresholds may be near each other.
    w, b, mean, scale = (tensor.double().numpy() for tensor in tensors.values())
    seen = expit((rows[held_out] - mean) / scale @ w + b)
    return tensors, {
        "prompts": len(np.unique(groups)),
        "held_out_prompts": len(np.unique(groups[held_out])),
        "labels": len(important),
        "held_out_labels": len(held_out),
        "important": int(important.sum()),
        "auc": auc(best, held_out),
        "train_auc": auc(best, train),
        "regularization": best.C,
        "target_recall": recall,
        "threshold": threshold_for(recall, seen, important[held_out]),
        "thresholds": operating_points(seen, important[held_out]),
    }


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
    found, important = [], important.astype(bool)
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
    if len(np.unique(groups)) > 1:
        split = GroupShuffleSplit(1, test_size=HELD_OUT, random_state=seed % (1 << 32))
        ((train, held_out),) = split.split(important, groups=groups)
        if all(len(np.unique(important[part])) > 1 for part in (train, held_out)):
            return train, held_out
    raise ConfigError(
        f"{len(important)} mismatches, {int(important.sum())} of them important, are too few to "
        "train a judge and to measure it on other prompts; raise --problems, or use another task"
    )

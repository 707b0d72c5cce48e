"""From two models and a task to a judge's file: loads, mines, trains, writes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyspec.bundled import DRAFT, TARGET
from flyspec.concurrency import whatever_reached
from flyspec.config import DraftSettings, VerifySettings
from flyspec.engine.autojudge import AutoJudge, JudgeFacts, write_judge
from flyspec.errors import ConfigError
from flyspec.progress import progress, working
from flyspec.version import __version__
from flyspec_lab.autojudge.mining import Mined, Miner
from flyspec_lab.autojudge.options import JudgeTrainOptions
from flyspec_lab.autojudge.training import fit
from flyspec_lab.local_model import LocalModel
from flyspec_lab.tasks import TASKS, Problem, Task


@dataclass(frozen=True)
class Trained:
    """A judge in its file, with what was mined for it and the seconds that took."""

    file: Path
    judge: AutoJudge
    mined: Mined
    mining_s: float
    training_s: float

    @property
    def document(self) -> Mapping[str, Any]:
        mined = self.mined
        return {
            "autojudge_file": str(self.file),
            "fingerprint": self.judge.fingerprint,
            **self.judge.facts.model_dump(),
            "unanswered": mined.unanswered,
            "target_tokens": mined.num_tokens,
            "mining_s": self.mining_s,
            "training_s": self.training_s,
        }

    @property
    def samples(self) -> Mapping[str, Any]:
        """Every mismatch, without its hidden row."""
        names = "problem", "output_token_index", "target_token_id", "draft_token_id", "important"
        return {"mismatches": [{n: getattr(m, n) for n in names} for m in self.mined.mismatches]}


def train(o: JudgeTrainOptions) -> Trained:
    """Mine, train and write a judge. Raises `ConfigError`.

    Raises `StoppedEarly` with the judge of what was mined until then if Ctrl-C was pressed.
    """
    _check(o)
    tasks = _tasks(o)
    same: dict[str, Any] = {
        "device": o.device, "threads": o.threads, "max_sessions": o.concurrency
    }  # fmt: skip
    with working("loading the models"):
        target = LocalModel(VerifySettings(model=o.model or str(TARGET), dtype=o.dtype, **same))
        draft_name = o.draft_model or str(DRAFT)
        draft = LocalModel(DraftSettings(model=draft_name, dtype=o.draft_dtype, **same))
    if draft.info.tokenizer_fingerprint != target.info.tokenizer_fingerprint:
        raise ConfigError(
            f"--draft-model {draft.info.name}: its tokenizer differs from that of "
            f"{target.info.name}; a judge is trained on token ids that both models share"
        )
    problems = [(task, problem) for task in tasks for problem in _answered(task)]
    most = max(task.max_tokens for task in tasks) if o.max_tokens is None else o.max_tokens
    miner = Miner(target, draft, most, o.concurrency)
    began = time.perf_counter()

    def mined() -> Mined:
        with progress("mining", len(problems)) as advance:
            return miner.run(problems, advance)

    def trained(found: Mined) -> Trained:
        mining_s = time.perf_counter() - began
        with working("training"):
            fitted = fit(found.mismatches, o.seed, o.recall)
        facts = JudgeFacts(
            model=target.info.name,
            weights_fingerprint=target.info.weights_fingerprint,
            draft_model=draft.info.name,
            draft_weights_fingerprint=draft.info.weights_fingerprint,
            hidden_size=len(fitted.tensors["weight"]),
            dtype=target.info.dtype,
            task=",".join(o.task),
            seed=o.seed,
            max_tokens=most,
            flyspec_version=__version__,
            **fitted.facts,
        )
        judge = write_judge(o.autojudge_file, fitted.tensors, facts)
        return Trained(
            o.autojudge_file, judge, found, mining_s, time.perf_counter() - began - mining_s
        )

    return whatever_reached(mined, trained)


def _check(o: JudgeTrainOptions) -> None:
    if not 0.0 < o.recall <= 1.0:  # NaN too
        raise ConfigError(f"--recall must be above 0 and at most 1, got {o.recall:g}")
    if not o.autojudge_file.expanduser().parent.is_dir():
        raise ConfigError(
            f"--autojudge-file {o.autojudge_file}: no directory {o.autojudge_file.parent}"
        )
    if o.model and not o.draft_model:
        raise ConfigError("--draft-model: give one; the bundled draft model fits no other target")


def _tasks(o: JudgeTrainOptions) -> list[Task]:
    """Return the tasks, with equal shares of the problems."""
    found = []
    for name in o.task:
        path = o.path if TASKS[name].needs_path or len(o.task) == 1 else None
        found.append(TASKS[name](path, limit=-(-o.problems // len(o.task)), seed=o.seed))
    return found


def _answered(task: Task) -> list[Problem]:
    """Return a task's problems. Raises `ConfigError` unless it knows what texts say."""
    problems = task.problems()
    if not problems:
        raise ConfigError(f"--task {task.name}: no problems; see --path")
    if task.score(problems[0], "") is None:
        raise ConfigError(
            f"--task {task.name}: its texts have no answers, so nothing says what is important; "
            "use a task with answers"
        )
    return problems

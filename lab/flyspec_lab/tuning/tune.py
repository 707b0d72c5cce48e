"""`flyspec tune`: records, replays, chooses, and measures how far replay was off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flyspec.cli.conditions import Condition
from flyspec.config import DraftSettings, VerifySettings
from flyspec.errors import ConfigError
from flyspec.version import __version__
from flyspec_lab.certify import Certificate, Promise
from flyspec_lab.local_model import LocalModel
from flyspec_lab.options import EvalOptions
from flyspec_lab.problems import TaskProblems, read_problems
from flyspec_lab.resplits import Resplits, resplit
from flyspec_lab.tuning.options import TuneOptions
from flyspec_lab.tuning.record import Recorder
from flyspec_lab.tuning.recording import TuningRecord
from flyspec_lab.tuning.replay import RuleReplay
from flyspec_lab.tuning.search import (
    Axis,
    RuleCandidate,
    axes_of,
    candidates,
    certified,
    fastest,
    flips_of,
)


@dataclass(frozen=True)
class Tuned:
    """What was found on a recording. Certificates are by axis, none unless they were asked for."""

    recording: TuningRecord
    axes: Sequence[Axis]
    candidates: Sequence[RuleCandidate]
    chosen: RuleCandidate
    certificates: Mapping[str, tuple[RuleCandidate | None, Certificate]]
    resplits: Resplits | None = None

    def best_of(self, axis: Axis, target_recovery: float) -> RuleCandidate | None:
        """Return the axis's loosest threshold whose bound reaches the target, if any does."""
        good = [
            c for c in self.candidates if c.axis == axis.name and c.recovery_low >= target_recovery
        ]
        return good[-1] if good else None

    def evidence(self, o: TuneOptions) -> str:
        """Say in sentences what the choice rests on."""
        chosen, info, texts = self.chosen, self.recording.info, self.recording.texts
        text = (
            f"Found by flyspec tune {__version__} for the target {info.target} "
            f"({info.target_fingerprint}) with the draft model {info.draft}, K = "
            f"{info.num_speculative_tokens}, on {len(texts)} problems of {info.task}, "
            f"{chosen.replayed.scores.mean():.1%} of which the target answers correctly. Expected "
            f"recovery {chosen.recovery:.1%}, at least {chosen.recovery_low:.1%} with confidence "
            f"{o.confidence:.0%}; {chosen.num_flips} answers lost; {chosen.tokens_per_round:.2f} "
            f"tokens a round, where exact decoding has {self.candidates[0].tokens_per_round:.2f}."
        )
        proof = self.certificates.get(chosen.axis)
        if proof is not None and proof[1].index is not None:
            promise = proof[1].promise
            text += (
                f" Certified up to {proof[0].value if proof[0] else 0:g}: at most "
                f"{promise.max_rate:.1%} of right answers are lost, with confidence "
                f"{o.certify_confidence:.0%} for all certificates together."
            )
        return text


def obtain(
    o: TuneOptions, models: tuple[str, str], device: str, dtype: str, threads: int
) -> TuningRecord:
    """Return the recording, made now if its file does not exist. Raises `ConfigError`."""
    if o.recording.exists():
        return TuningRecord.load(o.recording)
    (problems,) = _one_task(o)
    same: dict[str, Any] = {"device": device, "dtype": dtype, "threads": threads}
    target = LocalModel(VerifySettings(model=models[0], **same))
    draft = LocalModel(DraftSettings(model=models[1], **same))
    max_tokens = o.max_tokens or problems.task.max_tokens
    recorder = Recorder(target, draft, problems.task, o.num_speculative_tokens, max_tokens)
    recording = recorder.record(problems.problems)
    recording.save(o.recording)
    return recording


def _one_task(o: TuneOptions) -> list[TaskProblems]:
    found = read_problems(o)
    if len(found) != 1:
        raise ConfigError(
            f"--task: {len(found)} tasks are named; a recording has the problems of one"
        )
    return found


def search(o: TuneOptions, recording: TuningRecord) -> Tuned:
    """Replay the recording by every rule and threshold, and choose."""
    # Rounds are small: more threads would wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        axes = axes_of(o.rules)
        found = candidates(RuleReplay(recording), axes, o.confidence)
    finally:
        torch.set_num_threads(threads)
    proofs, resplits = {}, None
    if o.certify_rate is not None:
        promise = Promise(o.certify_rate, o.certify_confidence)
        results = certified(found, axes, promise)
        proofs = {axis.name: result for axis, result in zip(axes, results, strict=True)}
        if o.resplits:
            resplits = resplit(flips_of(found, axes), promise, o.resplits)
    return Tuned(recording, axes, found, fastest(found, o.target_recovery), proofs, resplits)


def confirming(o: TuneOptions, tuned: Tuned) -> EvalOptions:
    """Return the run that generates the recorded texts again, by the rule found."""
    k = tuned.recording.info.num_speculative_tokens
    rule = Condition(o.name, tuned.chosen.replayed.rule)
    shared: dict[str, Any] = {
        name: getattr(o, name) for name in ("task", "num_shots", "allow_code_execution",
        "problems", "problem_seed", "prompt_file", "limit", "chat")
    }  # fmt: skip
    return EvalOptions(
        **shared,
        max_tokens=tuned.recording.info.max_tokens,
        rules=(rule,),
        num_speculative_tokens=k,
    )

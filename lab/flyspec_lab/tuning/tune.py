"""`flyspec tune`: its options, its run on a recording, and the report and preset of the choice."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from flyspec.cli.options import ModelFlags
from flyspec.cli.program import say
from flyspec.config import DraftSettings, VerifySettings
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.progress import working
from flyspec.rules import PARAMETERS, Rule
from flyspec.tables import make_table
from flyspec.version import __version__
from flyspec_lab.bench.options import names_of
from flyspec_lab.options import ProblemOptions
from flyspec_lab.problems import read_problems
from flyspec_lab.report import Report
from flyspec_lab.tuning.recording import Recorder, TuningRecord
from flyspec_lab.tuning.replay import RuleReplay
from flyspec_lab.tuning.search import (
    AXES,
    Axis,
    Certificate,
    Promise,
    RuleCandidate,
    candidates,
    certified,
    fastest,
)

_promise = partial(Flag, group="Certificate")


# fmt: off
@dataclass(frozen=True)
class TuneOptions(ProblemOptions):
    """`flyspec tune`. Problems are recorded unless the recording exists."""

    recording: Annotated[Path, Flag(
        "Recording of both models on the problems: made if it does not exist, else replayed.",
    )] = Path("recording.npz")
    target_recovery: Annotated[float, Flag(
        "Minimum share of the target's score to keep.", min=0,
    )] = 0.99
    confidence: Annotated[float, Flag(
        "Confidence that a threshold keeps it.", min=0,
    )] = 0.8
    rules: Annotated[tuple[str, ...] | None, Flag(
        "Rules to tune, comma-separated.", metavar="RULE,...", listed=True, default="all",
        read=names_of({axis.rule.name: None for axis in AXES}),
    )] = None
    certify_rate: Annotated[float | None, _promise(
        "Also certify thresholds: at most this rate of right answers made wrong.", min=0,
        default="none",
    )] = None
    certify_confidence: Annotated[float, _promise(
        "Confidence of the certificates, together.", min=0,
    )] = 0.9
    num_speculative_tokens: Annotated[int, Flag("K: drafted tokens per round.", min=1)] = 15
    name: Annotated[str, Flag("Name of the rule in the preset file.")] = "tuned"
    preset_file: Annotated[Path | None, Flag(
        "Write the rule found, with its evidence, as a file for --rules-file.", default="none",
    )] = None
    # fmt: on

    def check(self) -> None:
        """Raise `ConfigError` for shares that are none."""
        if not 0 < self.target_recovery <= 1 or not 0 < self.confidence < 1:
            raise ConfigError("--target-recovery and --confidence must be between 0 and 1")
        if self.certify_rate is not None and not 0 < self.certify_rate < 1:
            raise ConfigError("--certify-rate must be between 0 and 1")


def obtain(o: TuneOptions, pair: tuple[str, str], models: ModelFlags) -> TuningRecord:
    """Return the recording, made now with a target and a draft model if its file does not exist.

    Raises `ConfigError`.
    """
    if o.recording.exists():
        return TuningRecord.load(o.recording)
    tasks = read_problems(o)
    if len(tasks) != 1:
        raise ConfigError(
            f"--task: {len(tasks)} tasks are named; a recording has the problems of one"
        )
    from flyspec_lab.local_model import LocalModel

    task = tasks[0].task
    same: dict[str, Any] = {
        "device": models.device, "dtype": models.dtype, "threads": models.threads
    }  # fmt: skip
    with working("loading both models"):
        target = LocalModel(VerifySettings(model=pair[0], **same))
        draft = LocalModel(DraftSettings(model=pair[1], **same))
    say(f"recording {len(tasks[0].problems)} problems of {task.name} in {o.recording}")
    max_tokens = o.max_tokens or task.max_tokens
    recorder = Recorder(target, draft, task, o.num_speculative_tokens, max_tokens)
    recording = recorder.record(tasks[0].problems)
    recording.save(o.recording)
    return recording


@dataclass(frozen=True)
class Tuned:
    """The candidates on a recording, exact decoding first, and the choice among them.

    Certificates are by axis, none unless they were asked for.
    """

    o: TuneOptions
    recording: TuningRecord
    axes: Sequence[Axis]
    candidates: Sequence[RuleCandidate]
    chosen: RuleCandidate
    certificates: Mapping[str, tuple[RuleCandidate | None, Certificate]]

    @classmethod
    def search(cls, o: TuneOptions, recording: TuningRecord) -> Tuned:
        """Replay the recording by every rule and threshold, and choose."""
        axes = [axis for axis in AXES if o.rules is None or axis.rule.name in o.rules]
        # Rounds are small: more threads would wait for each other.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            found = candidates(RuleReplay(recording), axes, o.confidence)
        finally:
            torch.set_num_threads(threads)
        proofs: Mapping[str, tuple[RuleCandidate | None, Certificate]] = {}
        if o.certify_rate is not None:
            proofs = certified(found, axes, Promise(o.certify_rate, o.certify_confidence))
        return cls(o, recording, axes, found, fastest(found, o.target_recovery), proofs)

    def preset(self) -> str:
        """Return the choice as the TOML of a rules file, with its evidence as comments."""
        o, chosen, info = self.o, self.chosen, self.recording.info
        replayed, exact = chosen.replayed, self.candidates[0].replayed
        evidence = (
            f"Found by flyspec tune {__version__} for the target {info.target} "
            f"({info.target_fingerprint}) with the draft model {info.draft}, K = "
            f"{info.num_speculative_tokens}, on {len(self.recording.texts)} problems of "
            f"{info.task}, {replayed.scores.mean():.1%} of which the target answers correctly. "
            f"Expected recovery {replayed.recovery:.1%}, at least {chosen.recovery_low:.1%} with "
            f"confidence {o.confidence:.0%}; {chosen.num_flips} answers lost; "
            f"{replayed.tokens_per_round:.2f} tokens a round, where exact decoding has "
            f"{exact.tokens_per_round:.2f}."
        )
        proven, proof = self.certificates.get(chosen.axis, (None, None))
        if proven is not None and proof is not None:
            evidence += (
                f" Certified up to {proven.value:g}: at most {proof.promise.max_rate:.1%} of right "
                f"answers are lost, with confidence {o.certify_confidence:.0%} for all "
                "certificates together."
            )
        return rules_file(o.name, replayed.rule, evidence)

    def report(self) -> Report:
        columns = ["rule", "threshold", "value", "recovery", "at least", "lost", "tok/round"]
        if self.certificates:
            columns.append(f"certified {self.o.certify_rate:.2%}")
        table = make_table(columns, map(self._row, self.axes), left=2)
        document = {
            **vars(self.o),
            "recording_info": self.recording.info,
            "num_positions": self.recording.num_positions,
            "candidates": [
                {
                    "axis": c.axis,
                    "value": c.value,
                    "recovery": c.replayed.recovery,
                    "recovery_low": c.recovery_low,
                    "flips": c.num_flips,
                    "tokens_per_round": c.replayed.tokens_per_round,
                }
                for c in self.candidates
            ],
            "chosen": {"axis": self.chosen.axis, "value": self.chosen.value},
            "certificates": {axis: proof for axis, (_, proof) in self.certificates.items()},
        }
        return Report(document, [table, *self._remarks()])

    def _row(self, axis: Axis) -> list[str]:
        """Return a rule's loosest threshold that reaches the target, and the one certified."""
        row = [axis.name, axis.parameter, "none", "", "", "", ""]
        for c in self.candidates:
            if c.axis == axis.name and c.recovery_low >= self.o.target_recovery:
                row[2:] = [
                    f"{c.value:g}", f"{c.replayed.recovery:.1%}", f"{c.recovery_low:.1%}",
                    str(c.num_flips), f"{c.replayed.tokens_per_round:.2f}",
                ]  # fmt: skip
        if self.certificates:
            proven, _ = self.certificates[axis.name]
            row.append("none" if proven is None else f"{proven.value:g}")
        return row

    def _remarks(self) -> list[str]:
        """Return what is said about the recording and the choice."""
        o, chosen, texts = self.o, self.chosen, len(self.recording.texts)
        exact = self.candidates[0].replayed
        choice = (
            f"{chosen.axis}, threshold {chosen.value:g}: expected recovery "
            f"{chosen.replayed.recovery:.1%}, at least {chosen.recovery_low:.1%}; "
            f"{chosen.replayed.tokens_per_round:.2f} tokens a round"
            if chosen.value is not None
            else f"exact decoding; no threshold keeps {o.target_recovery:.1%} with confidence "
            f"{o.confidence:.0%} on these problems: record more, or ask for less"
        )
        return [
            f"{texts} problems of {self.recording.info.task}: "
            f"{self.recording.num_positions:,} positions",
            f"exact decoding: {exact.tokens_per_round:.2f} tokens a round",
            f"chosen: {choice}",
            *(
                f"not certified: {axis}: {certificate.problem}"
                for axis, (_, certificate) in self.certificates.items()
                if certificate.problem
            ),
        ]


def rules_file(name: str, rule: Rule, evidence: str) -> str:
    """Return the TOML of a named rule, for `--rules-file`; `evidence` goes before it."""
    lines = [f"# {line}".rstrip() for line in textwrap.wrap(evidence, 96)]
    lines += ["", f"[rules.{name}]", f'preset = "{rule.name}"']
    for field in fields(rule):
        value = getattr(rule, field.name)
        if field.name not in PARAMETERS or value is None:
            continue
        shown = PARAMETERS[field.name].show(value)
        lines.append(f"{field.name} = " + (f'"{shown}"' if isinstance(value, IntEnum) else shown))
    return "\n".join(lines) + "\n"

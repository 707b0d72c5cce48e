"""What `flyspec tune` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from flyspec.flags import Flag
from flyspec_lab.bench.options import names_of
from flyspec_lab.options import ProblemOptions
from flyspec_lab.tuning.search import AXES

_promise = partial(Flag, group="Certificate")


# fmt: off
@dataclass(frozen=True)
class TuneOptions(ProblemOptions):
    """`flyspec tune`. Problems are recorded unless the recording exists."""

    recording: Annotated[Path, Flag(
        "Recording of both models on the problems: made if it does not exist, else replayed.",
    )] = Path("recording.parquet")
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
    resplits: Annotated[int, _promise(
        "Also certify from this many random halves of the recording, and from as many redraws of "
        "it, and count the promises broken.", min=0,
    )] = 0
    num_speculative_tokens: Annotated[int, Flag("K: drafted tokens per round.", min=1)] = 15
    confirm: Annotated[bool, Flag(
        "Generate all recorded texts again by the rule found, to measure how far replay is off.",
    )] = False
    name: Annotated[str, Flag("Name of the rule in the preset file.")] = "tuned"
    preset_file: Annotated[Path | None, Flag(
        "Write the rule found, with its evidence, as a file for --rules-file.", default="none",
    )] = None
# fmt: on

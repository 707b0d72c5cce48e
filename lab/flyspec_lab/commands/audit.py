"""`flyspec audit`: does a recorded generation follow from a target?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyspec.cli.json_output import to_json
from flyspec.cli.options import with_flags
from flyspec.cli.options.stack import setting
from flyspec.cli.streaming import write
from flyspec.config import VerifySettings
from flyspec.flags import Dtype, Flag

if TYPE_CHECKING:
    from flyspec.client.recordings import RecordedLine
    from flyspec_lab.audit import AuditReport

_target = partial(setting, VerifySettings, group="Target")
_DTYPES = ("bfloat16", "float16", "float32", "float64")


# fmt: off
@dataclass(frozen=True)
class AuditedFlags:
    """The target to audit against."""

    model: Annotated[str | None, _target(
        "model", default="the bundled target",
        help="Target that the recordings should follow from: a directory or hub id.",
    )] = None
    device: Annotated[str, _target("device")] = "auto"
    dtype: Annotated[Dtype | None, _target(
        "dtype", default="as recorded", help="Data type of the weights.",
    )] = None
    threads: Annotated[int, _target("threads")] = 0
    max_model_len: Annotated[int, _target("max_model_len")] = 0
    autojudge_file: Annotated[str, _target("autojudge_file")] = ""
    batch_invariant: Annotated[bool | None, _target("batch_invariant")] = None
    # fmt: on

    def settings(self, lines: Sequence[RecordedLine]) -> VerifySettings:
        """Return the settings of a service with this target, with the data type of the recordings.

        Numerics begin with it.
        """
        from flyspec.bundled import AUTOJUDGE, TARGET

        recorded = lines[0].recording.started.numerics.split(",")[0]
        dtype = recorded if recorded in _DTYPES else "auto"
        given: Any = {**vars(self), "dtype": self.dtype or dtype}
        if self.model is None and not self.autojudge_file:
            given["autojudge_file"] = str(AUTOJUDGE)
        return VerifySettings(**{**given, "model": self.model or str(TARGET)}, max_sessions=1)


# fmt: off
@with_flags
def audit(
    target: AuditedFlags,
    recordings: Annotated[list[Path], typer.Argument(
        metavar="RECORDING", help="Files written by `flyspec generate --record`.",
    )],
    limit: Annotated[int | None, Flag("Audit only so many generations.", min=1)] = None,
    quiet: Annotated[bool, Flag("Show only generations that do not follow.")] = False,
    json: Annotated[bool, Flag("Print one JSON document per generation.")] = False,
) -> None:
    # fmt: on
    """Judge recorded generations again and name the first token that does not follow.

    Reads each recording with the target, decides every round again from what is recorded of it,
    and compares tokens, decisions and numbers. The exit code is 0 if all follow, 1 if not. Where
    rounding had to be measured, all generations together must be explained by it, too.
    """
    from flyspec.client.recordings import read_recordings
    from flyspec.progress import working

    lines = [line for path in recordings for line in read_recordings(path)][:limit]
    settings = target.settings(lines)

    from flyspec_lab.audit import AuditedTarget, Auditor

    with working(f"loading {settings.model}"):
        audited = AuditedTarget.load(settings)

    def load(dtype: Dtype, native: bool) -> AuditedTarget:
        with working(f"loading {settings.model} in {dtype}"):
            return AuditedTarget.load(settings.model_copy(update={"dtype": dtype}), native)

    auditor = Auditor(audited, load)
    reports = []
    for line in lines:
        report = auditor.audit(line)
        reports.append(report)
        if json:
            write(to_json(asdict(report)) + "\n")
        elif not (quiet and report.follows):
            write("\n    ".join(report.lines()) + "\n")
    from flyspec_lab.audit import SIGNIFICANT, combined

    chances = [report.p_value for report in reports if report.p_value is not None]
    together = combined(chances) if chances else None
    if not json:
        write(_total(reports) + "\n")
        if together is not None:
            other = "; likely: other weights" if together < SIGNIFICANT else ""
            write(f"chance of all their numbers by rounding alone: {together:.2g}{other}\n")
    follow = all(report.follows for report in reports)
    raise typer.Exit(not follow or (together is not None and together < SIGNIFICANT))


def _total(reports: Sequence[AuditReport]) -> str:
    follow = sum(report.follows for report in reports)
    reasons = Counter(str(r.reason).split(":")[0] for r in reports if r.reason is not None)
    told = "".join(f"; {count} {reason}" for reason, count in reasons.most_common())
    return f"{follow} of {len(reports)} generations follow from the target{told}"

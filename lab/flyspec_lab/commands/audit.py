"""`flyspec audit`: does a recorded generation follow from a target?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from flyspec.cli.options import with_flags
from flyspec.cli.options.stack import setting
from flyspec.config import VerifySettings
from flyspec.flags import Dtype, Flag
from flyspec.tables import Column, record_table
from flyspec_lab.bench.options import ModelOptions
from flyspec_lab.report import Part, Report, Results

if TYPE_CHECKING:
    from flyspec.client.recordings import RecordedLine
    from flyspec_lab.audit import AuditReport

_setting = partial(setting, VerifySettings)
_COLUMNS: tuple[Column, ...] = (
    ("recording", "{.where}"),
    ("follows", lambda r: "yes" if r.follows else "no"),
    ("tokens", "{.num_tokens}"),
    ("rounds", "{.num_rounds}"),
    ("rule", "{.rule}"),
    ("numbers", "{.num_numbers}"),
    ("differ", "{.num_differing}"),
    ("by", "{.largest_difference_nats:.2g}"),
    ("allowed", "{.tolerance_nats:.2g}"),
    ("near-ties", "{.num_ties}"),
)
_DIFFERENCES: tuple[Column, ...] = (
    ("recording", "{.where}"),
    ("from token", "{.discrepancy.token_index}"),
    ("recorded", "{.discrepancy.recorded}"),
    ("expected", "{.discrepancy.expected}"),
    ("likely", "{.reason}"),
)


# fmt: off
@dataclass(frozen=True)
class AuditOptions(ModelOptions):
    """The target that the recordings should follow from; "auto" is the recordings' data type."""

    max_model_len: Annotated[int, _setting("max_model_len")] = 0
    autojudge_file: Annotated[str, _setting("autojudge_file")] = ""
    batch_invariant: Annotated[bool | None, _setting("batch_invariant")] = None
    # fmt: on

    def settings(self, recorded: str) -> VerifySettings:
        """Return the settings of a service with this target, for recordings of such numerics."""
        from flyspec.bundled import AUTOJUDGE, TARGET

        given: dict[str, Any] = {**vars(self)}
        dtype = recorded.split(",")[0]  # numerics begin with it
        if self.dtype == "auto" and dtype in get_args(Dtype):
            given |= {"dtype": dtype}
        if not self.model:
            given |= {"model": str(TARGET), "autojudge_file": self.autojudge_file or str(AUTOJUDGE)}
        return VerifySettings(**given, max_sessions=1)


# fmt: off
@with_flags
def audit(
    options: AuditOptions,
    results: Results,
    recordings: Annotated[list[Path], typer.Argument(
        metavar="RECORDING", help="Files written by `flyspec generate --record`.",
    )],
    limit: Annotated[int | None, Flag("Audit only so many generations.", min=1)] = None,
    quiet: Annotated[bool, Flag("Show only generations that do not follow.")] = False,
) -> None:
    # fmt: on
    """Judge recorded generations again and name the first token that does not follow.

    Reads each recording with the target, decides every round again from what is recorded of it,
    and compares tokens, decisions and numbers. The exit code is 0 if all follow, 1 if not. Where
    rounding had to be measured, all generations together must be explained by it, too.
    """
    from flyspec.client.recordings import read_recordings

    lines = [line for path in recordings for line in read_recordings(path)][:limit]
    settings = options.settings(lines[0].recording.started.numerics)
    results.of(lambda: _audited(settings, lines, quiet))


def _audited(settings: VerifySettings, lines: Sequence[RecordedLine], quiet: bool) -> Report:
    from flyspec.progress import progress, working
    from flyspec_lab.audit import SIGNIFICANT, AuditedTarget, Auditor

    def load(**changes: str) -> AuditedTarget:
        changed = settings.model_copy(update=changes)
        with working(f"loading {settings.model} in {changed.dtype}"):
            return AuditedTarget.load(changed)

    auditor = Auditor(load(), partial(load, dtype="float32"))
    found: list[AuditReport] = []
    with progress("auditing", len(lines)) as advance:
        for line in lines:
            found.append(auditor.audit(line))
            advance()
    bad, chance = [each for each in found if not each.follows], auditor.chance_of_rounding()
    total = f"{len(found) - len(bad)} of {len(found)} generations follow from the target"
    for reason, count in Counter(str(each.reason) for each in bad).most_common():
        total += f"; {count} {reason}"
    tables = (
        record_table(_COLUMNS, bad if quiet else found, "generations"),
        record_table(_DIFFERENCES, bad, "what does not follow", stacked=True),
    )
    parts: list[Part] = [
        *(table for table in tables if table.rows),
        *dict.fromkeys(f"note: {note}" for each in found for note in each.notes),
        total,
    ]
    other = chance is not None and chance < SIGNIFICANT
    if chance is not None:
        likely = "; likely: other weights" if other else ""
        parts.append(f"chance of all their numbers by rounding alone: {chance:.2g}{likely}")
    document = {"generations": found, "chance_of_rounding": chance}
    return Report(document, parts, passed=not bad and not other)

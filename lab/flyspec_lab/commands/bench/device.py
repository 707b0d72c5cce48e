"""`flyspec bench device`: steps, proposals and judging on a device, against its bandwidth."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flyspec.cli.options import with_flags
from flyspec.cli.stack_options import StackOptions
from flyspec.concurrency import whatever_reached
from flyspec_lab.bench.options import DeviceOptions
from flyspec_lab.report import Report, Results

if TYPE_CHECKING:
    from flyspec_lab.bench.device.report import DeviceReport


@with_flags
def bench_device(options: DeviceOptions, results: Results) -> None:
    """Time steps, proposals and judging on a device, and compare with reading its memory once."""
    from flyspec_lab.bench.device.measure import measure
    from flyspec_lab.bench.device.tables import NOTES, device_shown

    o = options
    if not o.shape and not o.model:
        bundled = StackOptions().resolved()
        o = replace(o, model=str(bundled.model), draft_model=str(bundled.draft_model))

    def shown(found: DeviceReport) -> Report:
        document = {"kind": "device", "options": vars(o), **vars(found)}
        return Report(document, [*device_shown(found), NOTES])

    results.of(lambda: whatever_reached(lambda: measure(o), shown))

"""`flyspec tune`: thresholds for a user's own prompts."""

from __future__ import annotations

from dataclasses import replace

from flyspec.bundled import DRAFT, TARGET
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.program import check_file
from flyspec.errors import ConfigError
from flyspec_lab.report import Report, Results
from flyspec_lab.tuning.tune import Tuned, TuneOptions, obtain


@with_flags
def tune(models: ModelFlags, options: TuneOptions, results: Results) -> None:
    """Find the fastest rule and threshold that keep a share of the target's answers.

    Both models are recorded once on problems with answers; each rule and threshold is then replayed
    on the record, without a model. Of those whose recovery is at least --target-recovery, with
    --confidence, the one with most tokens a round is chosen.
    """
    check_file("--preset-file", options.preset_file)
    check_file("--recording", options.recording)
    options.check()
    if models.model and not models.draft_model:
        raise ConfigError("--draft-model: name the draft model that thresholds are tuned for")
    results.of(lambda: _tuned(models, options))


def _tuned(models: ModelFlags, o: TuneOptions) -> Report:
    pair = models.model or str(TARGET), models.draft_model or str(DRAFT)
    found = Tuned.search(o, obtain(o, pair, models))
    report = found.report()
    if o.preset_file is None:
        return report
    o.preset_file.write_text(found.preset())
    written = f"wrote {o.preset_file}: serve it with --rules-file, and --rule {o.name}"
    return replace(report, parts=[*report.parts, written])

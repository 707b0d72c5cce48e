"""`flyspec tune`: thresholds for a user's own prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyspec.bundled import DRAFT, TARGET
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.program import check_file
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.errors import ConfigError
from flyspec_lab.report import Part, Report, Results
from flyspec_lab.tuning.options import TuneOptions

if TYPE_CHECKING:
    from flyspec.client import AsyncClient
    from flyspec_lab.compare import ConditionReport
    from flyspec_lab.tuning.tune import Tuned


@with_flags
def tune(models: ModelFlags, options: TuneOptions, results: Results) -> None:
    """Find the fastest rule and threshold that keep a share of the target's answers.

    Both models are recorded once on problems with answers; each rule and threshold is then replayed
    on the record, without a model. Of those whose recovery is at least --target-recovery, with
    --confidence, the one with most tokens a round is chosen.
    """
    check_file("--preset-file", options.preset_file)
    check_file("--recording", options.recording)
    if not 0 < options.target_recovery <= 1 or not 0 < options.confidence < 1:
        raise ConfigError("--target-recovery and --confidence must be between 0 and 1")
    if options.certify_rate is not None and not 0 < options.certify_rate < 1:
        raise ConfigError("--certify-rate must be between 0 and 1")
    if options.resplits and options.certify_rate is None:
        raise ConfigError("--resplits: give the promise that is checked by --certify-rate")
    if models.model and not models.draft_model:
        raise ConfigError("--draft-model: name the draft model that thresholds are tuned for")
    results.of(lambda: _tuned(models, options))


def _tuned(models: ModelFlags, o: TuneOptions) -> Report:
    from flyspec_lab.tuning import report
    from flyspec_lab.tuning import tune as tuning
    from flyspec_lab.tuning.preset import rules_file

    pair = models.model or str(TARGET), models.draft_model or str(DRAFT)
    recording = tuning.obtain(o, pair, models.device, models.dtype, models.threads)
    found = tuning.search(o, recording)
    if o.preset_file is not None:
        text = rules_file(o.name, found.chosen.replayed.rule, found.evidence(o))
        o.preset_file.write_text(text)
    confirmed = _confirmed(models, o, found) if o.confirm else None
    shown: list[Part] = [report.axes_table(o, found)]
    if found.resplits is not None:
        shown.append(report.resplits_table(found.resplits))
    shown.append("\n".join(report.summary(o, found, confirmed)))
    return Report(report.document(o, found, confirmed), shown)


def _confirmed(models: ModelFlags, o: TuneOptions, found: Tuned) -> ConditionReport:
    """Generate the recorded texts by the rule found."""
    from flyspec.cli.runtime import run_async, with_server
    from flyspec_lab.evaluation import run_evaluation
    from flyspec_lab.problems import read_problems
    from flyspec_lab.run import ServedModel
    from flyspec_lab.tuning.tune import confirming

    run = confirming(o, found)
    tasks = read_problems(run)

    async def use(client: AsyncClient, _: Stack | None) -> ConditionReport:
        served = await client.list_models()
        if served.target.weights_fingerprint != found.recording.info.target_fingerprint:
            raise ConfigError(
                f"--confirm: {o.recording} was made with other weights than {served.target.name}'s"
            )
        target = ServedModel(client, served.target)
        made = await run_evaluation(
            run, tasks, served, target, None, {}, None, resume=False, mixed_versions=False
        )
        return next(r for r in made.reports if r.condition == o.name)

    stack = StackOptions(**vars(models), log_level="warning")
    report: ConditionReport = run_async(with_server(stack, None, use))
    return report

"""`flyspec bench device`: everything it measures, in order."""

from __future__ import annotations

import gc

import torch
from transformers.utils.logging import disable_progress_bar

from flyspec.concurrency import UntilCtrlC
from flyspec.engine.loading import resolve_device
from flyspec_lab.bench.device.judging import judging_times
from flyspec_lab.bench.device.models import MODES, BenchModel, Wanted, build, noted
from flyspec_lab.bench.device.report import DeviceReport, DraftTime, JudgingTime, StepTime
from flyspec_lab.bench.device.steps import Measuring, draft_times, step_times
from flyspec_lab.bench.device.timing import Allowance, copy_bandwidth
from flyspec_lab.bench.machine import this_machine
from flyspec_lab.bench.options import DeviceOptions

_COPIED = {"cuda": 4 << 30, "cpu": 64 << 20}
"""Bytes of the copy, by kind of device: far more than its caches."""
_STEPS, _DRAFTS = 0.65, 0.85
"""Shares of the allowed time by which these end; the rest is for judging."""


def measure(o: DeviceOptions) -> DeviceReport:
    """Measure the copy bandwidth, the target's steps, the draft model's proposals, and judging.

    What fails is noted, and the rest is measured. Raises `ConfigError` for models that do not load,
    and `StoppedEarly` with what was measured until Ctrl-C was pressed.
    """
    if o.threads:
        torch.set_num_threads(o.threads)
    disable_progress_bar()
    allowance = Allowance(o.max_seconds)
    device = resolve_device(o.device)
    copied = _COPIED.get(device.type, _COPIED["cpu"])
    bandwidth = copy_bandwidth(device, copied)
    failures: dict[str, str] = {}
    modes = [mode for mode in MODES if mode in o.modes]
    how = Measuring(modes, bandwidth, o.repeats, allowance, failures)
    target = _model(o, Wanted("--shape", o.shape, o.model, o.device, o.dtype))
    info, attention = target.loaded.info, target.attention
    steps: list[StepTime] = []
    drafts: list[DraftTime] = []
    judging: list[JudgingTime] = []
    draft = ""
    with UntilCtrlC() as until:
        for step in step_times(target, o.batches, o.tokens, _contexts(o, target), how, _STEPS):
            steps.append(step)
            until.reached = True
        del target
        _free(device)
        if o.draft_shape or o.draft_model:
            wanted = Wanted("--draft-shape", o.draft_shape, o.draft_model, o.device, o.dtype)
            model = _model(o, wanted)
            draft = model.loaded.info.name
            contexts, k = _contexts(o, model), o.num_speculative_tokens
            for proposal in draft_times(model, o.batches, k, contexts, how, _DRAFTS):
                drafts.append(proposal)
            del model
            _free(device)
        with noted(failures, "judging"), torch.inference_mode():
            judging += judging_times(
                device, torch.bfloat16, o.vocab_size, o.num_speculative_tokens, o.batches,
                o.repeats,
            )  # fmt: skip
    return until.result(
        DeviceReport(
            device=str(device),
            dtype=info.dtype,
            target=info.name,
            draft=draft,
            target_parameters=info.num_parameters,
            attention=attention,
            block_size=o.block_size,
            vocab_size=o.vocab_size,
            repeats=o.repeats,
            bandwidth=bandwidth,
            copied_bytes=copied,
            machine=this_machine(),
            failures=failures,
            steps=steps,
            drafts=drafts,
            judging=judging,
        )
    )


def _model(o: DeviceOptions, wanted: Wanted) -> BenchModel:
    loaded = build(wanted, max(o.contexts) + _growth(o))
    return BenchModel(loaded, max(o.batches), o.block_size, o.attention_backend)


def _growth(o: DeviceOptions) -> int:
    """Tokens that a step or a proposal adds to the context."""
    return max(*o.tokens, o.num_speculative_tokens + 1)


def _contexts(o: DeviceOptions, model: BenchModel) -> list[int]:
    """The contexts, those that the model cannot hold cut to what it can."""
    longest = model.loaded.info.context_length - _growth(o)
    return sorted({min(context, longest) for context in o.contexts})


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""`flyspec bench pair`: the comparison on pairs of models made for it, or published ones."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyspec.bundled import TARGET
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack_options import StackOptions
from flyspec_lab.bench.options import PairOptions
from flyspec_lab.report import Report, Results

if TYPE_CHECKING:
    from flyspec.cli.stack import Stack
    from flyspec.client import AsyncClient


@with_flags
def bench_pair(models: ModelFlags, options: PairOptions, results: Results) -> None:
    """Compare on other pairs of models: two directories, other shapes, a longer target."""
    results.of(lambda: _measure(models, options))


def _measure(models: ModelFlags, o: PairOptions) -> Report:
    from flyspec.cli.runtime import run_async, with_server
    from flyspec.concurrency import whatever_reached
    from flyspec_lab.bench.prompts import groups
    from flyspec_lab.commands.bench.comparison import compare

    found = groups(o.prompt_file, o.problems, o.problem_seed, o.limit)

    async def measure(client: AsyncClient, stack: Stack | None) -> Report:
        return await compare(o, found, None, client, stack, rehearsed=True)

    with tempfile.TemporaryDirectory(prefix="flyspec-pair-") as folder:
        stack, facts = _prepare(models, o, Path(folder))
        return whatever_reached(
            lambda: run_async(with_server(stack, None, measure)),
            lambda done: _report(done, o, facts),
        )


def _report(done: Report, o: PairOptions, facts: dict[str, Any]) -> Report:
    """Return the comparison's report with the figures of a pair by their names in documents."""
    document = {**done.document, **facts}
    modes = []
    for group, of in document.pop("groups").items():
        for m in of:
            against_plain, verify, draft = m.ratios["plain"], m.verify_step_ms, m.draft_step_ms
            modes.append({
                **asdict(m),
                "group": group,
                "speedup": against_plain.median,
                "worst_speedup": against_plain.worst,
                "worst_prompt": against_plain.worst_prompt,
                "tokens_per_round": m.mean_accepted_tokens,
                "share": m.bound_share,
                "cost_ratio": verify / draft if verify and draft else None,
            })  # fmt: skip
    ks = ",".join(map(str, o.num_speculative_tokens))
    return replace(
        done, document={**document, "kind": "pair", "num_speculative_tokens": ks, "modes": modes}
    )


def _prepare(
    models: ModelFlags, o: PairOptions, folder: Path
) -> tuple[StackOptions, dict[str, Any]]:
    """Return options of the requested pair, with checkpoints in `folder`, and facts about it.

    Raises `ConfigError`.
    """
    from transformers.utils.logging import disable_progress_bar

    from flyspec.engine.loading import resolve_device
    from flyspec.progress import working
    from flyspec_lab.bench.shapes import pad_layers, shape_named, write_pair

    disable_progress_bar()
    facts: dict[str, Any] = {}
    if o.shape:
        shape = shape_named("--shape", o.shape)
        facts = {"target": f"random {o.shape}", "shape": asdict(shape)}
    stack = StackOptions(**vars(models), log_level="warning", max_sessions=4).resolved()
    facts = facts or {"target": Path(str(stack.model)).name}
    if o.shape:
        layers = o.draft_layers or max(1, shape.num_layers // 8)
        facts["target"] += f", {layers} of its layers as the draft model"
        tokenizer, device = Path(models.model or TARGET), resolve_device(models.device)
        with working(f"writing random weights of shape {o.shape}"):
            target, draft = write_pair(o.shape, layers, o.draft_noise, folder, tokenizer, device)
        stack = replace(stack.with_target(str(target)), draft_model=str(draft))
    if o.pad_target_layers:
        padded = pad_layers(Path(str(stack.model)), folder / "padded", o.pad_target_layers)
        stack = replace(stack, model=str(padded))
        facts["target"] += f", {o.pad_target_layers} extra layers in the target"
    return stack, facts

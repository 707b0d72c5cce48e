"""`flyspec bench pair`: speculation on other model pairs, compared with its upper bound."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyspec.bundled import TARGET
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.options.stack import to_flags
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.errors import ConfigError
from flyspec.speculation_length import SpeculationLength, requested
from flyspec_lab.bench.options import PairOptions, WantedPadding
from flyspec_lab.report import Report, Results

if TYPE_CHECKING:
    from flyspec.client import AsyncClient
    from flyspec_lab.bench.modes import Sample

_PATIENCE_S = 600.0  # for a proposal that first needs the target's own text


@with_flags
def bench_pair(models: ModelFlags, options: PairOptions, results: Results) -> None:
    """Measure how close rules get to the bound, for other cost ratios and model shapes."""
    from flyspec.cli.runtime import run_async

    results.of(lambda: run_async(_measure(models, options)))


async def _measure(models: ModelFlags, o: PairOptions) -> Report:
    from flyspec_lab.bench.pair import PAIR_NOTES, pair_table, report
    from flyspec_lab.bench.pair_padding import choose_padding

    with tempfile.TemporaryDirectory(prefix="flyspec-pair-") as folder:
        pair, facts = _prepare(models, o, Path(folder))
        own, ratio = o.pad_target_layers or WantedPadding(0, None)
        layers = own, 0
        if ratio is not None:
            if not pair.stack.draft_model or o.replay_drafter is not None:
                raise ConfigError("--pad-target-layers auto: needs a draft model to compare with")
            chosen = await choose_padding(
                ratio,
                lambda more, draft: pair.cost_ratio(own + more, draft, o.num_speculative_tokens),
            )
            facts["padding"] = chosen
            layers = own + chosen.target_layers, chosen.draft_layers
        for more, whose in zip(layers, ("target", "draft model"), strict=True):
            facts["target"] += f", {more} extra layers in the {whose}" if more else ""
        with pair.padded(*layers) as stack:
            samples = await _run(stack, o, pair.paced_by)
    reports = report(samples)
    title = f"{facts['target']}, {o.problems} prompts, K {o.num_speculative_tokens}"
    return Report(
        {
            **vars(o),
            "replay_error_rate": o.replay_drafter,
            "prompts": o.problems,
            **facts,
            "modes": reports,
        },
        [pair_table(reports, title), PAIR_NOTES],
        {"samples": samples},
    )


def _prepare(models: ModelFlags, o: PairOptions, folder: Path) -> tuple[_Pair, dict[str, Any]]:
    """Return the requested pair, with checkpoints in `folder`, and facts about it.

    Raises `ConfigError`.
    """
    from flyspec.engine.loading import resolve_device
    from flyspec.progress import error_console
    from flyspec_lab.bench.machine import this_machine
    from flyspec_lab.bench.pair_checkpoints import write_random
    from flyspec_lab.bench.shapes import shape_named

    if o.temperature and o.replay_drafter is not None:
        raise ConfigError("--replay-drafter replays greedy texts; remove --temperature")
    stack = StackOptions(**vars(models), log_level="warning", max_sessions=4).resolved()
    if not o.shape:
        return _Pair(stack, folder), {"target": Path(str(stack.model)).name}
    shape = shape_named("--shape", o.shape)
    error_console().print(f"writing random weights of shape {o.shape}")
    tokenizer = Path(models.model or TARGET)
    device = resolve_device(models.device)
    random = write_random(shape, folder / o.shape, tokenizer, o.replay_seed, device)
    facts: dict[str, Any] = {"target": f"random {o.shape}", "shape": asdict(shape)}
    facts |= {"device": str(device), "machine": this_machine()}
    paced_by = ""
    if o.draft_shape:
        if o.replay_drafter is None:
            raise ConfigError("--draft-shape: only the time of such a model means something; add "
                              "--replay-drafter")  # fmt: skip
        draft = shape_named("--draft-shape", o.draft_shape)
        written = write_random(draft, folder / "draft", tokenizer, o.replay_seed, device)
        paced_by = str(written)
        facts["target"] += f", drafts at the pace of a {o.draft_shape}"
    return _Pair(stack.with_target(str(random)), folder, paced_by), facts


@dataclass(frozen=True)
class _Pair:
    """Two models; checkpoints derived from them go to `folder`.

    A replaying drafter takes the time of the model `paced_by`, if it is not empty.
    """

    stack: StackOptions
    folder: Path
    paced_by: str = ""

    @contextmanager
    def padded(self, target_layers: int, draft_layers: int) -> Iterator[StackOptions]:
        """Yield the stack's options with layers added; the checkpoints are deleted afterwards."""
        from flyspec_lab.bench.pair_checkpoints import pad_layers

        stack = self.stack
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            if target_layers:
                target = pad_layers(Path(str(stack.model)), Path(folder) / "model", target_layers)
                stack = stack.with_target(str(target))
            if draft_layers:
                source = Path(str(stack.draft_model))
                draft = pad_layers(source, Path(folder) / "draft_model", draft_layers)
                stack = replace(stack, draft_model=str(draft))
            yield stack

    async def cost_ratio(
        self, target_layers: int, draft_layers: int, length: SpeculationLength
    ) -> float:
        """Return the ratio of verify to draft step in a few generations of the padded pair."""
        from flyspec_lab.bench.conditions import parse_conditions
        from flyspec_lab.bench.pair import report

        options = PairOptions(
            rules=parse_conditions("exact"), num_speculative_tokens=requested(length), repeats=2,
            problems=2, problem_seed=1,
        )  # fmt: skip
        with self.padded(target_layers, draft_layers) as stack:
            ratio = report(await _run(stack, options))[-1].cost_ratio
        if ratio is None:
            raise ConfigError("nothing was drafted; the ratio of steps needs a draft model")
        return ratio


async def _run(options: StackOptions, o: PairOptions, paced_by: str = "") -> list[Sample]:
    """Start the stack, with the replaying drafter if requested, and measure."""
    from flyspec.cli.runtime import with_server
    from flyspec.rules.presets import RULE_PRESETS
    from flyspec_lab.bench.pair import measure

    with tempfile.TemporaryDirectory(prefix="flyspec-pair-") as folder:
        address_file = Path(folder) / "address"
        if o.replay_drafter is not None:
            # The draft service loads the target's tokenizer and asks the target for its text.
            exact = {name for name, preset in RULE_PRESETS.items() if preset.token_exact}
            flags = to_flags(
                error_rate=o.replay_drafter, error_seed=o.replay_seed, address_file=address_file
            )
            flags += to_flags(paced_by=paced_by) if paced_by else []
            flags += ["--exact-only"] * all(
                rule.name in exact for condition in o.rules for rule in condition.rules
            )
            options = replace(
                options,
                draft_model=options.model,
                drafter="",
                modules={"draft": "flyspec_lab.bench.replay_service"},
                last_flags={
                    "draft": flags, "orchestrator": to_flags(draft_timeout_s=_PATIENCE_S),
                },
            )  # fmt: skip

        async def use(client: AsyncClient, stack: Stack | None) -> list[Sample]:
            assert stack is not None
            address_file.write_text(stack.address)
            return await measure(client, o)

        return await with_server(options, None, use)

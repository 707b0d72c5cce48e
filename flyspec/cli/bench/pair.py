"""`flyspec bench pair`: speculation on other model pairs, compared with its upper bound."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from flyspec.cli.bench.bench_stack import BenchStack
from flyspec.cli.bench.common import result_console, silence_loading
from flyspec.cli.options import ModelFlags, measuring, with_flags
from flyspec.cli.options.stack import to_flags
from flyspec.cli.stack import DEMO_MODELS, StackOptions
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.ranges import Range
from flyspec.speculation_length import SpeculationLength, requested

if TYPE_CHECKING:
    from flyspec.bench.pair import PairOptions, PairSample

_AUTO = "auto:"
_PATIENCE_S = 600.0  # for a proposal that first needs the target's own text


@with_flags
def bench_pair(
    models: ModelFlags,
    shape: Annotated[str, Flag(
        "Use a target with random weights of this shape (llama-1b or tiny) and --model's "
        "tokenizer.",
    )] = "",
    pad_target_layers: Annotated[str, Flag(
        "Add N no-op layers to the target. auto:R: as many as make a verify step R times as long "
        "as a draft step, added to the draft model if it is already longer. N,auto:R: both, so "
        "that both steps are long.",
    )] = "0",
    replay_drafter: Annotated[float | None, Flag(
        "Draft the target's own text with this fraction of errors, without a draft model.",
        Range(0.0, 1.0), default="use the draft model",
    )] = None,
    replay_seed: Annotated[int, Flag("Seed of the errors and of random weights.")] = 0,
    rules: Annotated[str, Flag(
        "Rules to measure: comma-separated, with parameters as in `flyspec bench --rules`.",
    )] = "exact,fly,fuzzy",
    problems: Annotated[int, Flag("Number of fresh word problems.", min=1)] = 4,
    problem_seed: measuring.ProblemSeed = 7,
    drafter: measuring.Drafter = "",
    num_speculative_tokens: measuring.KOrAuto = 15,
    max_tokens: measuring.MaxTokens = 64,
    repeats: Annotated[int, Flag("Runs per prompt and mode, after an uncounted one.",
                                 min=1)] = 3,
    json: measuring.Json = False,
    output: measuring.Output = None,
) -> None:  # fmt: skip
    """Measure how close rules get to the bound, for other cost ratios and model shapes."""
    from flyspec.bench.conditions import parse_conditions
    from flyspec.bench.pair import PAIR_NOTES, PairOptions, pair_table, report, to_document
    from flyspec.bench.pair_padding import choose_padding
    from flyspec.cli.runtime import check_output, print_json, run_async, write_json
    from flyspec.rules.presets import RULE_PRESETS

    check_output(output)
    silence_loading()
    options = PairOptions(
        conditions=parse_conditions(rules),
        num_speculative_tokens=num_speculative_tokens,
        max_tokens=max_tokens,
        repeats=repeats,
        drafter=drafter,
        rehearse=replay_drafter is not None,
    )
    padding = _Padding.read(pad_target_layers)
    with _prepared(models, shape, replay_seed) as (pair, facts):
        layers = padding.target_layers, 0
        if padding.ratio is not None:
            if not pair.stack.draft_model or replay_drafter is not None:
                raise ConfigError("--pad-target-layers auto: needs a draft model to compare with")
            chosen = run_async(
                choose_padding(
                    padding.ratio,
                    lambda more, draft: pair.cost_ratio(
                        padding.target_layers + more, draft, num_speculative_tokens
                    ),
                )
            )
            facts["padding"] = asdict(chosen)
            layers = padding.target_layers + chosen.target_layers, chosen.draft_layers
        for more, whose in zip(layers, ("target", "draft model"), strict=True):
            facts["target"] += f", {more} layers more in the {whose}" if more else ""
        with pair.padded(*layers) as stack:
            exact_only = all(RULE_PRESETS[c.rule.name].token_exact for c in options.conditions)
            drafts = _Drafts(replay_drafter, replay_seed, exact_only)
            asked = _Problems(problems, problem_seed)
            samples = run_async(_measure(stack, drafts, asked, options))
    reports = report(samples)
    document = to_document(
        reports,
        **facts,
        replay_error_rate=replay_drafter,
        num_speculative_tokens=num_speculative_tokens,
        max_tokens=max_tokens,
        repeats=repeats,
        prompts=problems,
    )
    write_json(output, {**document, "samples": [vars(s) for s in samples]})
    if json:
        print_json(document)
        return
    console = result_console()
    console.width = max(console.width, 160)
    title = f"{facts['target']}, {problems} prompts, K {num_speculative_tokens}"
    console.print(pair_table(reports, title))
    console.print(PAIR_NOTES, style="dim")


@contextmanager
def _prepared(models: ModelFlags, shape: str, seed: int) -> Iterator[tuple[_Pair, dict[str, Any]]]:
    """Yield the requested pair, and facts about it. Raises `ConfigError`.

    Its checkpoints are deleted at the end.
    """
    from flyspec.bench.pair_checkpoints import SHAPES, write_random
    from flyspec.cli.runtime import error_console

    stack = StackOptions(**vars(models), log_level="warning", max_sessions=8).resolved()
    facts: dict[str, Any] = {"target": Path(str(stack.model)).name}
    with tempfile.TemporaryDirectory(prefix="flyspec-pair-") as folder:
        if shape:
            if shape not in SHAPES:
                raise ConfigError(f"--shape {shape}: must be one of {', '.join(SHAPES)}")
            error_console().print(f"writing random weights of shape {shape}")
            tokenizer = Path(models.model or DEMO_MODELS / "target")
            random = write_random(SHAPES[shape], Path(folder) / shape, tokenizer, seed)
            stack = replace(stack, model=str(random))
            facts = {"target": f"random {shape}", "shape": asdict(SHAPES[shape])}
        yield _Pair(stack, Path(folder)), facts


@dataclass(frozen=True)
class _Pair:
    """Two models; checkpoints derived from them go to `folder`."""

    stack: StackOptions
    folder: Path

    @contextmanager
    def padded(self, target_layers: int, draft_layers: int) -> Iterator[StackOptions]:
        """Yield the stack's options with layers added; the checkpoints are deleted afterwards."""
        from flyspec.bench.pair_checkpoints import pad_layers

        stack = self.stack
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            if target_layers:
                model = pad_layers(Path(str(stack.model)), Path(folder) / "target", target_layers)
                stack = replace(stack, model=str(model))
            if draft_layers:
                model = pad_layers(
                    Path(str(stack.draft_model)), Path(folder) / "draft", draft_layers
                )
                stack = replace(stack, draft_model=str(model))
            yield stack

    async def cost_ratio(
        self, target_layers: int, draft_layers: int, length: SpeculationLength
    ) -> float:
        """Return the ratio of verify to draft step in a few generations of the padded pair."""
        from flyspec.bench.conditions import Condition
        from flyspec.bench.pair import PairOptions, report
        from flyspec.rules import Rule

        options = PairOptions((Condition("exact", Rule("exact")),), requested(length), repeats=2)
        with self.padded(target_layers, draft_layers) as stack:
            samples = await _measure(stack, _Drafts(), _Problems(2, 1), options)
        ratio = report(samples)[-1].cost_ratio
        if ratio is None:
            raise ConfigError("nothing was drafted; the ratio of steps needs a draft model")
        return ratio


class _Drafts(NamedTuple):
    """The source of drafts: the draft model, or with an error rate the target's own text."""

    error_rate: float | None = None
    error_seed: int = 0
    exact_only: bool = False


class _Problems(NamedTuple):
    """The word problems to use as prompts."""

    number: int
    seed: int


async def _measure(
    options: StackOptions, drafts: _Drafts, problems: _Problems, measured: PairOptions
) -> list[PairSample]:
    """Start the stack, measure, stop it."""
    from flyspec.bench.pair import count, measure
    from flyspec.bench.prompts import fresh_problems, to_request
    from flyspec.cli.progress import progress_bar
    from flyspec.cli.runtime import error_console, narrate
    from flyspec.client import Client

    prompts = [to_request(p, None) for p in fresh_problems(*problems).prompts]
    console = error_console()
    with tempfile.TemporaryDirectory(prefix="flyspec-pair-") as folder:
        address_file = Path(folder) / "address"
        flags: dict[str, list[str]] = {}
        modules: dict[str, str] = {}
        if drafts.error_rate is not None:
            # The draft service loads the target's tokenizer and asks the target for its text.
            options = replace(options, draft_model=options.model, drafter="")
            modules["draft"] = "flyspec.bench.replay_service"
            errors = to_flags(error_rate=drafts.error_rate, error_seed=drafts.error_seed)
            file = to_flags(address_file=address_file)
            flags["draft"] = [*errors, *file, *["--exact-only"] * drafts.exact_only]
            flags["orchestrator"] = to_flags(draft_timeout_s=_PATIENCE_S)
        with narrate(console) as say:
            stack = BenchStack(options, flags, modules, on_event=say)
            await stack.__aenter__()
        try:
            address_file.write_text(stack.address)
            async with Client(stack.address) as client:
                with progress_bar(console) as progress:
                    bar = progress.add_task("measuring", total=count(len(prompts), measured))
                    port = stack.services["verify"].facts["metrics_port"]
                    work = measure(client, prompts, measured, port, lambda: progress.advance(bar))
                    return await stack.guard(work)
        finally:
            await stack.stop()


class _Padding(NamedTuple):
    """Layers to add to the target, and the ratio of verify to draft step to reach, if any."""

    target_layers: int
    ratio: float | None

    @classmethod
    def read(cls, text: str) -> _Padding:
        """Parse N, auto:R or N,auto:R. Raises `ConfigError`."""
        layers, _, ratio = text.rpartition(",") if _AUTO in text else (text, "", "")
        if not (layers or "0").isdecimal() or not (ratio or _AUTO).startswith(_AUTO):
            raise ConfigError(
                f"--pad-target-layers {text}: must be a number of layers, auto:R or N,auto:R"
            )
        return cls(int(layers or "0"), _ratio(text, ratio) if ratio else None)


def _ratio(text: str, auto: str) -> float:
    try:
        ratio = float(auto.removeprefix(_AUTO))
    except ValueError:
        ratio = 0.0
    if not 0 < ratio < float("inf"):
        raise ConfigError(f"--pad-target-layers {text}: the ratio must be a number above 0")
    return ratio

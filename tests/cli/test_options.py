"""Every flag becomes part of the request to the server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flyspec.cli.conditions import with_phases
from flyspec.cli.main import app
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.service import Child
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import GenerateOptions
from flyspec.config import DraftSettings, VerifySettings
from flyspec.rules import Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.settings_sources import from_command_line
from flyspec.values.phases import Phase
from flyspec.values.tokens import SamplingParams

DEFAULTS = GenerateOptions(max_tokens=5, rule=Rule(""))


def parse(*arguments: str) -> tuple[GenerateOptions | None, str]:
    """Return what a command with these flags would request, and what it printed."""
    asked: list[GenerateOptions] = []
    app = typer.Typer()

    @app.command()
    @with_flags
    def command(options: GenerateOptions = DEFAULTS) -> None:
        asked.append(options)

    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(arguments))
    assert (result.exit_code == 0) == (bool(asked) or "--help" in arguments)
    return (asked[0] if asked else None), result.output


def test_without_flags_the_server_decides() -> None:
    assert parse()[0] == GenerateOptions(max_tokens=5, rule=Rule(""))


FLAGS: list[tuple[list[str], dict[str, Any]]] = [
    (["--seed", "7"], {"seed": 7}),
    (["--max-tokens", "9"], {"max_tokens": 9}),
    (["--stop", "a", "--stop", "b"], {"stop": ("a", "b")}),
    (["--stop-token-ids", "3", "--stop-token-ids", "4"], {"stop_token_ids": (3, 4)}),
    (["--prediction-file", __file__], {"prediction": Path(__file__).read_text()}),
    (["--ignore-eos"], {"ignore_eos": True}),
    (["--drafter", "model"], {"drafter": "model"}),
    (["--num-speculative-tokens", "4"], {"num_speculative_tokens": 4}),
    (["--num-speculative-tokens", "auto"], {"num_speculative_tokens": "auto"}),
    (["--max-loose-tokens", "3"], {"max_loose_tokens": 3}),
    (["--max-loose-cost-nats", "1.5"], {"max_loose_cost_nats": 1.5}),
    (["--exact-prefix-tokens", "2"], {"exact_prefix_tokens": 2}),
    (["--eager"], {"eager": True}),
    (["--exact-inside", "tool_call, json"], {"exact_inside": ("tool_call", "json")}),
    (["--no-loop-guard"], {"disable_loop_guard": True}),
    (["--logprobs", "0"], {"logprobs": 0}),
    (["--return-rounds"], {"return_rounds": True}),
    (["--timeout", "2.5"], {"timeout_s": 2.5}),
]
SAMPLING: list[tuple[list[str], dict[str, Any]]] = [
    (["--temperature", "0.7"], {"temperature": 0.7}),
    (["--top-p", "0.9"], {"top_p": 0.9}),
    (["--top-k", "40"], {"top_k": 40}),
    (["--min-p", "0.1"], {"min_p": 0.1}),
    (["--repetition-penalty", "1.2"], {"repetition_penalty": 1.2}),
    (["--presence-penalty", "-1.5"], {"presence_penalty": -1.5}),
    (["--frequency-penalty", "0.5"], {"frequency_penalty": 0.5}),
    (["--logit-bias", "9=-1.5", "--logit-bias", "3=2"], {"logit_bias": ((3, 2.0), (9, -1.5))}),
    (["--min-tokens", "3"], {"min_tokens": 3}),
]
RULE: list[tuple[list[str], dict[str, Any]]] = [
    (["--rule", "margin"], {"name": "margin"}),
    (["--fly-window-size", "0"], {"fly_window_size": 0}),
    (["--window-scope", "across_rounds"], {"window_scope": WindowScope.ACROSS_ROUNDS}),
    (["--fly-entropy-threshold", "0.5"], {"fly_entropy_threshold": 0.5}),
    (["--entropy-measure", "top_k"], {"entropy_measure": EntropyMeasure.TOP_K}),
    (["--fly-entropy-top-k", "5"], {"fly_entropy_top_k": 5}),
    (["--margin-threshold", "0.2"], {"margin_threshold": 0.2}),
    (["--divergence", "tv"], {"divergence": Divergence.TV}),
    (["--divergence-threshold", "0.1"], {"divergence_threshold": 0.1}),
    (["--divergence-top-k", "0"], {"divergence_top_k": 0}),
    (["--typical-epsilon", "0.05"], {"typical_epsilon": 0.05}),
    (["--typical-delta", "0.2"], {"typical_delta": 0.2}),
    (["--relaxed-top-k", "4"], {"relaxed_top_k": 4}),
    (["--relaxed-delta", "0.2"], {"relaxed_delta": 0.2}),
    (["--relaxed-ratio", "0.7"], {"relaxed_ratio": 0.7}),
    (["--confidence-threshold", "0.8"], {"confidence_threshold": 0.8}),
    (["--mars-ratio", "0.85"], {"mars_ratio": 0.85}),
    (["--ensemble-weight", "0.5"], {"ensemble_weight": 0.5}),
    (["--cactus-delta", "0.1"], {"cactus_delta": 0.1}),
    (["--judge-threshold", "0.3"], {"judge_threshold": 0.3}),
    (["--random-acceptance", "0"], {"random_acceptance": 0.0}),
    (["--random-judges-matches"], {"random_judges_matches": True}),
    (["--no-random-judges-matches"], {"random_judges_matches": False}),
    (["--guarded-token-id", "5", "--guarded-token-id", "4"], {"guarded_token_ids": (5, 4)}),
]


def test_flags_of_phases() -> None:
    found = with_phases(
        DEFAULTS,
        ["</think>", "token:7"],
        ["relaxed:relaxed_delta=0.2,max_loose_tokens=4", "exact"],
    )
    assert found.phases == (
        Phase(None, ("</think>",)),
        Phase(Rule("relaxed", relaxed_delta=0.2), (), (7,), max_loose_tokens=4),
        Phase(Rule("exact")),
    )
    assert found.rule == DEFAULTS.rule
    assert with_phases(DEFAULTS, (), ()) is DEFAULTS


@pytest.mark.parametrize(
    ("until", "then", "message"),
    [
        (["a"], [], "--until: give one --then for each.*1 --until and 0 --then"),
        ([], ["exact"], "there are 0 --until and 1 --then"),
        ([""], ["exact"], "--until: is empty"),
        (["a"], ["exact:x=1"], "--then: 'exact:x=1': 'x=1' must be PARAMETER=VALUE"),
        (["a"], ["exact,fly"], "--then: 'exact,fly' names 2 rules; give one"),
        (["a"], ["fly until b then exact"], "--then: .*give one rule"),
        (["a"], ["fly:num_speculative_tokens=4"], "--then: .* sets K"),
    ],
)
def test_flags_that_make_no_phases(until: list[str], then: list[str], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        with_phases(DEFAULTS, until, then)


@pytest.mark.parametrize(("arguments", "fields"), FLAGS)
def test_flags_of_the_request(arguments: list[str], fields: dict[str, Any]) -> None:
    assert parse(*arguments)[0] == GenerateOptions(**{"max_tokens": 5, "rule": Rule(""), **fields})


@pytest.mark.parametrize(("arguments", "fields"), SAMPLING)
def test_flags_of_the_sampling(arguments: list[str], fields: dict[str, Any]) -> None:
    sampling = SamplingParams(**fields)
    expected = GenerateOptions(sampling, max_tokens=5, rule=Rule(""))
    assert parse(*arguments)[0] == expected


@pytest.mark.parametrize(("arguments", "fields"), RULE)
def test_flags_of_the_rule(arguments: list[str], fields: dict[str, Any]) -> None:
    expected = GenerateOptions(max_tokens=5, rule=Rule(**{"name": "", **fields}))
    assert parse(*arguments)[0] == expected


@pytest.mark.parametrize(
    ("table", "kind", "apart"),
    [
        # Ids are for programs, and so are the rounds of an earlier run; phases have the flags of
        # `flyspec.cli.conditions`.
        (
            FLAGS,
            GenerateOptions,
            {
                "sampling",
                "rule",
                "phases",
                "request_id",
                "traceparent",
                "num_draft_tokens_per_round",
                "return_draft_distributions",
            },
        ),
        (SAMPLING, SamplingParams, set()),
        (RULE, Rule, set()),
    ],
)
def test_nothing_is_left_without_a_flag(table: Any, kind: Any, apart: set[str]) -> None:
    """A new request field must get a flag, and a line above."""
    assert {name for _, fields in table for name in fields} | apart == {
        f.name for f in dataclasses.fields(kind)
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logit-bias", "5"], "--logit-bias '5': must be a token id and a number"),
        (["--logit-bias", "a=1"], "--logit-bias 'a=1': must be"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "token 5 is given twice"),
        (["--min-tokens", "-1"], "--min-tokens"),
        (["--divergence", "x"], "--divergence"),
        (["--window-scope", "x"], "--window-scope"),
    ],
)
def test_flags_that_cannot_be_read(arguments: list[str], message: str) -> None:
    asked, output = parse(*arguments)
    assert asked is None
    assert message in output


def test_help_names_every_preset() -> None:
    _, output = parse("--help")
    for name in RULE_PRESETS:
        assert name in output


MEMORY: list[tuple[list[str], dict[str, Any], dict[str, Any]]] = [
    ([], {}, {}),
    (["--max-model-len", "512"], {"max_model_len": 512}, {"max_model_len": 512}),
    (["--kv-cache-memory-bytes", "9000"], {"kv_cache_memory_bytes": 9000}, {}),
    (["--draft-kv-cache-memory-bytes", "9000"], {}, {"kv_cache_memory_bytes": 9000}),
    (["--block-size", "64"], {"block_size": 64}, {"block_size": 64}),
    (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}, {}),
    (["--draft-gpu-memory-utilization", "0.3"], {}, {"gpu_memory_utilization": 0.3}),
]


class _Started(Exception):
    """As far as a stack gets here."""


@pytest.mark.parametrize(("arguments", "verify", "draft"), MEMORY)
async def test_flags_of_memory_reach_the_services(
    arguments: list[str],
    verify: dict[str, Any],
    draft: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From `serve`, `generate --local`, `bench` and `eval`, which all have `ModelFlags`."""
    asked: list[ModelFlags] = []
    app = typer.Typer()

    @app.command()
    @with_flags
    def command(models: ModelFlags) -> None:
        asked.append(models)

    # Nothing that is shared, so that nothing is said that was not asked for.
    devices = ["--device", "cuda:0", "--draft-device", "cuda:1"]
    typed = ["--model", "m", "--draft-model", "d", *devices, *arguments]
    assert CliRunner().invoke(app, typed).exit_code == 0
    started: dict[str, list[str]] = {}

    class Launched:
        """What a stack does with a child before it is ready."""

        def __init__(self, name: str, *_: Any) -> None:
            self.name, self.pid, self.facts = name, 0, {}  # type: ignore[var-annotated]

        def run(self, module: str, flags: list[str], environment: dict[str, str]) -> None:
            started[self.name] = flags
            if len(started) == 2:
                raise _Started

        def send(self, number: int) -> None: ...

    async def launch(*of: Any) -> Any:
        return Launched(*of)

    monkeypatch.setattr(Child, "launch", launch)
    monkeypatch.setattr("flyspec.cli.stack.check_services", lambda flags: None)  # no such models
    with pytest.raises(_Started):
        await Stack(StackOptions(**vars(asked[0])))._start()
    for name, kind, expected in (
        ("verify", VerifySettings, verify),
        ("draft", DraftSettings, draft),
    ):
        settings = from_command_line(kind, name, started[name])
        for field in (
            "max_model_len", "kv_cache_memory_bytes", "block_size", "gpu_memory_utilization",
        ):  # fmt: skip
            default = kind.model_fields[field].default
            assert getattr(settings, field) == expected.get(field, default)


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ({}, (0.7, 0.2)),
        ({"device": "cuda", "draft_device": "cuda:0"}, (0.7, 0.2)),
        ({"device": "cuda", "tensor_parallel_size": 4, "draft_device": "cuda:3"}, (0.7, 0.2)),
        ({"device": "cuda", "tensor_parallel_size": 4, "draft_device": "cuda:4"}, (None, None)),
        ({"device": "cuda:0", "draft_device": "cuda:1"}, (None, None)),
        ({"draft_device": "cpu"}, (None, None)),
        ({"device": "cpu"}, (None, None)),
        ({"draft_model": ""}, (None, None)),
        ({"gpu_memory_utilization": 0.4}, (0.4, 0.2)),
        ({"draft_gpu_memory_utilization": 0.4}, (0.7, 0.4)),
    ],
)
def test_a_gpu_that_both_models_have_is_shared(
    given: dict[str, Any], shares: tuple[float | None, float | None]
) -> None:
    options = StackOptions(**{"model": "m", "draft_model": "d", **given}).resolved()
    assert (options.gpu_memory_utilization, options.draft_gpu_memory_utilization) == shares


@pytest.mark.parametrize("command", ["", "pair"])
def test_help_fits_80_columns_with_names_in_full(command: str) -> None:
    arguments = ["bench", *filter(None, [command]), "--help"]
    lines = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments).output.splitlines()
    assert max(map(len, lines)) <= 80
    shown = " ".join(lines)
    assert "--tensor-parallel-size " in shown or "--num-speculative-tokens " in shown
    assert "…" not in shown

"""Every flag becomes part of the request to the server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flyspec.cli.conditions import with_phases
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack_options import StackOptions
from flyspec.client import GenerateOptions
from flyspec.config import DraftSettings, VerifySettings
from flyspec.rules import PARAMETERS, Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.settings_sources import from_command_line
from flyspec.values.phases import Phase
from flyspec.values.tokens import SamplingParams
from tests.contract.test_rule_table import a_value

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


FLAGS: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
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
    (["--random-judges-matches"], {"random_judges_matches": True}),
    (["--no-random-judges-matches"], {"random_judges_matches": False}),
    (["--guarded-token-id", "5", "--guarded-token-id", "4"], {"guarded_token_ids": (5, 4)}),
    *(
        ([f"--{name.replace('_', '-')}", parameter.show(a_value(parameter))],
         {name: a_value(parameter)})
        for name, parameter in PARAMETERS.items() if parameter.kind is not bool
    ),
]  # fmt: skip


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


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        *FLAGS,
        *((flags, {"sampling": SamplingParams(**fields)}) for flags, fields in SAMPLING),
        *((flags, {"rule": Rule(**{"name": "", **fields})}) for flags, fields in RULE),
    ],
)
def test_flags_reach_the_request(arguments: list[str], fields: dict[str, Any]) -> None:
    assert parse(*arguments)[0] == dataclasses.replace(DEFAULTS, **fields)


@pytest.mark.parametrize(
    ("table", "kind", "apart"),
    [
        # Ids are for programs, and so are the rounds of an earlier run; phases have the flags of
        # `flyspec.cli.phases`.
        (FLAGS, GenerateOptions, {
            "sampling", "rule", "phases", "request_id", "traceparent",
            "num_draft_tokens_per_round", "return_draft_distributions",
        }),
        (SAMPLING, SamplingParams, set()),
        (RULE, Rule, set()),
    ],
)  # fmt: skip
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


OF_SERVICES: list[tuple[list[str], dict[str, Any], dict[str, Any]]] = [
    ([], {}, {}),
    (["--max-model-len", "512"], {"max_model_len": 512}, {"max_model_len": 512}),
    (["--kv-cache-memory-bytes", "9000"], {"kv_cache_memory_bytes": 9000}, {}),
    (["--draft-kv-cache-memory-bytes", "9000"], {}, {"kv_cache_memory_bytes": 9000}),
    (["--block-size", "64"], {"block_size": 64}, {"block_size": 64}),
    (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}, {}),
    (["--draft-gpu-memory-utilization", "0.3"], {}, {"gpu_memory_utilization": 0.3}),
    (["--enforce-eager"], {"enforce_eager": True}, {"enforce_eager": True}),
    (["--batch-invariant"], {"batch_invariant": True}, {}),
]


@pytest.mark.parametrize(("arguments", "verify", "draft"), OF_SERVICES)
def test_flags_reach_the_services(
    arguments: list[str], verify: dict[str, Any], draft: dict[str, Any]
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
    options = StackOptions(**vars(asked[0])).resolved()
    for name, kind, expected in (
        ("verify", VerifySettings, verify),
        ("draft", DraftSettings, draft),
    ):
        settings = from_command_line(kind, name, options.flags(name))
        for field in {name for arguments in OF_SERVICES for name in arguments[1]}:
            if field not in kind.model_fields:
                continue
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

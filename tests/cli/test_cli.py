"""The command line as users run it: processes, exit codes, output. On tiny random models."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import termios
import tomllib
from collections.abc import AsyncIterator
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from flyspec.cli.render import visible
from flyspec.cli.service import ROOT
from flyspec.cli.stack import ServiceDiedError, Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import Client
from flyspec.drafter_names import DRAFTER_KINDS, NEED_DATASTORE
from flyspec.errors import ConfigError
from flyspec.rules.presets import DEFAULT_RULE
from tests.cli.processes import (
    COMMAND,
    ENVIRONMENT,
    FREE_PORTS,
    all_gone,
    invoke,
    start,
)
from tests.cli.terminal import Terminal

# --- without a server -----------------------------------------------------------------------


def test_without_the_laboratory_its_commands_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = tomllib.loads((ROOT / "lab/pyproject.toml").read_text())["project"]
    names = metadata["entry-points"]["flyspec.commands"]
    monkeypatch.setattr("flyspec.cli.main._entry_points", EntryPoints)
    listed = re.findall(r"^  (\w+) ", invoke("--help").out, re.MULTILINE)
    assert "generate" in listed
    assert not names.keys() & {*listed}
    for name in names:
        result = invoke(name, "--help")
        assert result.code == 2
        assert f"flyspec {name} is part of the laboratory; " in result.err
        assert "pip install '.[lab]' ./lab" in result.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "--address", "127.0.0.1:1", "x"], 1, "no server at 127.0.0.1:1; start one"),
        (["generate", "--local", "--address", "a:1", "x"], 2, "give only one of them"),
        (["generate", "--model", "m", "x"], 2, "only with --local"),
        (["generate", ""], 2, "prompt: is empty"),
        (["generate"], 2, "standard input: contains no prompts"),
        (["healthcheck", "--address", "127.0.0.1:1", "--timeout", "1"], 1, ""),
        (["drafters", "list", "--admin-address", "127.0.0.1:1"], 1, "or pass --admin-address"),
        (["eval", "--model", "/nowhere", "--problems", "1"], 2, "--model /nowhere: no such"),
        (["serve", "--max-sessions", "9999", *FREE_PORTS], 2, "--max-sessions 9999: must"),
        (["serve", "--rules-file", "/nowhere", *FREE_PORTS], 2, "--rules-file /nowhere: cannot be"),
        (["generate", "--rules-file", "f", "x"], 2, "--rules-file: only with --local"),
        (["generate", "--logit-bias", "x", "y"], 2, "--logit-bias 'x': must be a token id"),
        (["generate", "--max-tokens", "0", "x"], 2, "--max-tokens"),
        (["generate", "--logprobs", "2", "x"], 2, "--logprobs: only with --json"),
    ],
)
def test_errors_are_a_message_and_an_exit_code(
    arguments: list[str], code: int, message: str
) -> None:
    result = invoke(*arguments)
    assert result.code == code
    assert message in result.err
    if result.err.startswith("error"):
        assert result.err.count("\n") == 1


# --- against a running stack ----------------------------------------------------------------


def test_json_is_one_document_a_prompt_in_their_order(stack: Stack) -> None:
    result = invoke(
        "generate", "--address", stack.address, "--json", "--max-tokens", "6",
        "--num-speculative-tokens", "8", "--concurrency", "3",
        stdin="The cat\n\nthe dog\nthe log\nThe cat\n",
    )  # fmt: skip
    assert result.code == 0
    assert result.err == ""
    documents = result.documents
    assert len(documents) == 4
    for d in documents:  # times are in the messages, and their bytes counted
        del d["metrics"]["speculative_decoding"]["round_bytes"]
        assert 0 <= d.pop("seed") < 2**53  # drawn
        assert d.pop("timings")["total_ns"] > 0
    assert [d.pop("prompt_index") for d in documents] == [0, 1, 2, 3]
    # Logits may differ in their last bits with the rounds that share a step.
    costs = [d["metrics"]["speculative_decoding"].pop("rejected_cost_nats") for d in documents]
    assert costs[0] == pytest.approx(costs[3], rel=1e-5)
    assert documents[0] == documents[3] != documents[1]
    for d in documents:
        assert len(d["token_ids"]) == len(d["origins"]) <= 6
        assert d["finish_reason"] in ("stop", "length")
        assert set(d["metrics"]) == {"speculative_decoding"}


def test_rules_seeds_and_parameters_reach_the_server(stack: Stack) -> None:
    address = ["--address", stack.address, "--json", "--max-tokens", "8", "--ignore-eos"]
    sampled = [*address, "--temperature", "1", "--seed", "3", "the cat"]
    exact = invoke("generate", "--rule", "exact", *sampled)
    plain = invoke("generate", "--num-speculative-tokens", "0", *sampled)
    assert exact.documents[0]["token_ids"] == plain.documents[0]["token_ids"]
    assert set(plain.documents[0]["origins"]) == {"PLAIN"}
    bound = invoke(
        "generate", "--rule", "fly", "--fly-window-size", "0", "--fly-entropy-threshold", "0",
        "--max-loose-tokens", "1", "--num-speculative-tokens", "15", *address, "the cat",
    )  # fmt: skip
    assert bound.documents[0]["metrics"]["speculative_decoding"]["num_loose_tokens"] == 1


def test_phases_reach_the_server(stack: Stack) -> None:
    flags = ["--address", stack.address, "--max-tokens", "20", "--ignore-eos",
             "--num-speculative-tokens", "6", "--rule", "random", "--random-acceptance", "1",
             "--until", "a", "--then", "exact"]  # fmt: skip
    (document,) = invoke("generate", "--json", *flags, "the cat").documents
    first, second = document["phases"]
    assert (first["rule"]["name"], first["until"]) == ("random", ["a"])
    assert second["rule"] == {"name": "exact"}
    shown = invoke("generate", *flags, "the cat")
    assert "rule random until 'a', then exact" in shown.err


ROLLING_BACK = ["--rule", "margin", "--margin-threshold", "100", "--num-speculative-tokens", "1",
                "--ignore-eos", "--max-tokens", "20", "--no-loop-guard"]  # fmt: skip


def test_warnings_are_told_once_on_standard_error(stack: Stack) -> None:
    arguments = ["generate", "--address", stack.address, "--max-tokens", "4", "--rule", "margin",
                 "--margin-threshold", "0.4"]  # fmt: skip
    for prompts, more in ((["a"], []), (["a"], ["--json"]), (["a", "b"], ["--json"])):
        result = invoke(*arguments, *more, *prompts)
        assert result.err.count("warning: rule.margin_threshold 0.4 is above 0.3") == 1
        assert "warning" not in result.out.replace('"warnings"', "")


def test_eager_text_is_the_same_in_the_end(stack: Stack) -> None:
    arguments = ["generate", "--address", stack.address, *ROLLING_BACK, "the cat"]
    held_back = invoke(*arguments, "--json").documents[0]
    eager = invoke(*arguments, "--json", "--eager").documents[0]
    assert held_back["metrics"]["speculative_decoding"]["num_rollbacks"] > 0
    for name in ("text", "token_ids", "origins", "loose_gaps_nats"):
        assert eager[name] == held_back[name]
    piped = invoke(*arguments, "--eager")
    assert piped.out == held_back["text"] + "\n"


def test_eager_text_is_redrawn_on_a_terminal(stack: Stack) -> None:
    arguments = ["generate", "--address", stack.address, *ROLLING_BACK, "the cat"]
    document = invoke(*arguments, "--json").documents[0]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (100, 30))
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--eager", "--color", "never"], stdin=subprocess.DEVNULL,
        stdout=theirs, stderr=subprocess.DEVNULL, cwd=ROOT,
        env={k: v for k, v in ENVIRONMENT.items() if k != "COLUMNS"},
    )  # fmt: skip
    os.close(theirs)
    written = read_all(ours)
    assert process.wait() == 0
    assert "\x1b[J" in written  # something was taken back
    terminal, plain = Terminal(30), Terminal(30)
    terminal.write(written.replace("\r\n", "\n"))
    plain.write(visible(document["text"]) + "\n")
    assert terminal.state == plain.state


def read_all(descriptor: int) -> str:
    """Everything sent to a terminal until the other side closes it."""
    data = b""
    try:
        while block := os.read(descriptor, 65536):
            data += block
    except OSError:  # what Linux says of a terminal that was closed
        pass
    os.close(descriptor)
    return data.decode()


def test_streamed_text_is_all_of_standard_output(stack: Stack) -> None:
    arguments = ["generate", "--address", stack.address, "--max-tokens", "8"]
    arguments += ["--num-speculative-tokens", "15", "the cat"]
    shown, documents = invoke(*arguments), invoke(*arguments, "--json")
    assert shown.out == documents.documents[0]["text"] + "\n"
    assert "tokens per step" in shown.err
    assert shown.err.count("\n") == 1
    colored = invoke(*arguments, "--color", "always")
    assert "loosely accepted" in colored.err
    assert "\x1b[" in colored.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "nothing"], "rule.name must be one of exact, fly"),
        (["--drafter", "nothing"], "no drafter 'nothing'"),
        (["--seed", str(1 << 70)], f"seed must be an integer between 0 and {2**64 - 1}, got 1180"),
        (["--logit-bias=-1=2"], "sampling.logit_bias: token id -1 is out of range; ids are 0 to"),
        (["--json", "--logprobs", "21"], "logprobs must be an integer between 0 and 20, got 21"),
        (["--min-p", "nan"], "sampling.min_p must be between 0 and 1, got nan"),
        (["--rule", "fly", "--margin-threshold", "1"], "does not apply to the rule 'fly'"),
        (["--max-loose-cost-nats", "inf"], "max_loose_cost_nats must be finite"),
    ],
)
def test_what_the_server_refuses(stack: Stack, arguments: list[str], message: str) -> None:
    result = invoke("generate", "--address", stack.address, "--max-tokens", "8", *arguments, "x")
    assert result.code == 2
    assert message in result.err
    assert result.err.startswith("error: ")


def test_one_bad_prompt_of_many_is_named(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("fine\n" + "too long " * 400 + "\nalso fine\n")
    arguments = ("generate", "--address", stack.address, "--max-tokens", "4", "--prompt-file")
    result = invoke(*arguments, str(path))
    assert result.code == 2
    assert f"error: {path}: line 2: prompt: " in result.err
    assert "error: 1 of 3 prompts could not be answered" in result.err
    assert ("--- 1/3 ---" in result.out, "--- 3/3 ---" in result.out) == (True, True)
    first, bad, last = invoke(*arguments, str(path), "--json").documents
    assert [d["prompt_index"] for d in (first, bad, last)] == [0, 1, 2]
    assert len(first["token_ids"]) == len(last["token_ids"]) == 4
    assert bad["error"]["status"] == "INVALID_ARGUMENT"
    assert bad["error"]["message"].startswith("prompt: ")
    path.write_text("too long " * 400)
    alone = invoke(*arguments, str(path), "--json")
    assert alone.code == 2
    assert alone.documents[0]["error"]["status"] == "INVALID_ARGUMENT"


def test_prompts_of_all_kinds(stack: Stack, tmp_path: Path) -> None:
    rows, raw = tmp_path / "rows.jsonl", tmp_path / "raw"
    said = [{"role": "user", "content": "Hi"}]
    rows.write_text(json.dumps({"messages": said}) + "\n" + json.dumps({"text": "the\ncat"}))
    raw.write_text("the\n\ncat\n")
    arguments = ["generate", "--address", stack.address, "--json", "--max-tokens", "2"]
    result = invoke(*arguments, "--prompt-file", str(rows), "--file", str(raw))
    chat, text, file = (d["prompt_token_ids"] for d in result.documents)
    assert chat == invoke(*arguments, "--chat", "Hi").documents[0]["prompt_token_ids"]
    assert text == invoke(*arguments, "the\ncat").documents[0]["prompt_token_ids"]
    assert file == invoke(*arguments, "the\n\ncat\n").documents[0]["prompt_token_ids"]
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"messages": said, "tools": "none"}) + "\nfine")
    assert invoke(*arguments, "--prompt-file", str(broken)).code == 2


def test_healthcheck_and_drafters(stack: Stack) -> None:
    health = invoke(
        "healthcheck", "--address", stack.address, "--admin-address", stack.admin_address, "--json"
    )
    assert health.code == 0
    assert health.documents[0]["status"] == "SERVING"
    assert health.documents[0]["orchestrator"]["active_generations"] == 0
    for address in (stack.options.draft_address, stack.options.verify_address):
        assert invoke("healthcheck", "--address", address).code == 0
    drafters = invoke("drafters", "list", "--admin-address", stack.admin_address, "--json")
    names = [d["name"] for d in drafters.documents[0]["drafters"]]
    first = drafters.documents[0]["drafters"][0]
    assert (first["active"], first["state"]) == (True, "ACTIVE")
    assert first["address"] == ",".join(replica["address"] for replica in first["replicas"])
    assert set(names) == set(DRAFTER_KINDS) - NEED_DATASTORE


@pytest.mark.slow
def test_bench(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "questions"
    said = {"messages": [{"role": "user", "content": "the cat"}]}
    edit = {**said, "prediction": {"type": "content", "content": "the cat sat"}}
    path.write_text(f"{json.dumps(edit)}\n" * 2)
    bench = ["bench", "--address", stack.address, "--model", stack.options.model,
             "--prompt-file", str(path)]  # fmt: skip
    result = invoke(
        *bench, "--repeats", "1", "--max-tokens", "6", "--num-speculative-tokens", "4",
        "--peers", "greedy", "--json", "--random-prompts", "1", "--rules", "plain,exact,fly",
        "--prediction",
    )  # fmt: skip
    assert result.code == 0, result.err
    (document,) = result.documents
    assert list(document["groups"]) == ["questions", "random tokens"]
    modes = {m["mode"]: m for m in document["groups"]["questions"]}
    assert list(modes) == [
        "plain", "transformers", "plain again", "exact", "exact, prediction", "fly",
        "fly, prediction",
    ]  # fmt: skip
    for mode in ("exact", "exact, prediction"):
        assert modes[mode]["same_as_plain"] == modes[mode]["prompts"] == 2
    assert modes["plain"]["ratios"]["plain"]["median"] == 1.0
    assert set(modes["fly"]["ratios"]) == {"plain", "transformers"}
    assert modes["fly"]["first_token_ms"] > 0
    assert document["machine"]["cores"] > 0
    assert "samples" not in document
    refused = invoke(*bench, "--peers", "assisted")
    assert refused.code == 2
    assert "which a running stack does not tell" in refused.err


def test_the_legend_needs_a_server() -> None:
    result = invoke("generate", "--address", "127.0.0.1:1", "--color", "always", "One cat")
    assert result.code == 1
    assert "loosely accepted" not in result.err


# --- stacks of their own --------------------------------------------------------------------


RULES = (
    "[rules.careful]\npreset = 'margin'\nmargin_threshold = 0.1\n"
    "[limits]\nallowed_rules = ['exact', 'margin', 'careful']\nmax_margin_threshold = 0.2\n"
    "max_loose_tokens = 0\n"
)


@pytest.fixture(scope="module")
def rules_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rules") / "rules.toml"
    path.write_text(RULES)
    return str(path)


@pytest.fixture(scope="module")
async def limited(models: list[str], rules_file: str) -> AsyncIterator[Stack]:
    """A stack without a draft model, and with a rules file."""
    options = StackOptions(model=models[1], draft_model="", rules_file=rules_file, rule="careful")
    async with Stack(options) as stack:
        yield stack


def test_a_rules_file_names_rules_and_limits_requests(
    models: list[str], rules_file: str, limited: Stack
) -> None:
    refused = invoke("serve", *models, *FREE_PORTS, "--rules-file", rules_file)
    assert refused.code == 2
    assert f"--rule {DEFAULT_RULE}: rule.name must be one of exact, margin, careful" in refused.err
    assert "loading" not in refused.err
    with Client(limited.address, max_retries=0) as client:
        assert client.list_models().rules == ("careful", "exact", "margin")
    generate = ["generate", "--address", limited.address, "--max-tokens", "4", "--ignore-eos", "x"]
    result = invoke(*generate)
    assert result.code == 0
    assert "rule margin" in result.err
    for flags, said in (
        (["--rule", "margin", "--margin-threshold", "0.3"], "rule.margin_threshold must be at most "
         "0.2 on this server"),
        (["--rule", "fly"], "rule.name must be one of exact, margin, careful on this server"),
        (["--max-loose-tokens", "1"],
         "speculation.max_loose_tokens must be between 0 and 0 on this server"),
    ):  # fmt: skip
        result = invoke(*generate, *flags)
        assert result.code == 2
        assert f"error: {said}" in result.err


async def test_guard_raises_why_a_service_died(limited: Stack) -> None:
    assert limited.options.draft_model == ""

    async def kill_and_wait() -> None:
        os.kill(limited.services["draft"].pid, signal.SIGKILL)
        await asyncio.sleep(60)

    with pytest.raises(ServiceDiedError, match=r"ended with signal SIGKILL \(out of memory"):
        await limited.guard(kill_and_wait())


@pytest.mark.slow
async def test_services_end_when_serve_is_killed(models: list[str]) -> None:
    process = await start("serve", *models[:2], *FREE_PORTS, "--draft-model", "", "--json")
    assert process.stdout is not None
    facts = json.loads(await process.stdout.readline())
    process.kill()
    await process.wait()
    assert await all_gone(list(facts["pids"].values()))


async def test_stack_stops_everything_when_one_cannot_start(models: list[str]) -> None:
    stack = Stack(StackOptions(model=models[1], draft_model="/nowhere"))
    with pytest.raises(ConfigError, match="--draft-model /nowhere"):
        await stack.__aenter__()
    assert await all_gone([s.pid for s in stack.services.values()])


def test_local_generation_on_the_bundled_pair() -> None:
    result = invoke(
        "generate", "--local", "--json", "--chat", "--rule", "exact",
        "Tom has 3 apples and buys 4 more. How many apples does he have?",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "####" in result.documents[0]["text"]
    assert result.documents[0]["finish_reason"] == "stop"

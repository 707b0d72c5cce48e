"""Draft models that join a stack that runs: usable by name, watched, and gone afterwards."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from flyspec.cli.service import ServiceDiedError
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient, GenerateOptions
from flyspec.errors import ConfigError
from flyspec.rules import Rule
from flyspec_lab.commands.other_models import drafters_of, read_drafts, with_added_drafters
from flyspec_lab.run_directory import fingerprints
from tests.cli.processes import all_gone, invoke
from tests.tiny import make_model

pytestmark = pytest.mark.slow
OTHER_TEXT = "Sphinx of black quartz, judge my vow; pack my box with five dozen liquor jugs. "


def own(models: list[str]) -> Stack:
    return Stack(StackOptions(model=models[1], draft_model=models[3]))


async def nothing() -> None:
    raise AssertionError("it was not to begin")


def test_drafts_are_read() -> None:
    assert read_drafts(["a=b", "c=d=e"]) == (("a", "b"), ("c", "d=e"))
    for wrong in ("small", "=x", "x="):
        with pytest.raises(ValueError, match="must be NAME=MODEL"):
            read_drafts([wrong])
    with pytest.raises(ValueError, match="'a' is there twice"):
        read_drafts(["a=b", "a=c"])


def test_a_running_stack_gets_none_from_this_command() -> None:
    done = invoke("eval", "--address", "127.0.0.1:1", "--draft", "a=b")
    assert done.code == 2
    assert "`flyspec drafters register` adds a draft model" in done.err


@pytest.mark.slow
async def test_they_draft_until_one_ends_which_ends_the_work(models: list[str], tmp_path) -> None:
    foreign = make_model(tmp_path / "foreign", seed=5, text=OTHER_TEXT)
    drafts = (("twin", models[1]), ("foreign", str(foreign)))
    options = GenerateOptions(rule=Rule("exact"), num_speculative_tokens=4, max_tokens=12)
    pids: list[int] = []

    async def use(stack: Stack) -> None:
        drafters = {d.name: d for d in await drafters_of(stack)}
        assert not drafters["twin"].translated
        assert drafters["foreign"].translated
        known = fingerprints(list(drafters.values()))
        assert len({known[name] for name in ("model", "twin", "foreign")}) == 3
        async with AsyncClient(stack.address) as client:
            found = [
                await client.complete([5, 6, 7], replace(options, drafter=drafter))
                for drafter in ("twin", "foreign", "")
            ]
            assert [g.started.drafter for g in found[:2]] == ["twin", "foreign"]
            assert found[0].token_ids == found[1].token_ids == found[2].token_ids
            assert found[0].completion.timings.judge_ns > 0
            pids.extend(s.pid for name, s in stack.services.items() if "model" in name)
            stack.services["draft model twin"].send(signal.SIGKILL)
            while True:
                await client.complete([5, 6, 7], options)

    async with own(models) as stack:
        with pytest.raises(ServiceDiedError, match="ended with signal SIGKILL"):
            await with_added_drafters(stack, drafts, use(stack))
    assert len(pids) == 2
    assert await all_gone(pids)


@pytest.mark.parametrize(
    ("name", "model", "said"),
    [
        ("model", "{draft}", "--draft model=.*: the stack has a drafter 'model'"),
        ("small", "/nowhere/at/all", "--draft small=/nowhere/at/all: "),
    ],
)
async def test_what_is_wrong_is_said(models: list[str], name, model, said) -> None:
    drafts = ((name, model.format(draft=models[3])),)
    async with own(models) as stack:
        with pytest.raises(ConfigError, match=said):
            await with_added_drafters(stack, drafts, nothing())

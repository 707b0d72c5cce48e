"""An orchestrator is ready once each drafter of its settings has drafted, or says which has not."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import pytest

from draft_service.service import DraftService
from flyspec.cli.serve import _welcome
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import GenerateOptions
from flyspec.rules import Rule
from flyspec.values.admin import BreakerState
from orchestrator.fleet import fleet
from tests.orchestrator.stacks import start_stack
from tests.waiting import until

EXACT = Rule("exact")
PROMPT = "The cat sat on the mat, and the dog sat"


@pytest.fixture
def silent(monkeypatch):
    """Calls of draft services that get no answer, by method, while there are any."""
    left = {"Describe": 0, "Draft": 0}

    def silenced(method):
        real = getattr(DraftService, method)

        async def answer(self, request, context):
            if left[method]:
                left[method] -= 1
                await asyncio.sleep(3600)
            return await real(self, request, context)

        return answer

    for method in left:
        monkeypatch.setattr(DraftService, method, silenced(method))
    return left


async def closed(stack):
    """The default drafter, if all sessions may use it."""
    (drafter, *_) = await stack.admin.list_drafters()
    (replica,) = drafter.replicas or (SimpleNamespace(breaker=None),)
    return replica.breaker is BreakerState.CLOSED and drafter


async def test_a_drafter_that_answered_late_once_needs_no_session_to_be_usable(model_dirs, silent):
    silent["Describe"] = 1
    async with start_stack(model_dirs, probe_timeout_s=0.5) as stack:
        assert silent["Describe"] == 0
        drafter = await until(lambda: closed(stack))
        assert (drafter.name, drafter.usable, drafter.stats.generations_total) == ("model", True, 0)


async def test_a_drafter_that_hangs_is_missing_until_it_drafts(
    model_dirs, greedy, silent, monkeypatch
):
    monkeypatch.setattr(fleet, "DRAFT_WAIT_S", 0.5)
    silent["Draft"] = 1_000_000
    nobody = "127.0.0.1:1"
    async with start_stack(model_dirs, draft_timeout_s=0.3, drafters=f"small={nobody}") as stack:
        missing = stack.orchestrator.missing
        assert list(missing) == ["draft service", "small"]
        assert "did not answer in time" in missing["draft service"]
        assert nobody in missing["small"]
        assert await stack.client.check_health() == "SERVING"
        options = GenerateOptions(rule=EXACT, max_tokens=8, ignore_eos=True)
        done = await stack.client.complete(PROMPT, options)
        assert done.token_ids == greedy(done.started.prompt_token_ids, 8)
        silent["Draft"] = 0
        await until(lambda: "draft service" not in missing)
        assert (await until(lambda: closed(stack))).name == "model"
        assert list(missing) == ["small"]


async def test_each_drafter_of_the_settings_has_drafted_when_it_is_ready(model_dirs):
    async with start_stack(model_dirs) as other:
        address = f"127.0.0.1:{other.draft_server.port}"
        async with start_stack(model_dirs, drafters=f"next={address}") as stack:
            assert stack.orchestrator.missing == {}
            drafters = {d.name: d for d in await stack.admin.list_drafters()}
            assert drafters["model"].usable
            assert drafters["next"].usable


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({}, ["flyspec is ready", "  generation  127.0.0.1:0"]),
        (
            {"draft service": "a:1 is being prepared", "small": "b:2 has not answered yet"},
            [
                "flyspec is ready without draft service, small",
                "  missing     draft service: a:1 is being prepared",
                "  missing     small: b:2 has not answered yet",
            ],
        ),
    ],
)
def test_the_line_that_says_ready_names_what_is_missing(missing, said):
    stack = Stack(StackOptions(model="target"))
    stack.services["orchestrator"] = SimpleNamespace(facts={"missing": missing})
    assert _welcome(stack).split("\n")[: len(said)] == said


@pytest.mark.parametrize(
    ("rule", "limits", "said"),
    [
        ("exact", "", "exact, lossless: the text is the target's own, token for token"),
        ("rejection", "", "rejection, lossless: the text has the target's distribution"),
        ("relaxed", "", "relaxed, not lossless: .*; --rule exact is"),
        ("careful", "allowed_rules = ['careful']", "careful, not lossless: .*; requests may name"),
    ],
)
def test_whether_the_default_rule_is_lossless_is_said(rule, limits, said, tmp_path):
    (rules := tmp_path / "rules.toml").write_text(
        f"[rules.careful]\npreset = 'fly'\n[limits]\n{limits}\n"
    )
    stack = Stack(StackOptions(model="target", rule=rule, rules_file=str(rules)))
    stack.services["orchestrator"] = SimpleNamespace(facts={})
    assert re.search(f"\n  rule +{said}", _welcome(stack))

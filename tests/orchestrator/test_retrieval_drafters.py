"""What drafters without a model need from the orchestrator: candidates, scopes, their tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flyspec.recent import PATIENCE, RARELY
from flyspec.security import ApiKey, Scope
from flyspec.values.admin import DrafterInfo
from flyspec.values.tokens import Origin
from orchestrator.fleet.drafter import RegisteredDrafter
from tests.orchestrator.scripted import MODEL, Drafter, request, run, script, scripted

KEYS = {name: ApiKey(name, frozenset({Scope.GENERATE})) for name in ("ann", "bob")}


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the draft service offers: here a drafter that learns."""

    def offer(*drafters: DrafterInfo) -> None:
        monkeypatch.setattr(Drafter, "offered", drafters)

    offer(DrafterInfo("guess", "token_recycling", num_top_tokens=2))
    return offer


async def test_a_drafter_hears_what_the_target_said_after_every_draft() -> None:
    async with scripted() as inside:
        await run(inside, request(max_tokens=30))
        rounds, asked = inside.targets["target:1"].sent, inside.drafters["drafter:1"].asked
    assert all(r.num_top_tokens == (2 if r.draft_token_ids else 0) for r in rounds)
    assert not asked[0][1].top_tokens
    for (before, _), (_, following) in pairwise(asked):
        (top,) = following.top_tokens
        context = list(top.context_token_ids)
        assert context[:2] == before[-2:]
        assert top.width == 2
        for row in range(len(context) - 1):
            assert top.token_ids[2 * row] == script([*before, *context[2 : row + 2]])
    assert len(asked) > 5


async def test_candidates_of_the_first_token_of_all_have_no_context() -> None:
    async with scripted() as inside:
        await run(inside, request([5], max_tokens=12))
        asked = inside.drafters["drafter:1"].asked
    assert [len(following.top_tokens) for _, following in asked[:3]] == [0, 0, 1]


async def test_a_drafter_that_learns_nothing_hears_nothing(offered: Any) -> None:
    offered(DrafterInfo("guess", "model", MODEL))
    async with scripted() as inside:
        await run(inside, request(max_tokens=12))
        assert not any(r.num_top_tokens for r in inside.targets["target:1"].sent)
        assert not any(r.top_tokens for _, r in inside.drafters["drafter:1"].asked)


@pytest.mark.parametrize("sharing", ["none", "key"])
async def test_scopes_are_those_of_api_keys(sharing: str) -> None:
    async with scripted(draft_sharing=sharing) as inside:
        for key in ("", "ann", "bob", "ann"):
            await run(inside, request(max_tokens=2), key=KEYS.get(key))
        nobody, ann, bob, again = inside.drafters["drafter:1"].scopes
    assert nobody == ""
    assert ann == again
    assert bool(ann) == (ann != bob) == (sharing == "key")
    assert "ann" not in ann


async def test_a_datastore_of_another_tokenizer_is_left_out(
    offered: Any, caplog: pytest.LogCaptureFixture
) -> None:
    offered(
        DrafterInfo("rest", "rest", tokenizer_fingerprint="another"),
        DrafterInfo("own", "rest", tokenizer_fingerprint=MODEL.tokenizer_fingerprint),
    )
    async with scripted() as inside:
        assert [d.name for d in inside.fleet.drafters.all] == ["own", "prompt_lookup"]
    assert "drafter rest is left out: its datastore is of another tokenizer" in caplog.text


def test_a_drafter_that_only_uses_its_model_is_told_of_fewer_rounds() -> None:
    pool = SimpleNamespace(replicas=[SimpleNamespace(info=SimpleNamespace(
        drafters=[DrafterInfo("composed", "composed", MODEL, num_top_tokens=8)]
    ))])  # fmt: skip
    drafter = RegisteredDrafter("composed", "composed", cast(Any, pool))
    drawn, found = [Origin.EXACT_MODEL] * 5, [Origin.EXACT_LOOKUP, Origin.EXACT_MODEL]
    told = [drafter.num_top_tokens(drawn) for _ in range(PATIENCE + 4 * RARELY)]
    assert told[:PATIENCE] == [8] * PATIENCE
    assert told[PATIENCE:].count(8) == 4
    assert drafter.num_top_tokens(found) == 8
    assert [drafter.num_top_tokens(drawn) for _ in range(PATIENCE)] == [8] * PATIENCE

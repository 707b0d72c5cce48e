"""What drafters without a model need from the orchestrator: candidates, scopes, their tokenizer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flyspec.patience import PATIENCE, RARELY
from flyspec.security import ApiKey, Scope
from flyspec.values.admin import DrafterInfo, DraftServiceInfo, SessionStatus
from flyspec.values.tokens import Origin
from orchestrator.fleet.drafter import RegisteredDrafter
from orchestrator.fleet.fleet import Fleet
from tests.orchestrator.scripted import (
    MODEL,
    Drafter,
    DrafterSession,
    TargetSession,
    request,
    run,
    script,
    scripted,
)

KEYS = {name: ApiKey(name, frozenset({Scope.GENERATE})) for name in ("ann", "bob")}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What the drafter hears: scopes of sessions, tokens and candidates of requests."""
    heard: dict[str, list[Any]] = {"scopes": [], "sequences": [], "top": [], "asked": []}
    offered = [DrafterInfo("guess", "token_recycling", num_top_tokens=2)]

    async def describe(self: Drafter, timeout_s: float = 1.0) -> DraftServiceInfo:
        return DraftServiceInfo(tuple(offered), SessionStatus(0, 16), 64)

    def open_(self: Drafter, opening: Any, metrics: Any, correlation: Any = None) -> Any:
        heard["scopes"].append(opening.sharing_scope)
        return DrafterSession(self)

    propose = DrafterSession.propose

    async def proposing(self: Any, token_ids: Any, request: Any, timeout_s: float) -> Any:
        heard["sequences"].append(list(token_ids))
        heard["top"].append(list(request.top_tokens))
        return await propose(self, token_ids, request, timeout_s)

    read = TargetSession.read

    async def reading(self: Any, round_id: int) -> Any:
        round_ = self.round
        heard["asked"].append((len(round_.draft_token_ids), round_.num_top_tokens))
        before = list(self.tokens)
        verdict = await read(self, round_id)
        rows = [[*before, *round_.draft_token_ids[:i]] for i in range(len(round_.draft_token_ids))]
        rows.append([*before, *round_.draft_token_ids])
        top = [token for row in rows for token in (script(row), script(row) + 1)]
        return replace(verdict, top_token_ids=tuple(top) if round_.num_top_tokens else ())

    connect = Fleet.connect

    async def connecting(self: Fleet) -> None:
        await connect(self)
        for heard_in_trials in ("scopes", "sequences", "top"):
            heard[heard_in_trials].clear()

    heard["offered"] = offered
    monkeypatch.setattr(Fleet, "connect", connecting)
    monkeypatch.setattr(Drafter, "describe", describe)
    monkeypatch.setattr(Drafter, "open", open_)
    monkeypatch.setattr(DrafterSession, "propose", proposing)
    monkeypatch.setattr(TargetSession, "read", reading)
    return heard


async def test_a_drafter_hears_what_the_target_said_after_every_draft(
    told: dict[str, list[Any]],
) -> None:
    async with scripted() as inside:
        await run(inside, request(max_tokens=30))
    assert all(width == (2 if drafts else 0) for drafts, width in told["asked"])
    assert told["top"][0] == []
    sequences = told["sequences"]
    for before, (top,) in zip(sequences, told["top"][1:], strict=False):
        context = list(top.context_token_ids)
        assert context[:2] == before[-2:]
        assert top.width == 2
        for row in range(len(context) - 1):
            assert top.token_ids[2 * row] == script([*before, *context[2 : row + 2]])
    assert len(sequences) > 5


async def test_candidates_of_the_first_token_of_all_have_no_context(
    told: dict[str, list[Any]],
) -> None:
    async with scripted() as inside:
        await run(inside, request([5], max_tokens=12))
    assert [len(top) for top in told["top"][:3]] == [0, 0, 1]


async def test_a_drafter_that_learns_nothing_hears_nothing(told: dict[str, list[Any]]) -> None:
    told["offered"][:] = [DrafterInfo("guess", "model", MODEL)]
    async with scripted() as inside:
        await run(inside, request(max_tokens=12))
    assert not any(told["top"])
    assert not any(width for _, width in told["asked"])


@pytest.mark.parametrize("sharing", ["none", "key"])
async def test_scopes_are_those_of_api_keys(told: dict[str, list[Any]], sharing: str) -> None:
    async with scripted(draft_sharing=sharing) as inside:
        for key in ("", "ann", "bob", "ann"):
            await run(inside, request(max_tokens=2), key=KEYS.get(key))
    nobody, ann, bob, again = told["scopes"]
    assert nobody == ""
    assert ann == again
    assert bool(ann) == (ann != bob) == (sharing == "key")
    assert "ann" not in ann


async def test_a_datastore_of_another_tokenizer_is_left_out(
    told: dict[str, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    told["offered"][:] = [
        DrafterInfo("rest", "rest", tokenizer_fingerprint="another"),
        DrafterInfo("own", "rest", tokenizer_fingerprint=MODEL.tokenizer_fingerprint),
    ]
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

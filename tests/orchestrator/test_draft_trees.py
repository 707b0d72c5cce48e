"""Trees of drafts in a generation: who is asked for them, what is judged, what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flyspec.draft_trees import children, main_path, paths
from flyspec.errors import InvalidArgumentError
from flyspec.prefix import num_same
from flyspec.values.admin import DrafterInfo, VerifyServiceInfo
from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import Origin, SamplingParams
from orchestrator.upstreams.proposal_checks import Answer, DrafterFaultError, DraftFault
from tests.orchestrator.scripted import (
    Drafter,
    DrafterSession,
    Target,
    TargetSession,
    expected,
    request,
    run,
    script,
    scripted,
)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A drafter whose second choices are right, and targets that take trees."""
    heard: dict[str, Any] = {"asked": [], "rounds": [], "takes_trees": True}
    describe = Target.describe

    async def describe_target(self: Target, timeout_s: float = 1.0) -> VerifyServiceInfo:
        return replace(await describe(self, timeout_s), takes_trees=heard["takes_trees"])

    offered = DrafterInfo("guess", "composed", num_top_tokens=1, makes_trees=True)

    async def proposing(self: Any, token_ids: Any, request: Any, timeout_s: float) -> DraftChunk:
        self.begin()
        await self.service.answer()
        heard["asked"].append((request.max_tokens, request.max_tree_tokens))
        tokens, drafts, parents, row = list(token_ids), list[int](), list[int](), 0
        while request.max_tree_tokens and len(drafts) + 2 <= request.max_tree_tokens:
            right = script(tokens)
            wrong_first = len(tokens) % 2
            drafts += [4, right] if wrong_first else [right, 4]
            parents += [row, row]
            row = len(drafts) - (0 if wrong_first else 1)
            tokens.append(right)
        drafts = drafts or [script(tokens)][: request.max_tokens]
        origins = [Origin.EXACT_MODEL] * len(drafts)
        return DraftChunk(token_ids=drafts, origins=origins, parents=parents)

    async def sending(self: Any, sequence: Any, round_: Any, distributions: Any) -> None:
        self.begin()
        heard["rounds"].append(round_)
        self.tokens, self.tree = list(sequence.tokens), round_
        self.path: tuple[int, ...] = ()
        if round_.draft_parents:
            following, row, path = children(round_.draft_parents), 0, list[int]()
            while branches := following[row]:
                own = script([*self.tokens, *(round_.draft_token_ids[i] for i in path)])
                right = [i for i in branches if round_.draft_token_ids[i] == own]
                path.append((right or branches)[0])
                row = path[-1] + 1
            self.path, round_ = tuple(path), round_.along(path)
        self.round = round_

    read = TargetSession.read

    async def reading(self: Any, round_id: int) -> Any:
        verdict = await read(self, round_id)
        tree = self.tree
        top: list[int] = []
        if tree.num_top_tokens:
            top = [9] * (len(tree.draft_token_ids) + 1)
        return replace(verdict, path=self.path, top_token_ids=tuple(top))

    monkeypatch.setattr(Target, "describe", describe_target)
    monkeypatch.setattr(Drafter, "offered", (offered,))
    monkeypatch.setattr(DrafterSession, "propose", proposing)
    monkeypatch.setattr(TargetSession, "send", sending)
    monkeypatch.setattr(TargetSession, "read", reading)
    return heard


ASKED = request(max_tokens=40)


async def test_a_path_of_each_tree_becomes_text(services: dict[str, Any]) -> None:
    async with scripted(draft_trees="on", num_speculative_tokens=6) as inside:
        found = await run(inside, ASKED)
        assert not any(inside.left)
    assert found.tokens == expected(40)
    assert (6, 6) in services["asked"]
    trees = [round_ for round_ in services["rounds"] if round_.draft_parents]
    assert trees
    assert all(round_.draft_survivals == () for round_ in trees)
    metrics = found.completion.speculation
    # All drafts that the target read count; half of them are second choices.
    assert metrics.num_draft_tokens >= sum(len(round_.draft_token_ids) for round_ in trees)
    assert metrics.num_accepted_draft_tokens == pytest.approx(metrics.num_draft_tokens / 2, abs=3)
    assert metrics.num_rounds < 15
    assert max(found.completion.num_draft_tokens_per_round) == 6


@pytest.mark.parametrize(("takes_trees", "settings"), [(False, {"draft_trees": "on"}), (True, {})])
async def test_trees_are_asked_for_only_if_that_is_set_and_the_target_takes_them(
    services: dict[str, Any], takes_trees: bool, settings: dict[str, str]
) -> None:
    services["takes_trees"] = takes_trees
    async with scripted(num_speculative_tokens=6, **settings) as inside:
        found = await run(inside, ASKED)
    assert found.tokens == expected(40)
    assert not any(tree for _, tree in services["asked"])
    assert not any(round_.draft_parents for round_ in services["rounds"])


def answer_of(max_tokens: int, max_tree_tokens: int, *chunks: DraftChunk) -> DraftChunk:
    advance = DraftAdvance(1, 3, (), max_tokens, max_tree_tokens=max_tree_tokens)
    answer = Answer(advance, DraftOpen([1, 2, 3], SamplingParams(), 0), 3, 0)
    at = 3
    for chunk in chunks:
        origins = [Origin.EXACT_LOOKUP] * len(chunk.token_ids)
        answer.add(
            replace(
                chunk, round_id=1, keep_length=2, next_token_id=3, start_position=at,
                origins=origins,
            ),
            10**9,
        )  # fmt: skip
        at += len(chunk.token_ids)
    return answer.proposal


def test_trees_of_several_chunks_are_joined() -> None:
    one = DraftChunk(token_ids=[4, 5], parents=[0, 0], last=False)
    other = DraftChunk(token_ids=[6], parents=[2])
    found = answer_of(2, 4, one, other)
    assert (list(found.token_ids), list(found.parents)) == ([4, 5, 6], [0, 0, 2])
    assert found.along([1, 2]).token_ids == [5, 6]
    assert not found.along([1, 2]).parents


@pytest.mark.parametrize(
    ("size", "chunk", "fault", "message"),
    [
        (0, DraftChunk(token_ids=[4, 5], parents=[0, 0]), DraftFault.TREE, "not requested"),
        (4, DraftChunk(token_ids=[4, 5], parents=[0, 2]), DraftFault.TREE, "earlier draft"),
        (4, DraftChunk(token_ids=[4, 5], parents=[0]), DraftFault.TREE, "1 entries for 2"),
        (4, DraftChunk(token_ids=[4, 5, 6], parents=[0, 1, 2]), DraftFault.TOKENS, "3 tokens in"),
        (4, DraftChunk(token_ids=[4, 5, 6]), DraftFault.TOKENS, "3 tokens in a row"),
        (4, DraftChunk(token_ids=[4] * 5, parents=[0] * 5), DraftFault.TOKENS, "4 remaining"),
    ],
)
def test_bad_trees_are_faults(
    size: int, chunk: DraftChunk, fault: DraftFault, message: str
) -> None:
    with pytest.raises(DrafterFaultError, match=message) as caught:
        answer_of(2, size, chunk)
    assert caught.value.fault is fault
    assert not isinstance(caught.value, InvalidArgumentError)


def test_the_first_choices_are_a_path() -> None:
    parents = [0, 0, 1, 3, 1]
    assert main_path(parents) in paths(parents)
    assert num_same(main_path(parents), [0, 2, 3]) == 3

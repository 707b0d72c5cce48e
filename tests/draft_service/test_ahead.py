"""What a session drafts ahead of verdicts is what it would draft after them, and costs no slots."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from draft_service.loading import AHEAD_SLOTS
from flyspec import wire
from flyspec.values.rounds import DraftAdvance, DraftAhead, DraftChunk
from flyspec.values.tokens import SamplingParams
from tests.draft_service.draft_harness import Client, Service, StartService, tokens_of
from tests.waiting import until

K = 5
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8)}


class AheadClient(Client):
    """A client that asks for proposals ahead, which are told apart from answers."""

    def __init__(self, stub: object, held: int) -> None:
        super().__init__(stub)
        self.held, self.round_id = held, 0

    async def ask(
        self, keep: int, append: Sequence[int], max_tokens: int, ahead: DraftAhead | None
    ) -> list[int]:
        self.round_id += 1
        advance = DraftAdvance(self.round_id, keep, append, max_tokens, ahead=ahead)
        await self.call.write(wire.encode(advance))
        chunks: list[DraftChunk] = []
        while not chunks or not chunks[-1].last:
            chunk = await self.read()
            if not chunk.ahead:
                chunks.append(chunk)
        return tokens_of(chunks)

    async def pushed(self, count: int) -> list[DraftChunk]:
        """Return the next proposals made ahead, however long they take."""
        found = []
        while len(found) < count:
            chunk = await self.read()
            assert chunk.ahead
            assert chunk.last
            assert chunk.round_id == self.round_id
            found.append(chunk)
        return found


async def fresh(service: Service, tokens: Sequence[int], sampling: SamplingParams) -> list[int]:
    client = await service.client().open(tokens, sampling, prompt_length=8)
    found = tokens_of(await client.advance(len(tokens), max_tokens=K))
    client.call.cancel()
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("drafter", ["model", "multi_level"])
async def test_random_verdicts(
    service: Service, prompt: list[int], drafter: str, sampling: SamplingParams
) -> None:
    rng = random.Random(drafter)
    tokens = prompt[:8]
    client = AheadClient(service.stub, len(tokens))
    await client.open(tokens, sampling, drafter=drafter)
    keep, append, confirmed, num_pushed = len(tokens), [], None, 0
    for _ in range(12):
        count = rng.choice([1, 2, 4])
        if confirmed is None:
            drafts = await client.ask(keep, append, K, DraftAhead(count, K))
            assert drafts == await fresh(service, tokens, sampling)
        else:
            drafts = confirmed
            ahead = DraftAhead(count, K, len(drafts))
            assert await client.ask(keep, [*append, *drafts], 0, ahead) == []
        pushed = await client.pushed(rng.randrange(1, count + 1)) if rng.random() < 0.7 else []
        num_pushed += len(pushed)
        for each in pushed:
            assert len(tokens) <= each.keep_length <= len(tokens) + len(drafts)
            before = [*tokens, *drafts][: each.keep_length]
            assert each.token_ids == await fresh(service, [*before, each.next_token_id], sampling)
        verdict = rng.choice(pushed) if pushed and rng.random() < 0.7 else None
        if verdict is not None:
            keep, append = verdict.keep_length, [verdict.next_token_id]
        else:
            keep, append = len(tokens) + rng.randrange(len(drafts) + 1), [rng.randrange(1, 90)]
        confirmed = None
        if verdict is not None and rng.random() < 0.5:
            confirmed = list(verdict.token_ids)
        tokens = [*[*tokens, *drafts][:keep], *append]
    assert num_pushed > 5
    client.call.cancel()


async def test_slots_come_back(service_with: StartService, prompt: list[int]) -> None:
    async with service_with(max_sessions=2) as own:
        assert own.sessions.cache is not None
        clients = []
        for _ in range(2):
            client = AheadClient(own.stub, 8)
            await client.open(prompt[:8])
            await client.ask(8, [], K, DraftAhead(8, K))
            clients.append(client)
        # One goes away in the middle; the other's next request ends what it drafts ahead.
        clients[0].call.cancel()
        await clients[1].ask(8, [7], K, None)
        await until(lambda: own.sessions.cache.num_free == 1 + AHEAD_SLOTS)
        clients[1].call.cancel()
        await until(lambda: own.sessions.cache.num_free == 2 + AHEAD_SLOTS)


async def test_branches_leave_slots_to_sessions(
    service_with: StartService, prompt: list[int]
) -> None:
    async with service_with(max_sessions=2) as own:
        greedy = [AheadClient(own.stub, 8) for _ in range(2)]
        for client in greedy:
            await client.open(prompt[:8])
            await client.ask(8, [], K, DraftAhead(8, K))
        # Without a free slot a session's first proposal would fail.
        for client in greedy:
            await client.ask(8, [9], K, DraftAhead(8, K))
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("advance", "said"),
    [
        (DraftAdvance(1, 8, [], 4, ahead=DraftAhead(9, 4)), "makes at most 8"),
        (DraftAdvance(1, 8, [], 4, ahead=DraftAhead(1, 4000)), "ahead.max_tokens is 4000"),
        (DraftAdvance(1, 8, [5], 0, ahead=DraftAhead(1, 4, 2)), "1 tokens are appended"),
        (DraftAdvance(1, 8, [5], 4, ahead=DraftAhead(1, 4, 1)), "set advance.max_tokens to 0"),
    ],
)
async def test_what_cannot_be_asked_for(
    service: Service, prompt: list[int], advance: DraftAdvance, said: str
) -> None:
    client = await service.client().open(prompt[:8])
    await client.call.write(wire.encode(advance))
    code, details = await client.status()
    assert code.name == "INVALID_ARGUMENT"
    assert said in details


async def test_lookup_drafts_nothing_ahead(service: Service, prompt: list[int]) -> None:
    client = await service.client().open(prompt[:8], drafter="prompt_lookup")
    await client.call.write(wire.encode(DraftAdvance(1, 8, [], 4, ahead=DraftAhead(1, 4))))
    code, details = await client.status()
    assert code.name == "INVALID_ARGUMENT"
    assert "prompt_lookup makes at most 0" in details


async def test_lookup_may_be_asked_for_nothing_ahead(service: Service, prompt: list[int]) -> None:
    client = AheadClient(service.stub, 8)
    await client.open(prompt[:8], drafter="prompt_lookup")
    for _ in range(2):
        await client.ask(8, [], 4, DraftAhead(0, 4))
    client.call.cancel()

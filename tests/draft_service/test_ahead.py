"""Drafts ahead of verdicts are those that would follow them, and cost no slots."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from draft_service import proposal
from draft_service.loading import AHEAD_SLOTS
from flyspec import wire
from flyspec.values.rounds import DraftAdvance, DraftAhead, DraftChunk
from flyspec.values.tokens import SamplingParams
from tests.draft_service.draft_harness import Client, tokens_of
from tests.waiting import until

K = 5


class AheadClient(Client):
    """A client that asks for proposals ahead, which are told apart from answers."""

    def __init__(self, stub, held):
        super().__init__(stub)
        self.held, self.round_id = held, 0
        self.reading = None

    async def ask(self, keep, append, max_tokens, ahead):
        self.round_id += 1
        advance = DraftAdvance(self.round_id, keep, append, max_tokens, ahead=ahead)
        await self.call.write(wire.encode(advance))
        chunks = []
        while not chunks or not chunks[-1].last:
            chunk = await self.read()
            if not chunk.ahead:
                chunks.append(chunk)
        return tokens_of(chunks)

    async def pushed(self, most):
        """Return the next proposals made ahead, fewer if no more come for a moment."""
        found = []
        while len(found) < most:
            self.reading = self.reading or asyncio.ensure_future(super().read())
            if not (await asyncio.wait((self.reading,), timeout=0.5))[0]:
                break
            chunk = await self.read()
            assert chunk.ahead
            assert chunk.last
            assert chunk.round_id <= self.round_id
            found.append(chunk)
        return found

    async def read(self):
        reading, self.reading = self.reading, None
        return await (reading or super().read())


async def fresh(service, tokens, sampling):
    client = await service.client().open(tokens, sampling, prompt_length=8)
    found = tokens_of(await client.advance(len(tokens), max_tokens=K))
    client.call.cancel()
    return found


@dataclass
class Place:
    """A proposal made ahead, and all tokens before it."""

    chunk: DraftChunk
    before: list[int]

    @property
    def end(self):
        return [*self.before, *self.chunk.token_ids]


def follows(place, root, known):
    while place.chunk.ahead_id and place.chunk.follows_ahead_id in known:
        if place.chunk.follows_ahead_id == root:
            return True
        place = known[place.chunk.follows_ahead_id]
    return False


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [("model", SamplingParams(temperature=0.8)), ("multi_level", SamplingParams())],
)
async def test_random_verdicts(service, prompt, drafter, sampling, monkeypatch):
    """Whatever is confirmed, kept or dropped, each proposal is that of a fresh session."""
    for chance in ("MIN_CHANCE", "MIN_DEEP_CHANCE"):
        monkeypatch.setattr(proposal, chance, 0.0)
    rng = random.Random(drafter)
    tokens = prompt[:8]
    client = AheadClient(service.stub, len(tokens))
    await client.open(tokens, sampling, drafter=drafter)
    keep, append, confirmed, num_pushed, num_deep = len(tokens), [], None, 0, 0
    known = {}
    for _ in range(24):
        count = rng.choice([1, 2, 4, 8])
        if confirmed is None:
            drafts, known, root = await client.ask(keep, append, K, DraftAhead(count, K)), {}, 0
            assert drafts == await fresh(service, tokens, sampling)
        else:
            drafts, named = list(confirmed.token_ids), rng.random() < 0.8
            root = confirmed.ahead_id if named else 0
            wanted = DraftAhead(count, K, len(drafts), root)
            assert await client.ask(keep, [*append, *drafts], 0, wanted) == []
            known = {i: p for i, p in known.items() if named and follows(p, root, known)}
        known[root] = Place(DraftChunk(token_ids=drafts), tokens)
        new = count - len(known) + 1
        for chunk in await client.pushed(rng.randrange(new + 1) if new > 0 else 0):
            if (behind := known.get(chunk.follows_ahead_id)) is None:
                continue  # what it follows was dropped in the meantime
            if chunk.follows_ahead_id == 0 and chunk.round_id != client.round_id:
                continue
            assert len(behind.before) <= chunk.keep_length <= len(behind.end)
            before = [*behind.end[: chunk.keep_length], chunk.next_token_id]
            assert chunk.token_ids == await fresh(service, before, sampling)
            assert chunk.ahead_id not in known
            known[chunk.ahead_id] = Place(chunk, before)
            num_pushed += 1
            num_deep += chunk.follows_ahead_id != root
        following = [p for p in known.values() if p.chunk.ahead_id and
                     p.chunk.follows_ahead_id == root]  # fmt: skip
        verdict = rng.choice(following) if following and rng.random() < 0.8 else None
        if verdict is not None:
            keep, append = verdict.chunk.keep_length, [verdict.chunk.next_token_id]
        else:
            keep, append = len(tokens) + rng.randrange(len(drafts) + 1), [rng.randrange(1, 90)]
        confirmed = verdict.chunk if verdict and rng.random() < 0.7 else None
        tokens = [*[*tokens, *drafts][:keep], *append]
    assert num_pushed > 10
    assert num_deep
    client.call.cancel()


async def test_what_follows_a_confirmed_proposal_is_not_made_again(service, prompt, monkeypatch):
    for chance in ("MIN_CHANCE", "MIN_DEEP_CHANCE"):
        monkeypatch.setattr(proposal, chance, 0.0)
    client = AheadClient(service.stub, 8)
    await client.open(prompt[:8])
    drafts = await client.ask(8, [], K, DraftAhead(3, K))
    first, *others = await client.pushed(3)
    behind = [each for each in others if each.follows_ahead_id == first.ahead_id]
    end = [first.next_token_id, *first.token_ids]
    wanted = DraftAhead(3, K, K, first.ahead_id)
    await client.ask(first.keep_length, end, 0, wanted)
    more = await client.pushed(3 - len(behind))
    assert {each.ahead_id for each in more} == set(range(4, 7 - len(behind)))
    kept = {first.ahead_id, *(each.ahead_id for each in [*behind, *more])}
    assert all(each.follows_ahead_id in kept for each in more)
    assert drafts
    client.call.cancel()


async def test_slots_come_back(service_with, prompt):
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


async def test_branches_leave_slots_to_sessions(service_with, prompt):
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
        (DraftAdvance(1, 8, [], 4, ahead=DraftAhead(17, 4)), "makes at most 16"),
        (DraftAdvance(1, 8, [], 4, ahead=DraftAhead(1, 4000)), "ahead.max_tokens is 4000"),
        (DraftAdvance(1, 8, [5], 0, ahead=DraftAhead(1, 4, 2)), "1 tokens are appended"),
        (DraftAdvance(1, 8, [5], 4, ahead=DraftAhead(1, 4, 1)), "set advance.max_tokens to 0"),
        (DraftAdvance(1, 8, [5], 0, ahead=DraftAhead(1, 4, 0, 3)), "num_unverified is 0"),
        (DraftAdvance(1, 8, [], 4, ahead=DraftAhead(1, 4)), "prompt_lookup makes at most 0"),
    ],
)
async def test_what_cannot_be_asked_for(service, prompt, advance, said):
    drafter = "prompt_lookup" if "prompt_lookup" in said else ""
    client = await service.client().open(prompt[:8], drafter=drafter)
    await client.call.write(wire.encode(advance))
    code, details = await client.status()
    assert code.name == "INVALID_ARGUMENT"
    assert said in details


async def test_lookup_may_be_asked_for_nothing_ahead(service, prompt):
    client = AheadClient(service.stub, 8)
    await client.open(prompt[:8], drafter="prompt_lookup")
    for _ in range(2):
        await client.ask(8, [], 4, DraftAhead(0, 4))
    client.call.cancel()

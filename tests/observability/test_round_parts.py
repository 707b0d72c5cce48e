"""Parts of a round's time: that of the one who was waited for, whatever he says of it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from flyspec.errors import UnavailableError
from flyspec.values.requests import GenerateOptions, GenerationRequest
from flyspec.values.rounds import DraftChunk, DraftTimings, Verdict, VerifyTimings
from orchestrator import generations
from orchestrator.generation.ledger import RoundOutcome
from orchestrator.generation.pace import FixedPace
from orchestrator.telemetry.metrics import Times
from tests.orchestrator.scripted import Drafter, DrafterSession, scripted

PAUSE_S = 0.1
REQUEST = GenerationRequest([5, 6, 7], GenerateOptions(max_tokens=12, num_speculative_tokens=4))
PLAIN = replace(REQUEST, options=replace(REQUEST.options, num_speculative_tokens=0))


def shares(inside) -> dict[str, float]:
    """The shares of the parts in the time of all rounds."""
    families = {family.name: family.samples for family in inside.observer.metrics.collect()}

    def sums(name):
        return [s for s in families[f"flyspec_{name}_seconds"] if s.name.endswith("_sum")]

    whole = sum(s.value for s in sums("round"))
    parts: dict[str, float] = {}
    for sample in sums("round_part"):
        part = sample.labels["part"]
        parts[part] = parts.get(part, 0.0) + sample.value / whole
    assert sum(parts.values()) == pytest.approx(1.0)
    assert min(parts.values()) >= 0
    return parts


async def run(inside, request=REQUEST, reading_s=0.0) -> dict[str, float]:
    async with aclosing(inside.generations.run(request)) as events:
        async for _ in events:
            await asyncio.sleep(reading_s)
    return shares(inside)


@pytest.mark.parametrize(
    ("drafting_ns", "waiting_ns", "expected"),
    [
        (150, 460, [10, 80 + 40, 60, 20, 300, 30, 70, 390]),
        (50, 460, [0, 50 + 40, 0, 20, 300, 30, 70, 490]),  # drafted ahead, but for the last 50
        (150, 15, [10, 80 + 40, 60, 20, 300, 30, 15, 445]),  # while a client was reading
    ],
)
def test_the_parts_of_one_round(drafting_ns, waiting_ns, expected):
    """A head of the target drafts in the verify service, beside the judge."""
    verify = VerifyTimings(queue_ns=20, forward_ns=300, judge_ns=30, service_ns=390, head_ns=40)
    draft = DraftTimings(queue_ns=10, model_ns=60, service_ns=90)
    times = Times()
    times.observe(
        RoundOutcome(
            (), Verdict(1, 2, timings=verify), 0, 0, 1000, proposal=DraftChunk(timings=draft),
            drafting_ns=drafting_ns, verifying_ns=460, waiting_ns=waiting_ns,
        )
    )  # fmt: skip
    assert [round(1e9 * part._sum) for part in times.parts] == expected
    assert sum(expected) == 1000


async def test_what_a_draft_service_accounts_for_is_its_queue_and_its_work(monkeypatch):
    async def propose(self, *arguments):
        proposal = await DRAFTED(self, *arguments)
        of = int(1e9 * PAUSE_S)
        return replace(proposal, timings=DraftTimings(queue_ns=of // 2, service_ns=of))

    monkeypatch.setattr(DrafterSession, "propose", propose)
    async with scripted() as inside:
        inside.drafters["drafter:1"].pause_s = PAUSE_S
        parts = await run(inside)
        assert parts["draft_queue"] == pytest.approx(parts["draft"])
        assert parts["draft_queue"] > 0.25
        assert parts["draft_rpc"] < 0.4


DRAFTED = DrafterSession.propose


async def test_a_proposal_that_was_waited_for_in_vain_is_the_drafters(monkeypatch):
    class Patient(FixedPace):
        def turn(self):
            return super().turn()._replace(patience_ns=int(1e9 * PAUSE_S))

    monkeypatch.setattr(generations, "FixedPace", Patient)
    async with scripted() as inside:
        inside.drafters["drafter:1"].pause_s = 3600.0
        parts = await run(inside)
        assert parts["draft_rpc"] > 0.5


async def test_a_lost_draft_service_is_the_drafters(monkeypatch):
    async def fail(self):
        await asyncio.sleep(PAUSE_S)
        raise UnavailableError("lost")

    async with scripted() as inside:
        monkeypatch.setattr(Drafter, "answer", fail)
        parts = await run(inside)
        assert parts["draft_rpc"] > 0.5


@pytest.mark.parametrize("request_", [REQUEST, PLAIN], ids=["drafts", "plain"])
@pytest.mark.parametrize("late", ["drafter", "target", "client"])
async def test_who_answers_late_is_told_from_the_others(request_, late):
    """Starved of processors, a service does not know of the time before it has read a request."""
    async with scripted() as inside:
        if late == "client":
            parts = await run(inside, request_, reading_s=PAUSE_S)
            assert parts["orchestrator"] > 0.5
            return
        service = {**inside.drafters, **inside.targets}[f"{late}:1"]
        service.pause_s = PAUSE_S
        parts = await run(inside, request_)
        rpcs = {"drafter": "draft_rpc", "target": "verify_rpc"}
        if late == "drafter" and request_ is PLAIN:
            assert parts["draft_rpc"] == 0
            return
        assert parts.pop(rpcs[late]) > 0.5
        assert parts["orchestrator"] + sum(parts.get(name, 0.0) for name in rpcs.values()) < 0.4

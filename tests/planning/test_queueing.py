"""Rounds that share devices, by hand and against a simulation that counts time event by event."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable

import pytest

from flyspec_lab.planning.queueing import RoundParts, on_devices, on_one_machine

MS = 1e6


def parts(verify_ns: Callable[[float], float], **more: float) -> RoundParts:
    facts = {"draft_ns": 3 * MS, "rest_ns": 1 * MS, **more}
    draft_ns = facts.pop("draft_ns")
    return RoundParts(verify_ns, lambda _: draft_ns, **facts)


FLAT = parts(lambda _: 10 * MS)
STEEP = parts(lambda n: (4 + 6 * n) * MS)


def simulated(p: RoundParts, clients: int, seed: int = 0, rounds: int = 4000) -> float:
    """Return rounds per second with one target and drafters enough; parts vary by a fifth."""
    rng = random.Random(seed)
    now, done, busy = 0.0, 0, False
    waiting: deque[int] = deque()
    events: list[tuple[float, int, list[int]]] = []

    def apart() -> float:
        ns = p.draft_ns(1) + p.rest_ns + p.trip_ns
        return ns * rng.uniform(0.8, 1.2)

    for client in range(clients):
        heapq.heappush(events, (apart(), client, []))
    while done < rounds:
        now, who, step = heapq.heappop(events)
        if step:
            busy = False
            done += len(step)
            for client in step:
                heapq.heappush(events, (now + apart(), client, []))
        else:
            waiting.append(who)
        if waiting and not busy:
            batch = list(waiting)
            waiting.clear()
            busy = True
            took = p.verify_ns(len(batch)) * rng.uniform(0.8, 1.2)
            heapq.heappush(events, (now + took, -1, batch))
    return done / now * 1e9


def test_one_request_waits_for_nobody() -> None:
    load = on_devices(FLAT, 1, 1, 1)
    assert load.round_ns == pytest.approx(14 * MS)
    assert load.rounds_per_s == pytest.approx(1000 / 14)
    assert load.target_share == pytest.approx(10 / 14)
    assert load.draft_share == pytest.approx(3 / 14)
    assert on_one_machine(FLAT, 1, 2).round_ns == pytest.approx(14 * MS)


def test_drafts_made_ahead_hide_behind_the_step_before() -> None:
    near = parts(lambda _: 10 * MS, hits=0.5)
    assert on_devices(near, 1, 1, 1).round_ns == pytest.approx((14 - 0.5 * 3.5) * MS)
    far = parts(lambda _: 2 * MS, hits=0.5, trip_ns=8 * MS, draft_trip_ns=8 * MS)
    assert on_devices(far, 1, 1, 1).round_ns == pytest.approx((14 - 0.5 * 2) * MS)


@pytest.mark.parametrize("clients", [2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("p", [FLAT, STEEP], ids=["steps cost the same", "rounds cost"])
def test_many_requests_are_about_as_fast_as_simulated_ones(p, clients) -> None:
    assert on_devices(p, clients, 1, clients).rounds_per_s == pytest.approx(
        simulated(p, clients), rel=0.12
    )


def test_targets_share_requests_evenly() -> None:
    two, half = on_devices(FLAT, 8, 2, 2), on_devices(FLAT, 4, 1, 1)
    assert two.rounds_per_s == pytest.approx(2 * half.rounds_per_s)


def test_more_devices_are_never_slower() -> None:
    rates = [on_devices(STEEP, 16, n, 16).rounds_per_s for n in range(1, 17)]
    assert rates == sorted(rates)
    drafting = RoundParts(STEEP.verify_ns, lambda n: (2 + n) * MS, MS)
    rates = [on_devices(drafting, 16, 16, n).rounds_per_s for n in range(1, 17)]
    assert rates == sorted(rates)


def test_one_machine_does_no_more_than_its_work_allows() -> None:
    serial = RoundParts(lambda n: 10 * MS * n, lambda n: 3 * MS * n, 2 * MS)  # nothing to batch
    load = on_one_machine(serial, 64, 2)
    assert load.rounds_per_s == pytest.approx(1000 / 14, rel=0.01)  # 10 + 3 + 2 / 2 ms
    assert load.rounds_per_s <= 1000 / 14

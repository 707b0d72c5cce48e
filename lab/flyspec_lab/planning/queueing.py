"""How long rounds take when requests share targets, drafters or one machine.

A closed network: a fixed number of requests, each in one round at a time. Mean value analysis
(Reiser and Lavenberg, 1980): with one request, a round takes the sum of its parts; a request that
joins n - 1 others finds the devices as these n - 1 leave them on average. So times for 2, 3, ... n
requests follow one from another. What differs from the textbook is that steps are batched:

- A target runs one step at a time over all rounds that wait. A round that finds it busy waits for
  half a step, and shares the next one with those that arrived during the running one.
- A drafter's step makes a token for each session that drafts; a new one joins at the next step.
- Requests are spread evenly over replicas. Everything else (orchestrator, codec, network) takes the
  same time whatever the load.

Services that share one machine with a few cores compete for it: a model's step uses all cores, the
rest of a round one. The machine then is one queue, which serves all in turn; while many rounds are
in it, steps still are batched. Assumed throughout: rounds of a request are alike, and arrive as if
by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundParts:
    """A round's parts, ns: in the target's and the drafter's step by their number of rounds, and
    outside both.

    `trip_ns` are the round trips on the network, `rest_ns` the work outside the models. A share
    `hits` of the rounds needs no trip to the drafter, `draft_trip_ns` of the above, as its drafts
    were made while the round before was verified.
    """

    verify_ns: Callable[[float], float]
    draft_ns: Callable[[float], float]
    rest_ns: float
    trip_ns: float = 0.0
    draft_trip_ns: float = 0.0
    hits: float = 0.0

    @property
    def verify_trip_ns(self) -> float:
        """The round trip to the target."""
        return self.trip_ns - self.draft_trip_ns


@dataclass(frozen=True)
class Load:
    """What `clients` requests make of devices: ns per round of a request, rounds per second in all.

    `target_share` and `draft_share` are the time that a device is busy, between 0 and 1;
    `rounds_per_step` is of a target.
    """

    round_ns: float
    rounds_per_s: float
    target_share: float
    draft_share: float
    rounds_per_step: float


def on_devices(parts: RoundParts, clients: int, targets: int, drafters: int) -> Load:
    """Return the load of devices of their own. Numbers are at least 1.

    A request stays with its replicas. So what it finds at its target is what a network has that
    lacks a request for each target, and likewise at its drafter.
    """
    seen = [Load(0.0, 0.0, 0.0, 0.0, 1.0)]
    drafting = [0.0]  # requests at a drafter
    for number in range(1, clients + 1):
        others = seen[max(0, number - targets)]
        # Of the others, those that arrive during the running step share the next one.
        running_ns = parts.verify_ns(others.rounds_per_step)
        arriving = others.rounds_per_s / 1e9 / targets * running_ns
        apart = max(0.0, number / targets - 1.0 - others.rounds_per_step)
        batch = 1.0 + others.target_share * min(arriving, apart)
        verify_ns = parts.verify_ns(batch)
        at_target_ns = verify_ns + others.target_share * running_ns / 2.0
        together = 1.0 + drafting[max(0, number - drafters)]
        draft_ns = parts.draft_ns(together)
        round_ns = at_target_ns + parts.rest_ns + parts.trip_ns + draft_ns
        # Drafted while the target had the round before: what is left of it, and of its trip.
        verified_ns = at_target_ns + parts.verify_trip_ns
        asked_ns = draft_ns + parts.draft_trip_ns + parts.rest_ns / 2.0
        round_ns -= parts.hits * min(asked_ns, verified_ns)
        round_ns = max(round_ns, number / targets * verify_ns / batch)  # one step at a time
        rate = number / round_ns
        drafting.append(rate / drafters * draft_ns)
        target_share = min(1.0, rate / targets * verify_ns / batch)
        draft_share = min(1.0, drafting[-1] / together)
        seen.append(Load(round_ns, rate * 1e9, target_share, draft_share, batch))
    return seen[-1]


def on_one_machine(parts: RoundParts, clients: int, cores: int) -> Load:
    """Return the load of one machine with all services, one of each.

    Drafting ahead saves only waiting, its work is done all the same; and no more of it than goes by
    while the round before is verified.
    """
    queue = at_target = at_drafter = 0.0
    found = Load(0.0, 0.0, 0.0, 0.0, 1.0)
    waiting_ns = parts.rest_ns * (1.0 - 1.0 / cores)
    asked_ns = waiting_ns / 2.0 + parts.draft_trip_ns
    for number in range(1, clients + 1):
        batch, together = 1.0 + at_target, 1.0 + at_drafter
        verify_ns = parts.verify_ns(batch) / batch
        draft_ns = parts.draft_ns(together) / together
        work_ns = verify_ns + draft_ns + parts.rest_ns / cores
        verified_ns = verify_ns + parts.verify_trip_ns
        idle_ns = waiting_ns + parts.trip_ns - parts.hits * min(asked_ns, verified_ns)
        round_ns = idle_ns + work_ns * (1.0 + queue)
        rate = number / round_ns
        queue = rate * work_ns * (1.0 + queue)
        at_target, at_drafter = (queue * ns / work_ns for ns in (verify_ns, draft_ns))
        found = Load(
            round_ns, rate * 1e9, min(1.0, rate * verify_ns), min(1.0, rate * draft_ns), batch
        )
    return found

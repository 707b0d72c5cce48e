"""Predicts the time and yield of rounds of K drafts: the best K, and when to stop early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from flyspec.rules.room import ANYWHERE, Room
from orchestrator.generation.experience import DrafterExperience, Experience
from orchestrator.generation.pace import NextRound

LEAST_CONFIDENCE, MOST_CONFIDENCE = 0.01, 0.8
LEAST_DIFFERING = 0.05
"""Least share of drafts that differ and are refused from which that of equal ones is told."""
PATIENCE = 3.0
"""Multiple of the usual round time that a proposal may take."""
PATIENCE_START_NS = 5_000_000


def round_ns(experience: Experience, drafter: DrafterExperience, k: int) -> float:
    """Return the usual time of a round of K drafts."""
    return drafter.overhead_ns.value + k * drafter.draft_ns.value + experience.verify_ns(k)


def best_k(
    experience: Experience,
    drafter: DrafterExperience,
    survivals: Sequence[float],
    room: Room = ANYWHERE,
) -> tuple[int, float]:
    """Return the K with the most expected tokens per ns, and that rate.

    K is 0 if plain decoding is faster. `survivals` are the probabilities that each draft is
    reached and accepted where there is `room` for it to differ from the target's token.
    """
    best, best_rate = 0, 1.0 / experience.plain_ns
    time_ns = drafter.overhead_ns.value
    for k, num_accepted in enumerate(_accepted(survivals, drafter.loosening.value, room), 1):
        tokens = 1.0 + num_accepted
        time_ns += drafter.draft_ns.value
        rate = tokens / (time_ns + experience.verify_ns(k))
        if rate > best_rate:
            best, best_rate = k, rate
    return best, best_rate


def _accepted(survivals: Sequence[float], loosening: float, room: Room) -> Iterator[float]:
    """Yield how many drafts of a round of 1, 2 and more are accepted."""
    if not room.reach:
        yield from accumulate(survivals)
        return
    rates = [now / (before or 1.0) for before, now in pairwise((1.0, *survivals))]
    differ = max(LEAST_DIFFERING, 1.0 - loosening)
    own = [min(1.0, max(0.0, rate - loosening) / differ) for rate in rates]
    for places in _places(room, len(survivals)):
        chance, total = 1.0, 0.0
        for has_room, rate, own_rate in zip(places, rates, own, strict=False):
            chance *= rate if has_room else own_rate
            total += chance
        yield total


@lru_cache(maxsize=64)
def _places(room: Room, most: int) -> Sequence[Sequence[bool]]:
    """Return for rounds of 1 to `most` drafts which of them have room to differ."""
    return [[room.at(index, k) for index in range(k)] for k in range(1, most + 1)]


def drafting(
    experience: Experience, drafter: DrafterExperience, k: int, rate: float, exact: bool
) -> NextRound:
    """Return a round of K drafts that stops early when another draft is not worth its time.

    That is when its probability of acceptance is below the tokens otherwise generated in that time,
    at `rate` tokens per ns. An `exact` rule accepts no draft that differs from the target.
    """
    usual_ns = round_ns(experience, drafter, k)
    patience_ns = int(PATIENCE_START_NS + PATIENCE * usual_ns)
    one_more_ns = round_ns(experience, drafter, k + 1) - usual_ns
    chance = min(1.0, max(0.0, one_more_ns * rate))
    # A lossy rule may accept a draft with low confidence if enough drafts follow it in its round.
    loosening = drafter.loosening.value
    agreed = (chance - loosening) / (1.0 - loosening) if chance > loosening else 0.0
    if not agreed and not exact:
        return NextRound(k, patience_ns=patience_ns)
    confidence = agreed ** (1.0 / drafter.sharpness)
    confidence = min(MOST_CONFIDENCE, max(LEAST_CONFIDENCE, confidence))
    return NextRound(k, confidence, patience_ns=patience_ns)

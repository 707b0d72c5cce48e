"""The plan: tokens per second of clients, targets and drafters at each K, and its bounds.

A round takes a trip to the drafter, K draft steps, a trip to the target, a step over K + 1 tokens,
and the rest. What a request takes on top of its rounds is spread over them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flyspec_lab.planning.measured import MeasuredMode
from flyspec_lab.planning.queueing import Load, RoundParts, on_devices, on_one_machine

MOST_CLIENTS = 4096
FULL = 0.8
"""Minimum share of K that must have been drafted: else rounds did not have the drafts asked for."""


@dataclass(frozen=True)
class Deployment:
    """What is planned: `clients` requests at any time, and the devices for them.

    `cores` > 0: one machine of that many has all services, one of each; 0: every target and
    drafter has its own. Round trips from the orchestrator are in ms, on top of those that the bench
    measured.
    """

    clients: int = 1
    targets: int = 1
    drafters: int = 1
    cores: int = 0
    draft_rtt_ms: float = 0.0
    verify_rtt_ms: float = 0.0
    draft_ahead: bool = True


@dataclass(frozen=True)
class Rate:
    """A deployment at one K. Shares are of time, `drafted_ahead` of rounds.

    `tokens_per_round` is of long texts; the last round of a text is cut short by its end.
    """

    num_speculative_tokens: int
    clients: int
    tokens_per_s: float
    tokens_per_s_per_request: float
    rounds_per_s: float
    round_ms: float
    tokens_per_round: float
    rounds_per_step: float
    target_share: float
    draft_share: float
    drafted_ahead: float


@dataclass(frozen=True)
class Bounds:
    """What limits a deployment at one K, tokens per second of all clients unless for one request.

    `plain`: decoding without drafts. `target_alone`: if only the target took time. `one_remote` and
    `one_beside`: a single request, with the drafter where it is planned and with the drafter beside
    the target. `clients_per_target`: 1 + K t_d / t_v, the requests that keep a target busy if only
    drafting takes time besides; `clients_per_target_with_trips` if trips and the rest do as well.
    """

    plain: float
    target_alone: float
    one_remote: float
    one_beside: float
    clients_per_target: float
    clients_per_target_with_trips: float


@dataclass(frozen=True)
class Devices:
    """Targets and drafters for a rate; None: more clients are needed, whatever the devices."""

    tokens_per_s: float
    num_speculative_tokens: int
    targets: int
    drafters: int


def rate(measured: MeasuredMode, deployment: Deployment, num_drafts: int) -> Rate:
    """Return the rate of a deployment at K = `num_drafts`, at least 1."""
    o = deployment
    tokens, rounds = measured.tokens_per_request, measured.rounds(num_drafts)
    parts = round_parts(measured, o, num_drafts, rounds)
    load = _load(parts, o)
    per_second = load.rounds_per_s * tokens / rounds
    return Rate(
        num_speculative_tokens=num_drafts,
        clients=o.clients,
        tokens_per_s=per_second,
        tokens_per_s_per_request=per_second / o.clients,
        rounds_per_s=load.rounds_per_s,
        round_ms=load.round_ns / 1e6,
        tokens_per_round=measured.agreement.tokens_per_round(num_drafts),
        rounds_per_step=load.rounds_per_step,
        target_share=load.target_share,
        draft_share=load.draft_share,
        drafted_ahead=parts.hits,
    )


def round_parts(m: MeasuredMode, o: Deployment, num_drafts: int, rounds: float) -> RoundParts:
    """Return the parts of a mean round of a request of that many `rounds`.

    The opening needs one more trip to each service.
    """
    whole = m.agreement.whole(num_drafts)
    ahead = o.draft_ahead and m.ahead_share is not None and whole >= m.ahead_share
    trips = (rounds + 1.0) / rounds
    draft_trip_ns = 1e6 * o.draft_rtt_ms * trips
    return RoundParts(
        verify_ns=lambda n: m.step_ns(n * (num_drafts + 1)) + n * m.opening_target_ns / rounds,
        draft_ns=lambda n: (
            num_drafts * m.draft_token_ns * m.batched(n) + n * m.opening_draft_ns / rounds
        ),
        rest_ns=m.rest_ns + m.opening_rest_ns / rounds,
        trip_ns=draft_trip_ns + 1e6 * o.verify_rtt_ms * trips,
        draft_trip_ns=draft_trip_ns,
        hits=whole if ahead else 0.0,
    )


def best(rates: Sequence[Rate]) -> Rate:
    """Return the fastest; of equally fast ones that with the fewest drafts."""
    return max(rates, key=lambda r: (r.tokens_per_s, -r.num_speculative_tokens))


def bounds(m: MeasuredMode, deployment: Deployment, num_drafts: int) -> Bounds:
    """Return the bounds at this K."""
    o = deployment
    targets = 1 if o.cores else o.targets
    batch = max(1.0, o.clients / targets)
    running = min(targets, o.clients)
    one = replace(o, clients=1)
    parts = round_parts(m, o, num_drafts, m.rounds(num_drafts))
    verify_ns = m.step_ns(num_drafts + 1)
    drafting_ns = num_drafts * m.draft_token_ns
    per_step = running * batch
    return Bounds(
        plain=1e9 * per_step / m.step_ns(batch),
        target_alone=(
            1e9 * per_step * m.agreement.tokens_per_round(num_drafts)
            / m.step_ns(batch * (num_drafts + 1))
        ),
        one_remote=rate(m, one, num_drafts).tokens_per_s,
        one_beside=rate(m, replace(one, draft_rtt_ms=0.0), num_drafts).tokens_per_s,
        clients_per_target=1.0 + drafting_ns / verify_ns,
        clients_per_target_with_trips=(
            1.0 + (drafting_ns + parts.trip_ns + parts.rest_ns) / verify_ns
        ),
    )  # fmt: skip


def devices_for(
    m: MeasuredMode, deployment: Deployment, ks: Sequence[int], tokens_per_s: float
) -> Devices | None:
    """Return the fewest targets, and for them the fewest drafters, that reach a rate at any K.

    None: with these clients no number of devices reaches it.
    """

    def reached(targets: int, drafters: int) -> int | None:
        o = replace(deployment, cores=0, targets=targets, drafters=drafters)
        found = best([rate(m, o, k) for k in ks])
        return found.num_speculative_tokens if found.tokens_per_s >= tokens_per_s else None

    most = deployment.clients
    if reached(most, most) is None:
        return None
    targets = _fewest(most, lambda number: reached(number, most) is not None)
    drafters = _fewest(most, lambda number: reached(targets, number) is not None)
    k = reached(targets, drafters)
    assert k is not None, "more devices are never slower"
    return Devices(tokens_per_s, k, targets, drafters)


def notes(m: MeasuredMode, deployment: Deployment, ks: Sequence[int]) -> list[str]:
    """Return what makes a plan doubtful."""
    k, found = m.num_speculative_tokens, []
    if not m.token_exact:
        found.append(
            f"{m.rule} judges the same drafts otherwise at another K than the measured {k}"
        )
    if m.mean_draft_tokens < FULL * k:
        found.append(
            f"{m.drafter} drafted {m.mean_draft_tokens:.1f} tokens a round of the {k} asked for; "
            "at another K its rounds are those of a drafter that always has some"
        )
    if m.ahead_share is not None and m.agreement.whole(k) >= m.ahead_share:
        found.append(f"at K = {k} drafts were made ahead, which hides their time; measure K = 15")
    if any(other > k for other in ks):
        found.append(f"acceptance beyond the measured K = {k} is extrapolated")
    if not m.step_costs:
        found.append(
            "steps of several requests are extrapolated; let `flyspec bench` start a stack"
        )
    if not deployment.cores and m.cores:
        found.append(
            f"measured with all services on one machine of {m.cores} cores; planned for devices "
            f"of their own (--cores {m.cores}: all on that machine)"
        )
    return found


def _load(parts: RoundParts, o: Deployment) -> Load:
    if o.cores:
        return on_one_machine(parts, o.clients, o.cores)
    return on_devices(parts, o.clients, o.targets, o.drafters)


def _fewest(most: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest number up to `most` that is enough, if more never is less."""
    return 1 + bisect_left(range(1, most + 1), True, key=enough)

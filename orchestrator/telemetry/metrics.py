"""What generations leave behind in metrics; docs/observability.md has their names.

What counts tokens is kept as plain numbers and made into metrics when Prometheus asks, so that a
round costs a few additions. A drafter's name is the registry's, a rule's that of its preset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from flyspec.telemetry.metrics import REQUEST_SECONDS, STEP_SECONDS, Buckets
from flyspec.values.generation import RecoveryKind
from flyspec.values.tokens import Origin
from orchestrator.generation.ledger import Ledger, RoundOutcome
from orchestrator.generation.window import Token

NOBODY = "none"
"""Drafter of rounds without drafts."""
OTHERS = "other"
"""Stands for all drafters beyond `MAX_DRAFTERS`."""
MAX_DRAFTERS = 64
DRAFT_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 15, 16, 20, 24, 32, 48, 64)
PARTS = ("draft_queue", "draft", "verify_queue", "verify_step", "judge", "network")
STATUSES = (
    "OK",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
)


@dataclass(slots=True, eq=False)
class Tally:
    """Counts of one drafter under one rule, as `Ledger` has them of one generation.

    `drafted` has the number of drafts of every round, `accepted[n]` counts rounds with n accepted,
    `origins` tokens by the number of their origin.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_loose: int = 0
    loose_cost_nats: float = 0.0
    num_rollbacks: int = 0
    drafted: Buckets = field(default_factory=lambda: Buckets(DRAFT_LENGTHS))
    accepted: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=lambda: [0] * (len(Origin) + 1))


class GenerationMetrics:
    """The metrics of all generations of an orchestrator."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._times: dict[str, Times] = {}
        self._drafters: set[str] = {NOBODY}
        self.requests = Counter(
            "flyspec_requests",
            "Requests that ended, by gRPC status and by why their output ended.",
            ["status", "finish_reason"],
            registry=registry,
        )
        for status in STATUSES:
            self.requests.labels(status, "stop" if status == "OK" else "")
        self.recoveries = Counter(
            "flyspec_recoveries",
            "What kept generations going when a service failed, or was taken from them.",
            ["kind"],
            registry=registry,
        )
        self.recovery_seconds = Histogram(
            "flyspec_recovery_delay_seconds",
            "What a recovery added to its stream.",
            ["kind"],
            registry=registry,
            buckets=REQUEST_SECONDS,
        )
        for kind in RecoveryKind:
            self.recoveries.labels(kind.name.lower())
        self.prompt_tokens = Counter(
            "flyspec_prompt_tokens",
            "Tokens of the prompts of admitted requests.",
            registry=registry,
        )

        def per_request(name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
            labels = ["drafter", "rule"]
            return Histogram(name, documentation, labels, registry=registry, buckets=buckets)

        self.queue_seconds = Histogram(
            "flyspec_request_queue_time_seconds",
            "From a request's arrival until it is admitted.",
            registry=registry,
            buckets=REQUEST_SECONDS,
        )
        self.first_token_seconds = per_request(
            "flyspec_time_to_first_token_seconds",
            "From a request's arrival to its first tokens, the wait to be admitted included.",
            REQUEST_SECONDS,
        )
        self.token_seconds = per_request(
            "flyspec_request_time_per_output_token_seconds",
            "Mean time from token to token of a completed request, its first one excluded.",
            STEP_SECONDS,
        )
        self.request_seconds = per_request(
            "flyspec_e2e_request_latency_seconds",
            "From the arrival of a request that completed to its end.",
            REQUEST_SECONDS,
        )

    def label(self, drafter: str) -> str:
        """A drafter's name as a label."""
        name = drafter or NOBODY
        if name not in self._drafters:
            if len(self._drafters) > MAX_DRAFTERS:
                return OTHERS
            self._drafters.add(name)
        return name

    def tally(self, drafter: str, rule: str) -> Tally:
        """The counts of a drafter (a label) under a rule."""
        found = self._tallies.get((drafter, rule))
        if found is None:
            found = self._tallies[drafter, rule] = Tally()
        return found

    def times(self, drafter: str) -> Times:
        """The times of a drafter's rounds."""
        found = self._times.get(drafter)
        if found is None:
            found = self._times[drafter] = Times()
        return found

    def collect(self) -> Iterator[Metric]:
        """The tallies as metrics."""
        for name, documentation, attribute in _COUNTERS:
            family = CounterMetricFamily(name, documentation, labels=["drafter", "rule"])
            for labels, tally in self._tallies.items():
                family.add_metric(labels, getattr(tally, attribute))
            yield family
        positions = CounterMetricFamily(
            "flyspec_spec_decode_num_accepted_tokens_per_pos",
            "Rounds in which the drafted token at this position, from 0, was accepted.",
            labels=["drafter", "rule", "position"],
        )
        origins = CounterMetricFamily(
            "flyspec_output_tokens",
            "Tokens that became final, by origin.",
            labels=["drafter", "rule", "origin"],
        )
        lengths = HistogramMetricFamily(
            "flyspec_spec_decode_draft_length",
            "K: tokens drafted and checked in a round; 0 in plain decoding.",
            labels=["drafter", "rule"],
        )
        for labels, tally in self._tallies.items():
            for position, count in enumerate(_beyond(tally.accepted)):
                positions.add_metric([*labels, str(position)], count)
            for origin in Origin:
                origins.add_metric([*labels, origin.name.lower()], tally.origins[origin])
            tally.drafted.add_to(lengths, labels)
        rounds = HistogramMetricFamily(
            "flyspec_round_seconds",
            "Time of a round, from asking for its drafts to its verdict.",
            labels=["drafter"],
        )
        parts = HistogramMetricFamily(
            "flyspec_round_part_seconds",
            "Time of the parts of a round. network: all that is in neither service.",
            labels=["drafter", "part"],
        )
        for drafter, times in self._times.items():
            times.rounds.add_to(rounds, [drafter])
            for part, buckets in zip(PARTS, times.parts, strict=True):
                buckets.add_to(parts, [drafter, part])
        yield from (positions, origins, lengths, rounds, parts)


_COUNTERS = (
    ("flyspec_rounds", "Rounds that were checked; a plain token is one.", "num_rounds"),
    ("flyspec_spec_decode_num_drafts", "Rounds with drafts.", "num_drafts"),
    (
        "flyspec_spec_decode_num_draft_tokens",
        "Tokens drafted and checked.",
        "num_draft_tokens",
    ),
    ("flyspec_spec_decode_num_accepted_tokens", "Of them, accepted for good.", "num_accepted"),
    (
        "flyspec_spec_decode_num_loose_tokens",
        "Tokens that became final although they differ from the target's own.",
        "num_loose",
    ),
    (
        "flyspec_spec_decode_loose_cost_nats",
        "What those tokens cost: log p(most likely) - log p(token) of the target, summed.",
        "loose_cost_nats",
    ),
    (
        "flyspec_spec_decode_num_rollbacks",
        "Windows that failed after their round.",
        "num_rollbacks",
    ),
)


class Times:
    """Where the time of one drafter's rounds goes, in seconds; `parts` as `PARTS`."""

    __slots__ = ("parts", "rounds")

    def __init__(self) -> None:
        self.rounds = Buckets(STEP_SECONDS)
        self.parts = [Buckets(STEP_SECONDS) for _ in PARTS]

    def observe(self, round_: RoundOutcome) -> None:
        """A round that was checked."""
        assert round_.verdict is not None
        draft, verify, round_ns = round_.draft_timings, round_.verdict.timings, round_.round_ns
        self.rounds.observe(round_ns * 1e-9)
        draft_queue, drafting, verify_queue, verify_step, judge, network = self.parts
        draft_queue.observe(draft.queue_ns * 1e-9)
        drafting.observe((draft.service_ns - draft.queue_ns) * 1e-9)
        verify_queue.observe(verify.queue_ns * 1e-9)
        verify_step.observe(verify.forward_ns * 1e-9)
        judge.observe((verify.service_ns - verify.queue_ns - verify.forward_ns) * 1e-9)
        network.observe(max(0, round_ns - draft.service_ns - verify.service_ns) * 1e-9)


class RoundCounter:
    """Counts the rounds of one generation. `ledger` is the generation's own."""

    def __init__(self, metrics: GenerationMetrics, rule: str, ledger: Ledger) -> None:
        self._metrics, self._rule, self._ledger = metrics, rule, ledger
        self._drafter: str | None = None
        self._num_loose = self._num_rollbacks = 0
        self._loose_cost_nats = 0.0

    def count(self, round_: RoundOutcome, final: Sequence[Token]) -> None:
        """A round that the ledger has recorded, and the tokens that became final with it."""
        if round_.drafter != self._drafter:
            self._drafter = round_.drafter
            label = self._metrics.label(round_.drafter)
            self._tally = self._metrics.tally(label, self._rule)
            self._times = self._metrics.times(label)
        tally, verdict = self._tally, round_.verdict
        if verdict is not None:
            tally.num_rounds += 1
            num_drafts = len(verdict.decisions)
            tally.drafted.observe(num_drafts)
            if num_drafts:
                tally.num_drafts += 1
                tally.num_draft_tokens += num_drafts
            self._times.observe(round_)
        origins = tally.origins
        for token in final:
            origins[token.origin] += 1
        self._take_over(tally)

    def finish(self) -> None:
        """The ledger is finished: of windows still open, nothing stands."""
        if self._drafter is not None:
            self._take_over(self._tally)

    def _take_over(self, tally: Tally) -> None:
        """What became final, whichever round it was drafted in."""
        ledger = self._ledger
        for drafter, accepted in ledger.take_settled():
            theirs = tally
            if drafter != self._drafter:
                theirs = self._metrics.tally(self._metrics.label(drafter), self._rule)
            _count(theirs.accepted, accepted)
            theirs.num_accepted += accepted
        if ledger.num_loose_tokens != self._num_loose:
            tally.num_loose += ledger.num_loose_tokens - self._num_loose
            tally.loose_cost_nats += ledger.loose_cost_nats - self._loose_cost_nats
            self._num_loose = ledger.num_loose_tokens
            self._loose_cost_nats = ledger.loose_cost_nats
        if ledger.num_rollbacks != self._num_rollbacks:
            tally.num_rollbacks += ledger.num_rollbacks - self._num_rollbacks
            self._num_rollbacks = ledger.num_rollbacks


def _count(histogram: list[int], value: int) -> None:
    """One more of `value`, in a list that is as long as it must be."""
    if value >= len(histogram):
        histogram += [0] * (value + 1 - len(histogram))
    histogram[value] += 1


def _beyond(histogram: Sequence[int]) -> list[int]:
    """For each i, how many counted values are larger than i."""
    beyond, total = [], 0
    for count in reversed(histogram[1:]):
        total += count
        beyond.append(total)
    return beyond[::-1]

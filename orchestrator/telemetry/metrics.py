"""What generations leave behind in metrics; docs/observability.md has their names.

What counts tokens is kept as plain numbers and made into metrics when Prometheus asks, so that a
round costs a few additions. A drafter's name is the registry's, a rule's that of its preset.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from flyspec.errors import FlyspecError
from flyspec.telemetry.metrics import REQUEST_SECONDS, STEP_SECONDS, Buckets
from flyspec.values.generation import RecoveryKind, SpeculationMetrics
from flyspec.values.tokens import Origin
from orchestrator.generation.ledger import Ledger, RoundOutcome
from orchestrator.generation.window import Token

NOBODY = "none"
"""Drafter of rounds without drafts."""
OTHERS = "other"
"""Stands for all drafters beyond `MAX_DRAFTERS`, all keys beyond `MAX_KEYS`."""
MAX_DRAFTERS, MAX_KEYS = 64, 256
LABELS = ("drafter", "rule")
DRAFT_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 15, 16, 20, 24, 32, 48, 64)
PARTS = ("draft_queue", "draft", "verify_queue", "verify_step", "judge", "network")
ERRORS = FlyspecError.__subclasses__()
STATUSES = sorted({"OK", "CANCELLED", "INTERNAL", *(error.status for error in ERRORS)})


@dataclass(slots=True, eq=False)
class Tally:
    """Counts of one drafter under one rule, as `Ledger` has them of one generation.

    `drafted` has the number of drafts of every round, `origins` tokens by the number of their
    origin.
    """

    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    drafted: Buckets = field(default_factory=lambda: Buckets(DRAFT_LENGTHS))
    origins: list[int] = field(default_factory=lambda: [0] * (len(Origin) + 1))


def _bounded(name: str, names: set[str], most: int) -> str:
    """The name as a label; `OTHERS` if there are that many others already."""
    if name not in names and len(names) >= most:
        return OTHERS
    names.add(name)
    return name


class GenerationMetrics:
    """The metrics of all generations of an orchestrator.

    `tallies` are by a drafter's label and a rule, `times` by that label.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        self.times: defaultdict[str, Times] = defaultdict(Times)
        self._drafters: set[str] = {NOBODY}
        self._keys: set[str] = set()
        make = partial(Counter, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=REQUEST_SECONDS)
        self.requests = make(
            "flyspec_requests",
            "Requests that ended, by gRPC status and by why their output ended.",
            ["status", "finish_reason"],
        )
        for status in STATUSES:
            self.requests.labels(status, "stop" if status == "OK" else "")
        self._key_requests = make(
            "flyspec_key_requests",
            "Requests with an API key that ended, by the key's name and by gRPC status.",
            ["key", "status"],
        )
        self._key_output_tokens = make(
            "flyspec_key_output_tokens",
            "Tokens that became final in requests with an API key, by the key's name.",
            ["key"],
        )
        self.recoveries = make(
            "flyspec_recoveries",
            "What kept generations going when a service failed, or was taken from them.",
            ["kind"],
        )
        self.recovery_seconds = seconds(
            "flyspec_recovery_delay_seconds", "What a recovery added to its stream.", ["kind"]
        )
        for kind in RecoveryKind:
            self.recoveries.labels(kind.name.lower())
        self.prompt_tokens = make(
            "flyspec_prompt_tokens", "Tokens of the prompts of admitted requests."
        )
        self.saved_seconds = make(
            "flyspec_spec_decode_saved_seconds",
            "What generations that adapt K saved by drafting, over plain decoding.",
            LABELS,
        )
        self.lost_seconds = make(
            "flyspec_spec_decode_lost_seconds",
            "What such generations lost by drafting, those that lost.",
            LABELS,
        )
        self.queue_seconds = seconds(
            "flyspec_request_queue_time_seconds", "From a request's arrival until it is admitted."
        )
        self.first_token_seconds = seconds(
            "flyspec_time_to_first_token_seconds",
            "From a request's arrival to its first tokens, the wait to be admitted included.",
            LABELS,
        )
        self.token_seconds = seconds(
            "flyspec_request_time_per_output_token_seconds",
            "Mean time from token to token of a completed request, its first one excluded.",
            LABELS,
            buckets=STEP_SECONDS,
        )
        self.request_seconds = seconds(
            "flyspec_e2e_request_latency_seconds",
            "From the arrival of a request that completed to its end.",
            LABELS,
        )

    def label(self, drafter: str) -> str:
        """A drafter's name as a label."""
        return _bounded(drafter or NOBODY, self._drafters, MAX_DRAFTERS + 1)

    def count_key(self, key: str, status: str, num_output_tokens: int) -> None:
        """A request with that API key has ended."""
        name = _bounded(key, self._keys, MAX_KEYS)
        self._key_requests.labels(name, status).inc()
        self._key_output_tokens.labels(name).inc(num_output_tokens)

    def collect(self) -> Iterator[Metric]:
        """The tallies as metrics."""
        for name, documentation, attribute in _COUNTERS:
            family = CounterMetricFamily(name, documentation, labels=LABELS)
            for labels, tally in self.tallies.items():
                family.add_metric(labels, getattr(tally.metrics, attribute))
            yield family
        positions = CounterMetricFamily(
            "flyspec_spec_decode_num_accepted_tokens_per_pos",
            "Rounds in which the drafted token at this position, from 0, was accepted.",
            labels=[*LABELS, "position"],
        )
        origins = CounterMetricFamily(
            "flyspec_output_tokens",
            "Tokens that became final, by origin.",
            labels=[*LABELS, "origin"],
        )
        lengths = HistogramMetricFamily(
            "flyspec_spec_decode_draft_length",
            "K: tokens drafted and checked in a round; 0 in plain decoding.",
            labels=LABELS,
        )
        for labels, tally in self.tallies.items():
            for position, count in enumerate(_beyond(tally.metrics.acceptance_histogram)):
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
        for drafter, times in self.times.items():
            times.rounds.add_to(rounds, [drafter])
            for part, buckets in zip(PARTS, times.parts, strict=True):
                buckets.add_to(parts, [drafter, part])
        yield from (positions, origins, lengths, rounds, parts)


_COUNTERS = (
    ("flyspec_rounds", "Rounds that were checked; a plain token is one.", "num_rounds"),
    ("flyspec_spec_decode_num_drafts", "Rounds with drafts.", "num_spec_steps"),
    (
        "flyspec_spec_decode_num_draft_tokens",
        "Tokens drafted and checked.",
        "num_draft_tokens",
    ),
    (
        "flyspec_spec_decode_num_accepted_tokens",
        "Of them, accepted for good.",
        "num_accepted_draft_tokens",
    ),
    (
        "flyspec_spec_decode_num_loose_tokens",
        "Tokens that became final although they differ from the target's own.",
        "num_loose_tokens",
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
    (
        "flyspec_spec_decode_num_plain_bursts",
        "Stretches of plain decoding.",
        "num_plain_bursts",
    ),
    (
        "flyspec_spec_decode_num_drafter_stops",
        "Proposals that ended early for want of confidence.",
        "num_drafter_stops",
    ),
    (
        "flyspec_spec_decode_num_scored_tokens",
        "Tokens of plain decoding that a drafter was asked about afterwards.",
        "num_scored_tokens",
    ),
    (
        "flyspec_spec_decode_num_agreed_tokens",
        "Of them, those that it would have proposed.",
        "num_agreed_tokens",
    ),
)
_OF_PACE = ("num_plain_bursts", "num_drafter_stops", "num_scored_tokens", "num_agreed_tokens")
"""Of `SpeculationMetrics`, what comes of K adapting."""


class Times:
    """Where the time of one drafter's rounds goes, in seconds; `parts` as `PARTS`."""

    __slots__ = ("parts", "rounds")

    def __init__(self) -> None:
        self.rounds = Buckets(STEP_SECONDS)
        self.parts = [Buckets(STEP_SECONDS) for _ in PARTS]

    def observe(self, round_: RoundOutcome) -> None:
        """A round that was checked."""
        assert round_.verdict is not None
        draft, verify, round_ns = round_.proposal.timings, round_.verdict.timings, round_.round_ns
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
        self._of_pace = [0] * len(_OF_PACE)

    def count(self, round_: RoundOutcome, final: Sequence[Token]) -> None:
        """A round that the ledger has recorded, and the tokens that became final with it."""
        if round_.proposal.drafter != self._drafter:
            self._drafter = round_.proposal.drafter
            self._tally = self._tally_of(self._drafter)
            self._times = self._metrics.times[self._metrics.label(self._drafter)]
        tally, verdict = self._tally, round_.verdict
        if verdict is not None:
            num_drafts = len(verdict.decisions)
            count = 1 + len(verdict.plain_token_ids)
            tally.metrics.num_rounds += count
            for _ in range(count):
                tally.drafted.observe(num_drafts)
            if num_drafts:
                tally.metrics.count(num_drafts, 0)
            self._times.observe(round_)
        origins = tally.origins
        for token in final:
            origins[token.origin] += 1
        self._take_over()

    def finish(self) -> None:
        """The ledger is finished: of windows still open, nothing stands."""
        if self._drafter is not None:
            self._take_over()
            saved_s = self._ledger.metrics.saved_ns / 1e9
            outcome = self._metrics.saved_seconds if saved_s > 0 else self._metrics.lost_seconds
            outcome.labels(self._metrics.label(self._drafter), self._rule).inc(abs(saved_s))

    def _tally_of(self, drafter: str) -> Tally:
        return self._metrics.tallies[self._metrics.label(drafter), self._rule]

    def _take_over(self) -> None:
        """What became final, whichever round it was drafted in."""
        ledger, metrics = self._ledger.metrics, self._tally.metrics
        for drafter, accepted in self._ledger.take_settled():
            own = drafter == self._drafter
            (metrics if own else self._tally_of(drafter).metrics).settle(accepted)
        if ledger.num_loose_tokens != self._num_loose:
            metrics.num_loose_tokens += ledger.num_loose_tokens - self._num_loose
            metrics.loose_cost_nats += ledger.loose_cost_nats - self._loose_cost_nats
            self._num_loose = ledger.num_loose_tokens
            self._loose_cost_nats = ledger.loose_cost_nats
        if ledger.num_rollbacks != self._num_rollbacks:
            metrics.num_rollbacks += ledger.num_rollbacks - self._num_rollbacks
            self._num_rollbacks = ledger.num_rollbacks
        for index, name in enumerate(_OF_PACE):
            if (count := getattr(ledger, name)) != self._of_pace[index]:
                more = count - self._of_pace[index]
                setattr(metrics, name, getattr(metrics, name) + more)
                self._of_pace[index] = count


def _beyond(histogram: Sequence[int]) -> list[int]:
    """For each i, how many counted values are larger than i."""
    return list(accumulate(reversed(histogram[1:])))[::-1]

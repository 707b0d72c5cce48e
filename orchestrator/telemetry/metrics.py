"""Metrics of generations, listed in docs/observability.md.

Token counts are plain numbers, turned into metrics when Prometheus scrapes them, so that a round
costs a few additions only. Drafters are labelled by their registered name, rules by their preset.
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
"""Drafter label of rounds without drafts."""
OTHERS = "other"
"""Label of all drafters beyond `MAX_DRAFTERS` and all keys beyond `MAX_KEYS`."""
MAX_DRAFTERS, MAX_KEYS = 64, 256
LABELS = ("drafter", "rule")
DRAFT_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 15, 16, 20, 24, 32, 48, 64)
PARTS = (
    "draft_queue", "draft", "draft_rpc", "verify_queue", "verify_step", "judge", "verify_rpc",
    "orchestrator",
)  # fmt: skip
ERRORS = FlyspecError.__subclasses__()
STATUSES = sorted({"OK", "CANCELLED", "INTERNAL", *(error.status for error in ERRORS)})


@dataclass(slots=True, eq=False)
class Tally:
    """Counts of one drafter under one rule, like those of `Ledger` for one generation.

    `drafted` is the distribution of draft tokens per round, `origins` counts tokens by origin.
    """

    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    drafted: Buckets = field(default_factory=lambda: Buckets(DRAFT_LENGTHS))
    origins: list[int] = field(default_factory=lambda: [0] * (len(Origin) + 1))


def _bounded(name: str, names: set[str], most: int) -> str:
    """Return the name as a label, or `OTHERS` if there are `most` other names already."""
    if name not in names and len(names) >= most:
        return OTHERS
    names.add(name)
    return name


class GenerationMetrics:
    """The metrics of all generations of an orchestrator.

    `tallies` are keyed by drafter label and rule, `times` by drafter label.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        self.times: defaultdict[str, Times] = defaultdict(Times)
        self._drafters: set[str] = {NOBODY}
        self._keys: set[str] = set()
        # fmt: off
        make = partial(Counter, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=REQUEST_SECONDS)
        self.requests = make(
            "flyspec_requests", "Finished requests by gRPC status and finish reason.",
            ["status", "finish_reason"])
        self._key_requests = make(
            "flyspec_key_requests",
            "Finished requests with an API key, by key name and gRPC status.", ["key", "status"])
        self._key_output_tokens = make(
            "flyspec_key_output_tokens", "Output tokens of requests with an API key, by key name.",
            ["key"])
        self.recoveries = make(
            "flyspec_recoveries",
            "Recoveries of generations from failed or removed services, by kind.", ["kind"])
        self.recovery_seconds = seconds(
            "flyspec_recovery_delay_seconds", "Delay of the stream by a recovery.", ["kind"])
        self.prompt_tokens = make("flyspec_prompt_tokens", "Prompt tokens of admitted requests.")
        self.saved_seconds = make(
            "flyspec_spec_decode_saved_seconds",
            "Time saved by drafting over plain decoding, in generations with adaptive K.", LABELS)
        self.lost_seconds = make(
            "flyspec_spec_decode_lost_seconds",
            "Time lost by drafting over plain decoding, in generations with adaptive K.", LABELS)
        self.queue_seconds = seconds(
            "flyspec_request_queue_time_seconds", "Time from a request's arrival to its admission.")
        self.first_token_seconds = seconds(
            "flyspec_time_to_first_token_seconds",
            "Time from a request's arrival to its first tokens, including queueing.", LABELS)
        self.token_seconds = seconds(
            "flyspec_request_time_per_output_token_seconds",
            "Mean time per output token of a completed request, after the first token.",
            LABELS, buckets=STEP_SECONDS)
        self.request_seconds = seconds(
            "flyspec_e2e_request_latency_seconds",
            "Time from arrival to completion of a completed request.", LABELS)
        # fmt: on
        for status in STATUSES:
            self.requests.labels(status, "stop" if status == "OK" else "")
        for kind in RecoveryKind:
            self.recoveries.labels(kind.name.lower())

    def label(self, drafter: str) -> str:
        return _bounded(drafter or NOBODY, self._drafters, MAX_DRAFTERS + 1)

    def count_key(self, key: str, status: str, num_output_tokens: int) -> None:
        name = _bounded(key, self._keys, MAX_KEYS)
        self._key_requests.labels(name, status).inc()
        self._key_output_tokens.labels(name).inc(num_output_tokens)

    def collect(self) -> Iterator[Metric]:
        for name, attribute, documentation in _COUNTERS:
            family = CounterMetricFamily(f"flyspec_{name}", documentation, labels=LABELS)
            for labels, tally in self.tallies.items():
                family.add_metric(labels, getattr(tally.metrics, attribute))
            yield family
        positions = CounterMetricFamily(
            "flyspec_spec_decode_num_accepted_tokens_per_pos",
            "Rounds in which the draft token at this position (from 0) was accepted.",
            labels=[*LABELS, "position"],
        )
        origins = CounterMetricFamily(
            "flyspec_output_tokens",
            "Output tokens by origin.",
            labels=[*LABELS, "origin"],
        )
        lengths = HistogramMetricFamily(
            "flyspec_spec_decode_draft_length",
            "K: draft tokens verified in a round; 0 in plain decoding.",
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
            "Time of a round, from requesting its proposal to its verdict.",
            labels=["drafter"],
        )
        parts = HistogramMetricFamily(
            "flyspec_round_part_seconds",
            "Time of the parts of a round. draft_rpc, verify_rpc: waits for a service beyond its "
            "own times. orchestrator: the rest.",
            labels=["drafter", "part"],
        )
        for drafter, times in self.times.items():
            times.rounds.add_to(rounds, [drafter])
            for part, buckets in zip(PARTS, times.parts, strict=True):
                buckets.add_to(parts, [drafter, part])
        yield from (positions, origins, lengths, rounds, parts)


_COUNTERS = (
    ("rounds", "num_rounds", "Verified rounds, including one per plainly decoded token."),
    ("spec_decode_num_drafts", "num_spec_steps", "Verified rounds with draft tokens."),
    ("spec_decode_num_accepted_tokens", "num_accepted_draft_tokens", "Accepted draft tokens."),
    *((f"spec_decode_{name}", name, documentation) for name, documentation in {
        "num_draft_tokens": "Verified draft tokens.",
        "num_loose_tokens": "Output tokens that differ from the target's own.",
        "loose_cost_nats":
            "Sum over those of log p(most likely) - log p(token) under the target.",
        "num_rollbacks": "Rollbacks: windows that failed after the round that opened them.",
        "num_staging_rounds": "Rounds for whose verdict others were staged at the target.",
        "num_staged_hits": "Those whose verdict began one of these.",
        "num_plain_bursts": "Stretches of plain decoding.",
        "num_drafter_stops": "Proposals that ended early because of low confidence.",
        "num_scored_tokens": "Plainly decoded tokens that a drafter scored afterwards.",
        "num_agreed_tokens": "Scored tokens that the drafter would have proposed.",
    }.items()),
)  # fmt: skip
"""Name, field of `SpeculationMetrics` and documentation of each counter."""
_TAKEN_OVER = [name for _, name, _ in _COUNTERS if name != "num_accepted_draft_tokens"]


class Times:
    """Durations in seconds of one drafter's rounds and of their parts, in the order of `PARTS`."""

    __slots__ = ("parts", "rounds")

    def __init__(self) -> None:
        self.rounds = Buckets(STEP_SECONDS)
        self.parts = [Buckets(STEP_SECONDS) for _ in PARTS]

    def observe(self, round_: RoundOutcome) -> None:
        assert round_.verdict is not None
        draft, verify = round_.proposal.timings, round_.verdict.timings
        self.rounds.observe(round_.round_ns * 1e-9)
        # What was drafted before the round began is not a part of it.
        drafting = min(draft.service_ns - draft.queue_ns, round_.drafting_ns)
        draft_queue = min(draft.queue_ns, round_.drafting_ns - drafting)
        judging = verify.service_ns - verify.queue_ns - verify.forward_ns
        of_head = min(verify.head_ns, max(0, judging - verify.judge_ns))
        # The caller had its time meanwhile; a service may have begun before it was asked.
        verify_rpc = max(0, min(round_.verifying_ns - verify.service_ns, round_.waiting_ns))
        spent = round_.drafting_ns + verify.service_ns + verify_rpc
        durations = (
            draft_queue, drafting + of_head, round_.drafting_ns - drafting - draft_queue,
            verify.queue_ns, verify.forward_ns, judging - of_head, verify_rpc,
            max(0, round_.round_ns - spent),
        )  # fmt: skip
        for part, duration_ns in zip(self.parts, durations, strict=True):
            part.observe(duration_ns * 1e-9)


class RoundCounter:
    """Counts the rounds of one generation, whose ledger is `ledger`."""

    def __init__(self, metrics: GenerationMetrics, rule: str, ledger: Ledger) -> None:
        self._metrics, self._rule, self._ledger = metrics, rule, ledger
        self._drafter: str | None = None
        self._counted = SpeculationMetrics()
        """The ledger's counts that are in the tallies."""

    def count(self, round_: RoundOutcome, final: Sequence[Token]) -> None:
        """Count a round already in the ledger, and the tokens that became final with it."""
        if round_.proposal.drafter != self._drafter:
            self._drafter = round_.proposal.drafter
            self._tally = self._tally_of(self._drafter)
            self._times = self._metrics.times[self._metrics.label(self._drafter)]
        if round_.verdict is not None:
            ledger, counted = self._ledger.metrics, self._counted  # none beyond the output's end
            num_drafts = ledger.num_draft_tokens - counted.num_draft_tokens
            self._tally.drafted.observe(num_drafts, ledger.num_rounds - counted.num_rounds)
            self._times.observe(round_)
        origins = self._tally.origins
        for token in final:
            origins[token.origin] += 1
        self._take_over()

    def finish(self) -> None:
        """Count the rest once the ledger is finished; open windows no longer count as accepted."""
        if self._drafter is not None:
            self._take_over()
            saved_s = self._ledger.metrics.saved_ns / 1e9
            outcome = self._metrics.saved_seconds if saved_s > 0 else self._metrics.lost_seconds
            outcome.labels(self._metrics.label(self._drafter), self._rule).inc(abs(saved_s))

    def _tally_of(self, drafter: str) -> Tally:
        return self._metrics.tallies[self._metrics.label(drafter), self._rule]

    def _take_over(self) -> None:
        """Add what the ledger counts more to the tally; accepted drafts to their drafter's."""
        ledger, counted, metrics = self._ledger.metrics, self._counted, self._tally.metrics
        for drafter, accepted in self._ledger.take_settled():
            own = drafter == self._drafter
            (metrics if own else self._tally_of(drafter).metrics).settle(accepted)
        for name in _TAKEN_OVER:
            now, before = getattr(ledger, name), getattr(counted, name)
            if now != before:
                setattr(metrics, name, getattr(metrics, name) + now - before)
                setattr(counted, name, now)


def _beyond(histogram: Sequence[int]) -> list[int]:
    """Return, for each i, how many of the counted values are larger than i."""
    return list(accumulate(reversed(histogram[1:])))[::-1]

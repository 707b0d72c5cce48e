"""Descriptions and status of services, drafters and the orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from flyspec.values.rounds import DraftCounts, SessionStatus


class BreakerState(IntEnum):
    """State of the circuit breaker of a failed service."""

    CLOSED = 1
    OPEN = 2
    HALF_OPEN = 3


class DrafterState(IntEnum):
    """State of a drafter in its life cycle."""

    REGISTERED = 1
    CANARY = 2
    ACTIVE = 3
    DRAINING = 4


PROTOCOL_VERSION = 1


BATCH_INVARIANT = "batch-invariant"
"""In a model's `numerics`: results do not depend on what else is in the batch."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model (see the proto message of this name)."""

    name: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_length: int
    dtype: str = ""
    device: str = ""
    num_parameters: int = 0
    weights_fingerprint: str = ""
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A service's process; a new `instance_id` means that it was restarted.

    `step_running_ns` is the time the current model step has been running, 0 between steps.
    """

    instance_id: str = ""
    process_id: int = 0
    num_model_loads: int = 0
    uptime_ns: int = 0
    step_running_ns: int = 0


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A drafter that a draft service offers (see the proto message of this name)."""

    name: str
    kind: str
    model: ModelInfo | None = None
    tokenizer_fingerprint: str = ""
    num_top_tokens: int = 0
    max_proposals_ahead: int = 0
    makes_trees: bool = False


@dataclass(frozen=True, slots=True)
class DraftServiceInfo:
    """Response of `DraftService.Describe`."""

    drafters: tuple[DrafterInfo, ...]
    sessions: SessionStatus
    max_speculative_tokens: int
    protocol_version: int = PROTOCOL_VERSION
    process: ProcessInfo = field(default_factory=ProcessInfo)
    tokenizer_fingerprints: tuple[str, ...] = ()


class MeasuredStep(NamedTuple):
    """Measured duration of a target step by number of tokens."""

    num_tokens: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class JudgeInfo:
    """A trained judge of mismatches (see the proto message of this name)."""

    fingerprint: str
    threshold: float


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """A draft head beside the target (see the proto message of this name)."""

    name: str
    kind: str
    max_tokens: int
    num_parameters: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class VerifyServiceInfo:
    """Response of `VerifyService.Describe`; `step_costs` are measured at startup.

    `max_rules` is of a session; services from before phases say 0, which means 1.
    """

    model: ModelInfo
    sessions: SessionStatus
    max_speculative_tokens: int
    max_plain_tokens: int
    rules: tuple[str, ...]
    protocol_version: int = PROTOCOL_VERSION
    process: ProcessInfo = field(default_factory=ProcessInfo)
    step_costs: tuple[MeasuredStep, ...] = ()
    max_rules: int = 0
    judge: JudgeInfo | None = None
    heads: tuple[HeadInfo, ...] = ()
    max_staged_rounds: int = 0
    takes_trees: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """The target's tokenizer, chat templates and special IDs: all the orchestrator needs.

    `chat_template` is the default one, `named_chat_templates` has the others if there are several,
    such as `tool_use`. `special_tokens` are the tokenizer's, such as `bos_token`, as text.
    """

    tokenizer_json: bytes
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    control_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    chat_template: str = ""
    generation_config_json: str = ""
    named_chat_templates: tuple[tuple[str, str], ...] = ()
    special_tokens: tuple[tuple[str, str], ...] = ()

    def facts(self, vocab_size: int) -> TokenizerFacts:
        return TokenizerFacts(
            self.fingerprint, self.eos_token_ids, self.control_token_ids, vocab_size
        )


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Data that a drafter with another tokenizer needs besides the target's `tokenizer.json`.

    `vocab_size` is the number of rows of the target's output layer.
    """

    fingerprint: str
    eos_token_ids: tuple[int, ...]
    control_token_ids: tuple[int, ...]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class UpstreamStatus:
    """A service used by the orchestrator; `error` says why it is not ready.

    `faults_total` counts a drafter's invalid messages; `last_fault` describes the last one and its
    request.
    """

    address: str = ""
    ready: bool = False
    error: str = ""
    sessions: SessionStatus = field(default_factory=SessionStatus)
    model: ModelInfo | None = None
    process: ProcessInfo = field(default_factory=ProcessInfo)
    breaker: BreakerState = BreakerState.CLOSED
    active_generations: int = 0
    faults_total: int = 0
    last_fault: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """State of the orchestrator and its services."""

    ready: bool
    active_generations: int
    waiting_generations: int
    targets: Sequence[UpstreamStatus] = ()
    drafters: Sequence[UpstreamStatus] = ()
    outstanding_tokens: int = 0
    draining: bool = False
    refused_total: int = 0

    @property
    def verify(self) -> UpstreamStatus:
        return self.targets[0] if self.targets else UpstreamStatus()

    @property
    def draft(self) -> UpstreamStatus:
        return self.drafters[0] if self.drafters else UpstreamStatus()


@dataclass(slots=True)
class DrafterStats(DraftCounts):
    """A drafter's totals since it was registered (see the proto message of this name)."""

    active_generations: int = 0
    generations_total: int = 0
    failures_total: int = 0
    proposal_ns_total: int = 0
    num_emitted_tokens: int = 0
    round_ns_total: int = 0

    @property
    def mean_accepted_tokens(self) -> float:
        """Emitted tokens per round with drafts; 0 without any."""
        return self.num_emitted_tokens / max(1, self.num_spec_steps)

    @property
    def mean_proposal_ms(self) -> float:
        """Mean time of a proposal, measured by the orchestrator, ms."""
        return self.proposal_ns_total / 1e6 / max(1, self.num_spec_steps)

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of rounds with this drafter; 0 without any."""
        return self.num_emitted_tokens / (self.round_ns_total / 1e9) if self.round_ns_total else 0.0


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """A drafter that requests can name; `reason` says why it is not usable."""

    name: str
    kind: str
    usable: bool
    reason: str
    model: ModelInfo | None
    state: DrafterState = DrafterState.REGISTERED
    share: float = 0.0
    translated: bool = False
    replicas: Sequence[UpstreamStatus] = ()
    stats: DrafterStats = field(default_factory=DrafterStats)

    @property
    def active(self) -> bool:
        """True if it is the default for new generations."""
        return self.state is DrafterState.ACTIVE

    @property
    def address(self) -> str:
        return ",".join(replica.address for replica in self.replicas)

    def document(self) -> dict[str, Any]:
        """Return it for JSON: enums by name, and rates computed from the counts."""
        document = asdict(self)
        document |= {"active": self.active, "address": self.address, "state": self.state.name}
        for replica, status in zip(document["replicas"], self.replicas, strict=True):
            replica["breaker"] = status.breaker.name
        document["stats"] |= {
            "draft_acceptance_rate": self.stats.draft_acceptance_rate,
            "mean_accepted_tokens": self.stats.mean_accepted_tokens,
            "mean_proposal_ms": self.stats.mean_proposal_ms,
            "tokens_per_s": self.stats.tokens_per_s,
        }
        return document

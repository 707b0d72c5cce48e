"""What an operator is told: plain values, no I/O, no protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flyspec.messages import ModelInfo, ProcessInfo, SessionStatus
from flyspec.types import BreakerState, DrafterState


@dataclass(frozen=True, slots=True)
class UpstreamStatus:
    """A service behind the orchestrator; `error` says what is wrong when it is not ready."""

    address: str
    ready: bool
    error: str
    sessions: SessionStatus
    model: ModelInfo | None
    process: ProcessInfo = field(default_factory=ProcessInfo)
    breaker: BreakerState = BreakerState.CLOSED
    active_generations: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """State of the orchestrator and of the services behind it.

    `verify` and `draft` are the first of `targets` and `drafters`.
    """

    ready: bool
    active_generations: int
    waiting_generations: int
    verify: UpstreamStatus
    draft: UpstreamStatus
    targets: Sequence[UpstreamStatus] = ()
    drafters: Sequence[UpstreamStatus] = ()
    outstanding_tokens: int = 0
    draining: bool = False
    refused_total: int = 0


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """What a drafter did since it was registered (see the proto message of this name)."""

    active_generations: int = 0
    generations_total: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    failures_total: int = 0
    proposal_ns_total: int = 0
    num_emitted_tokens: int = 0
    round_ns_total: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the drafted tokens that was accepted; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_accepted_tokens(self) -> float:
        """Emitted tokens a round with drafts; 0 without any."""
        return self.num_emitted_tokens / max(1, self.num_spec_steps)

    @property
    def mean_proposal_ms(self) -> float:
        """Mean time of a proposal as the orchestrator sees it, ms."""
        return self.proposal_ns_total / 1e6 / max(1, self.num_spec_steps)

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens a second of a generation's rounds with this drafter; 0 without any."""
        return self.num_emitted_tokens / (self.round_ns_total / 1e9) if self.round_ns_total else 0.0


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """A drafter that requests can name; `reason` says why it is not usable."""

    name: str
    kind: str
    active: bool
    address: str
    usable: bool
    reason: str
    model: ModelInfo | None
    state: DrafterState = DrafterState.REGISTERED
    share: float = 0.0
    translated: bool = False
    replicas: Sequence[UpstreamStatus] = ()
    stats: DrafterStats = field(default_factory=DrafterStats)

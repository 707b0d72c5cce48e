"""A registered drafter: one kind of drafting at a service's replicas, and its statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flyspec.recent import Patience
from flyspec.telemetry.metrics import STEP_SECONDS, Buckets
from flyspec.values.admin import DrafterInfo, DrafterState, DrafterStats, ModelInfo
from flyspec.values.rounds import MAX_STAGED_ROUNDS, MAX_TOP_TOKENS
from flyspec.values.tokens import Origin
from orchestrator.fleet.heads import TargetHead
from orchestrator.fleet.replicas import Pool, Replica
from orchestrator.upstreams.proposal_checks import DraftFault
from orchestrator.upstreams.protocol import DraftUpstream


@dataclass(eq=False, slots=True)
class RegisteredDrafter:
    """A registered drafter: at a draft service (`pool`), a `head` of the target, or both.

    With both it is a relay: the service's drafter `extends` the head's proposals. Without either,
    it is prompt lookup inside the orchestrator. `users` are the generations drafting with it now;
    `faults` counts its invalid responses, `proposal_seconds` has how long its proposals took.
    """

    name: str
    kind: str
    pool: Pool[DraftUpstream] | None
    state: DrafterState = DrafterState.REGISTERED
    share: float = 0.0
    stats: DrafterStats = field(default_factory=DrafterStats)
    users: set[object] = field(default_factory=set)
    faults: Counter[DraftFault] = field(default_factory=Counter)
    head: TargetHead | None = None
    proposal_seconds: Buckets = field(default_factory=lambda: Buckets(STEP_SECONDS))
    extends: str = ""
    _owed: float = 0.0
    _retrieval: Patience = field(default_factory=Patience)

    def proposed(self, duration_ns: int) -> None:
        """Count a proposal that took so long."""
        self.stats.proposal_ns_total += duration_ns
        self.proposal_seconds.observe(duration_ns / 1e9)

    @property
    def replicas(self) -> list[Replica[DraftUpstream]]:
        return self.pool.replicas if self.pool else []

    @property
    def service_kind(self) -> str:
        """The name of its drafter at the draft service."""
        return self.extends or self.kind

    @property
    def info(self) -> DrafterInfo | None:
        """Its description, as last reported by a replica; None if none has answered."""
        for replica in self.replicas:
            offered = replica.info.drafters if replica.info is not None else ()
            if info := of_kind(offered, self.service_kind):
                return info
        return None

    @property
    def model(self) -> ModelInfo | None:
        """Its draft model; None if it has none or is not known."""
        info = self.info
        return info.model if info else None

    def num_top_tokens(self, origins: Collection[Origin]) -> int:
        """Return how many likely tokens the target is to tell it of, given its drafts' origins.

        They cost each row of the target's round. A drafter with a model that has drafted nothing
        but the model's tokens for some time is told of fewer rounds.
        """
        info = self.info
        wanted = min(MAX_TOP_TOKENS, info.num_top_tokens) if info else 0
        if Origin.EXACT_LOOKUP in origins:
            self._retrieval.paid()
            return wanted
        return wanted if wanted and self._retrieval.tries() else 0

    @property
    def max_proposals_ahead(self) -> int:
        """Maximum proposals that it makes ahead of a verdict, by itself."""
        info = self.info
        return min(MAX_STAGED_ROUNDS, info.max_proposals_ahead) if info and not self.head else 0

    @property
    def makes_trees(self) -> bool:
        info = self.info
        return info is not None and info.makes_trees

    def relative_size(self, target: ModelInfo) -> float:
        """Return its model's parameters divided by the target's; 0 without a model."""
        model = self.model
        return 0.0 if model is None else model.num_parameters / max(1, target.num_parameters)

    @property
    def usable(self) -> bool:
        """True if it can draft now; a relay can while one of its parts can."""
        if self.head is not None and self.head.usable:
            return True
        return bool(self.pool.usable) if self.pool is not None else self.head is None

    @property
    def reason(self) -> str:
        if self.usable:
            return ""
        return "; ".join(part.reason for part in (self.head, self.pool) if part is not None)

    @property
    def max_draft_tokens(self) -> int | None:
        """Maximum tokens per proposal; None for no limit."""
        limits = (r.info.max_speculative_tokens for r in self.replicas if r.info)
        return min(limits, default=None)

    def takes_its_turn(self) -> bool:
        """True if this drafter, a canary, gets the next new generation: every (1 / share)th."""
        self._owed += self.share
        if self._owed < 1.0 - 1e-9:
            return False
        self._owed -= 1.0
        return True


def of_kind(offered: Sequence[DrafterInfo], kind: str) -> DrafterInfo | None:
    """Return the drafter of that kind among those a service offers, if any."""
    return next((info for info in offered if info.name == kind), None)

"""A draft head of the target, as far as its replicas have it."""

from __future__ import annotations

from dataclasses import dataclass

from flyspec.values.admin import HeadInfo
from orchestrator.fleet.replicas import Pool, Replica
from orchestrator.upstreams.protocol import VerifyUpstream


def head_of(replica: Replica[VerifyUpstream], name: str) -> HeadInfo | None:
    """Return a replica's head of that name, as last described."""
    heads = replica.info.heads if replica.info is not None else ()
    return next((head for head in heads if head.name == name), None)


@dataclass(frozen=True, slots=True)
class TargetHead:
    """A head by its name at the replicas of the target.

    It can be used while all replicas that can be used have the same one: a generation may move to
    any of them.
    """

    name: str
    targets: Pool[VerifyUpstream]

    @property
    def info(self) -> HeadInfo | None:
        """Its description by the first replica that has it; None if none has."""
        replicas = [*self.targets.usable, *self.targets.replicas]
        return next(filter(None, (head_of(replica, self.name) for replica in replicas)), None)

    @property
    def reason(self) -> str:
        """Why it cannot be used; empty if it can."""
        usable = self.targets.usable
        if not usable:
            return self.targets.reason
        info = self.info
        for replica in usable:
            own = head_of(replica, self.name)
            if own is None:
                return f"the verify service at {replica.address} has no head {self.name!r}"
            if info is not None and own.fingerprint != info.fingerprint:
                return (
                    f"the head {self.name!r} of the verify service at {replica.address} has other "
                    f"weights ({own.fingerprint}) than elsewhere ({info.fingerprint})"
                )
        return ""

    @property
    def usable(self) -> bool:
        return not self.reason

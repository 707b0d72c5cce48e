"""A generation's session on one replica of a pool at a time."""

from __future__ import annotations

import time
from typing import Any, Generic, Protocol, TypeVar

from flyspec.errors import UnavailableError
from orchestrator.fleet.replicas import Replica
from orchestrator.generation.ledger import Ledger
from orchestrator.upstreams.protocol import Correlation, Upstream, UpstreamSession

U = TypeVar("U", bound=Upstream[Any, Any, Any])
S = TypeVar("S", bound=UpstreamSession)


class Usable(Protocol[U]):
    """A source of replicas."""

    @property
    def usable(self) -> list[Replica[U]]: ...


class PooledSession(Generic[U, S]):
    """The common part of drafting and verifying; `weight` is the generation's maximum tokens.

    `_trouble` is the time and cause of a session's loss, recorded once a new session works.
    """

    def __init__(
        self,
        weight: int,
        ledger: Ledger,
        correlation: Correlation,
    ) -> None:
        self._weight, self._ledger, self._correlation = weight, ledger, correlation
        self._replica: Replica[U] | None = None
        self._session: S | None = None
        self._trouble: tuple[int, object] | None = None

    def _join(self, replica: Replica[U], open_: Any) -> S:
        session: S = replica.service.open(open_, self._ledger.metrics, self._correlation)
        self._session, self._replica = session, replica
        replica.join(session, self._weight)
        return session

    def _move_on(self, pool: Usable[U]) -> None:
        """Leave a replica that takes no new sessions, if another one in the pool is usable."""
        replica = self._replica
        if replica is None or replica.takes_new:
            return
        if any(other is not replica for other in pool.usable):
            self._close_session()
            reason = f"{replica.address} takes no new sessions: {replica.problem or 'it left'}"
            self._trouble = time.perf_counter_ns(), UnavailableError(reason)

    def _close_session(self) -> None:
        session, replica = self._session, self._replica
        self._session = self._replica = None
        if session is not None and replica is not None:
            session.close()
            replica.leave(session)

    def close(self) -> None:
        self._close_session()

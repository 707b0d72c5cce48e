"""The registry of drafters: which exist, which one new generations use, and their statistics.

Drafting itself is in `orchestrator.generation.drafting`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from flyspec.drafter_names import LOOKUP, NAME, NAME_RULE, PREDICTION, RELAY
from flyspec.errors import (
    AlreadyExistsError,
    IncompatibleError,
    InvalidArgumentError,
    NotFoundError,
    StateError,
    UnavailableError,
)
from flyspec.ranges import Range
from flyspec.values.admin import DrafterInfo, DrafterState, DrafterStats, HeadInfo
from orchestrator.fleet.discovery import Addresses
from orchestrator.fleet.drafter import RegisteredDrafter, of_kind
from orchestrator.fleet.heads import TargetHead
from orchestrator.fleet.replicas import Pool, Replica
from orchestrator.upstreams.proposal_checks import DraftFault
from orchestrator.upstreams.protocol import DraftUpstream, VerifyUpstream

log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.02
_TAKEN = {PREDICTION: "predicted outputs", RELAY: "a head that a draft service extends"}


class Drafters:
    """The registered drafters. Exactly one is active, the default.

    `connect` creates a pool, not started, for an address, a name and the kind of drafter that is
    tried there, empty for its first one. `read` parses the addresses given by the operator, or
    raises `ConfigError`.
    """

    def __init__(
        self,
        connect: Callable[[str, str, str], Pool[DraftUpstream]],
        read: Callable[[str, str], Addresses] = Addresses,
    ) -> None:
        self._connect, self._read = connect, read
        self.lookup = RegisteredDrafter(LOOKUP, LOOKUP, None, DrafterState.ACTIVE)
        """Prompt lookup in the orchestrator, even if requests cannot select it by name."""
        self._drafters = {LOOKUP: self.lookup}
        self.active = self.lookup
        """The default drafter."""
        self._changing = asyncio.Lock()
        self._offered: set[str] = set()  # heads and the relay, once each

    # --- lookup -----------------------------------------------------------------------------

    @property
    def all(self) -> list[RegisteredDrafter]:
        """All drafters, the active one first."""
        return [self.active, *(d for d in self._drafters.values() if d is not self.active)]

    @property
    def pools(self) -> list[Pool[DraftUpstream]]:
        return list(dict.fromkeys(d.pool for d in self.all if d.pool is not None))

    def get(self, name: str) -> RegisteredDrafter:
        """Return the drafter with that name. Raises `NotFoundError`."""
        try:
            return self._drafters[name]
        except KeyError:
            raise NotFoundError(
                f"no drafter {name!r}; choose from {', '.join(d.name for d in self.all)}"
            ) from None

    def adopt(self, pool: Pool[DraftUpstream], offered: Sequence[DrafterInfo]) -> None:
        """Register the drafters of the `--draft-address` service; its first becomes the default.

        Called once, so it never undoes the operator's changes. Existing names keep their drafters,
        except prompt lookup, which the service takes over if it offers it.
        """
        known, self._drafters = self._drafters, {}
        for info in offered:
            drafter = known.pop(info.name, self.lookup)
            if drafter is self.lookup:
                drafter = RegisteredDrafter(info.name, info.name, pool)
            self._drafters[info.name] = drafter
        self._drafters |= known
        if self.active is self.lookup:
            self._make_active(self._drafters[offered[0].name])
        self._add_relay()

    def adopt_heads(self, targets: Pool[VerifyUpstream], offered: Sequence[HeadInfo]) -> None:
        """Register heads of the target when they are first seen. Existing names keep theirs."""
        for info in offered:
            if info.name in self._offered:
                continue
            self._offered.add(info.name)
            if info.name in self._drafters:
                log.warning("head %s: a drafter of that name exists already", info.name)
                continue
            head = TargetHead(info.name, targets)
            self._drafters[info.name] = RegisteredDrafter(info.name, info.kind, None, head=head)
            log.info("drafter %s registered: the target's %s head", info.name, info.kind)
        self._add_relay()

    def _add_relay(self) -> None:
        """Register the relay once there are a head and a draft service's model."""
        if RELAY in self._offered:
            return
        drafters = [*self._drafters.values()]
        head = next((d.head for d in drafters if d.head is not None), None)
        service = next((d for d in drafters if d.pool is not None and d.model is not None), None)
        if head is not None and service is not None:
            self._offered.add(RELAY)
            self._drafters[RELAY] = RegisteredDrafter(
                RELAY, RELAY, service.pool, head=head, extends=service.kind
            )

    # --- assignment -------------------------------------------------------------------------

    def check(self, name: str) -> None:
        """Check that a request may use drafter `name`; an empty name is always allowed.

        Raises `NotFoundError`, `StateError`.
        """
        if not name:
            return
        try:
            drafter = self.get(name)
        except NotFoundError as error:
            raise NotFoundError(f"speculation.drafter: {error}") from None
        if drafter.state is DrafterState.DRAINING:
            raise StateError(
                f"speculation.drafter: {name!r} is draining; use {self.active.name!r} instead"
            )

    def assign(self, name: str) -> RegisteredDrafter:
        """Assign a drafter to a new generation that requested `name` (empty: no preference).

        If the drafter was removed since `check`, assigns the active one.
        """
        if name:
            drafter = self._drafters.get(name, self.active)
        else:
            drafter = self.active
            for canary in self._drafters.values():
                if canary.state is DrafterState.CANARY and canary.takes_its_turn():
                    drafter = canary if canary.usable else drafter
                    break
        drafter.stats.generations_total += 1
        return drafter

    def current(self, assigned: RegisteredDrafter, by_name: bool) -> RegisteredDrafter:
        """Return the drafter that a generation assigned to `assigned` should use now."""
        if self._drafters.get(assigned.name) is not assigned:
            return self.active
        if assigned.state is DrafterState.DRAINING:
            return self.active
        if by_name or assigned.state is DrafterState.CANARY:
            return assigned
        return self.active

    def stats_of(self, name: str) -> DrafterStats | None:
        """Return a drafter's statistics; None if it was removed."""
        drafter = self._drafters.get(name, self.lookup if name == LOOKUP else None)
        return drafter.stats if drafter else None

    def faulted(self, replica: Replica[DraftUpstream], kind: str, fault: DraftFault) -> None:
        """Count a fault in a trial of a replica's drafter of that kind."""
        for drafter in self.all:
            if drafter.service_kind == kind and replica in drafter.replicas:
                drafter.faults[fault] += 1
                return

    def ladder(self, first: RegisteredDrafter) -> Iterator[RegisteredDrafter]:
        """Yield usable drafters in order: `first`, the active one, the others.

        Skips prompt lookup and draining drafters, except as `first`.
        """
        yield from (d for d in (first,) if d.usable)
        others = [d for d in self.all if d is not first]
        for drafter in others:
            takes_work = drafter.state is not DrafterState.DRAINING
            if takes_work and drafter.kind != LOOKUP and drafter.usable:
                yield drafter

    # --- operator actions -------------------------------------------------------------------

    async def register(self, name: str, address: str, kind: str) -> tuple[RegisteredDrafter, int]:
        """Probe and add a drafter, or an address to an existing one.

        Returns the drafter and the time the probe took, in ns.
        """
        if taken := _TAKEN.get(name):
            raise InvalidArgumentError(f"name: {name!r} stands for {taken}; use another")
        if not NAME.fullmatch(name):
            raise InvalidArgumentError(f"name: invalid name {name!r}; {NAME_RULE}")
        async with self._changing:
            known = self._drafters.get(name)
            if known is not None:
                return known, await self._add_address(known, address, kind)
            pool = self._connect(address, name, kind)
            try:
                await pool.start()
                drafter = RegisteredDrafter(name, kind, pool)
                probe_ns = self._tried(drafter, pool.replicas, address)
            except BaseException:
                await pool.close()
                raise
            self._drafters[name] = drafter
            self._add_relay()
            log.info("drafter %s registered: %s at %s", name, drafter.kind, address)
            return drafter, probe_ns

    async def _add_address(self, drafter: RegisteredDrafter, address: str, kind: str) -> int:
        """Add an address to an existing drafter; return the time its probe took, in ns."""
        pool = drafter.pool
        if pool is None or drafter.head is not None or kind not in ("", drafter.kind):
            raise AlreadyExistsError(
                f"name: drafter {drafter.name!r} already exists with kind {drafter.kind}; remove "
                "it first, or choose another name"
            )
        addresses = self._read(address, "address")
        added = await pool.add(addresses)
        try:
            if not added:
                raise AlreadyExistsError(f"drafter {drafter.name!r} already has address {address}")
            return self._tried(drafter, added, address)
        except BaseException:
            await pool.drop(addresses)
            raise

    def _tried(
        self, drafter: RegisteredDrafter, replicas: Sequence[Replica[DraftUpstream]], address: str
    ) -> int:
        """Determine the drafter's kind; return the time that a replica's trial took, in ns."""
        answered = [r for r in replicas if r.info is not None]
        replica = next((r for r in answered if r.usable), answered[0] if answered else None)
        if replica is None:
            problems = "; ".join(r.problem for r in replicas)
            raise UnavailableError(f"address: {address}: {problems or 'name not found'}")
        offered = replica.info.drafters
        if not drafter.kind:
            drafter.kind = offered[0].name
        if of_kind(offered, drafter.kind) is None:
            raise NotFoundError(
                f"kind: {address} has no drafter {drafter.kind!r}; "
                f"choose from {', '.join(info.name for info in offered)}"
            )
        if not replica.usable:
            raise IncompatibleError(
                f"address: {drafter.name!r} cannot draft for this target: {replica.reason}"
            )
        return replica.trial_ns

    def activate(self, name: str, share: float | None) -> RegisteredDrafter:
        """Route new generations without a named drafter to this one.

        A `share` of None or 1 means all of them, and makes it the active drafter. A head that was
        drained comes back so: it has no address to register it by again.
        """
        drafter = self.get(name)
        if share is not None:
            Range(0.0, 1.0).check("share", share)
        if drafter.state is DrafterState.DRAINING and drafter.head is None:
            raise StateError(f"drafter {name!r} is draining; remove it and register it again")
        if share != 0 and not drafter.usable:
            raise StateError(f"drafter {name!r} is not usable: {drafter.reason}")
        if share is None or share == 1:
            self._make_active(drafter)
            log.info("drafter %s is active", name)
            return drafter
        if drafter is self.active:
            raise StateError(
                f"drafter {name!r} is active; activate another first, then give this one a share"
            )
        canaries = [d for d in self._drafters.values() if d.state is DrafterState.CANARY]
        others = sum(d.share for d in canaries if d is not drafter)
        if others + share > 1:
            raise InvalidArgumentError(
                f"share: other canaries already have {others:g}; at most {1 - others:g} is left"
            )
        drafter.share = share
        drafter.state = DrafterState.CANARY if share else DrafterState.REGISTERED
        log.info("drafter %s gets a share of %g of new generations", name, share)
        return drafter

    def _make_active(self, drafter: RegisteredDrafter) -> None:
        if self.active is not drafter:
            self.active.state = DrafterState.REGISTERED
        self.active, drafter.state, drafter.share = drafter, DrafterState.ACTIVE, 0.0

    def _get_other(self, name: str) -> RegisteredDrafter:
        """Return the drafter with that name. Raises `StateError` if it is the active one."""
        drafter = self.get(name)
        if drafter is self.active:
            raise StateError(f"drafter {name!r} is active; activate another first")
        return drafter

    async def drain(self, name: str, wait_s: float) -> RegisteredDrafter:
        """Stop routing generations to a drafter, and wait up to `wait_s` for its own to leave."""
        drafter = self._get_other(name)
        drafter.state, drafter.share = DrafterState.DRAINING, 0.0
        log.info("draining drafter %s: %d generations", name, len(drafter.users))
        deadline = time.monotonic() + wait_s
        while drafter.users and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_S)
        return drafter

    async def remove(self, name: str, force: bool) -> None:
        """Unregister a drafter, and close its connections if no other drafter uses them."""
        async with self._changing:
            drafter = self._get_other(name)
            if drafter.users and not force:
                raise StateError(
                    f"{len(drafter.users)} generations are using {name!r}; drain it first, or "
                    "use force"
                )
            del self._drafters[name]
            if LOOKUP not in self._drafters:
                self.lookup.state = DrafterState.REGISTERED
                self._drafters[LOOKUP] = self.lookup
            log.info("drafter %s removed", name)
            if drafter.pool is not None and drafter.pool not in self.pools:
                for replica in drafter.pool.replicas:
                    replica.cut()
                await drafter.pool.close()

    async def close(self) -> None:
        for pool in self.pools:
            await pool.close()

"""The services the orchestrator uses: the target and the drafters, and their compatibility."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flyspec.config import OrchestratorSettings
from flyspec.drafter_names import named_values
from flyspec.errors import ConfigError, FlyspecError, IncompatibleError, UnavailableError
from flyspec.security import is_loopback
from flyspec.tokenizer import Tokenizer
from flyspec.values.admin import ModelInfo, VerifyServiceInfo
from orchestrator.fleet.breaker import Breaker
from orchestrator.fleet.discovery import Addresses
from orchestrator.fleet.drafter import of_kind
from orchestrator.fleet.drafters import Drafters
from orchestrator.fleet.handshake import drafter_misfit, fitting, protocol_misfit, try_drafter
from orchestrator.fleet.replicas import Pool, Replica
from orchestrator.fleet.target import Kinds, Target, difference
from orchestrator.fleet.target_replicas import TargetReplicas
from orchestrator.upstreams.proposal_checks import DrafterFaultError
from orchestrator.upstreams.protocol import Connector, DraftUpstream, VerifyUpstream

log = logging.getLogger(__name__)

DRAFT_WAIT_S = 30.0
ADOPT_S = 0.2
TARGET_LONGEST_REST_S = 0.4
"""Maximum seconds between attempts to reach a restarted target; generations wait for it."""


class Fleet:
    """The target's replicas and the drafters, connected and watched."""

    def __init__(self, settings: OrchestratorSettings, connector: Connector) -> None:
        self._settings = settings
        self._connector = connector
        self._target: Target | None = None
        self._kinds = Kinds(settings.allow_mixed_numerics)
        self._on_target: list[Callable[[Target], None]] = []
        self.targets: Pool[VerifyUpstream] = Pool(
            "verify service",
            self._addresses(settings.verify_address, "--verify-address"),
            connector.to_verify,
            self._accept_target,
            lambda: Breaker(
                longest_s=TARGET_LONGEST_REST_S, trials=False, trial_s=settings.round_timeout_s
            ),
            settings.probe_interval_s,
            settings.probe_timeout_s,
            self._misfit,
        )
        self.drafters = Drafters(self._connect_drafter, self._addresses)
        self._draft_pool: Pool[DraftUpstream] | None = None
        if settings.draft_address:
            self._draft_pool = self._connect_drafter(settings.draft_address, "draft service")
        self._named = _named_addresses(settings.drafters)
        self.missing: dict[str, str] = {}
        """Drafters named in the settings that have not drafted yet, and why."""
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> None:
        """Wait for the target, and up to `DRAFT_WAIT_S` each for the draft service and the others.

        The draft service and each drafter named in the settings has answered a request then, or
        is `missing`.

        Raises `IncompatibleError` if a service answers but is not compatible.
        """
        await self.targets.start()
        replica = await self._first_target()
        self._target = await self._read_target(replica.service, replica.info)
        if (pool := self._draft_pool) is not None:
            # Its first probe may wait for a tokenizer to be prepared.
            self._tasks.append(asyncio.create_task(pool.start()))
            deadline = time.monotonic() + DRAFT_WAIT_S
            while not self._adopt(pool):
                _refuse_misfit(pool)
                if time.monotonic() > deadline:
                    self.missing[pool.name] = pool.reason
                    self._tasks.append(asyncio.create_task(self._keep_adopting(pool)))
                    break
                await pool.changed(ADOPT_S)
        named = [asyncio.create_task(self._register(*item)) for item in self._named.items()]
        if named:
            self._tasks += named
            await asyncio.wait(named, timeout=DRAFT_WAIT_S)

    async def _first_target(self) -> Replica[VerifyUpstream]:
        """Wait for a usable replica of the target; prefer the most common model."""
        pool, waiting = self.targets, False
        while not pool.usable:
            _refuse_misfit(pool)
            if not waiting and pool.replicas:
                log.info("waiting for the target: %s", pool.reason)
                waiting = True
            await pool.changed(0.2)
        return max(pool.usable, key=lambda r: self._count(r.info.model))

    def _adopt(self, pool: Pool[DraftUpstream]) -> bool:
        """Register the draft service's drafters; return whether it has answered yet."""
        for replica in pool.usable:
            offered = [*fitting(replica.info.drafters, self.target.info.model)]
            self.drafters.adopt(pool, offered)
            return True
        return False

    async def _keep_adopting(self, pool: Pool[DraftUpstream]) -> None:
        while not self._adopt(pool):
            await pool.changed(ADOPT_S)
        del self.missing[pool.name]

    async def _register(self, name: str, address: str) -> None:
        self.missing[name] = f"{address} has not answered yet"
        while name in self.missing:
            try:
                await self.drafters.register(name, address, "")
            except FlyspecError as error:
                if str(error) != self.missing[name]:
                    self.missing[name] = str(error)
                    log.warning("drafter %s is not available yet: %s", name, error)
                await asyncio.sleep(1.0)
            else:
                del self.missing[name]

    # --- compatibility ------------------------------------------------------------------------

    async def _accept_target(self, service: VerifyUpstream, info: VerifyServiceInfo) -> str:
        """Return why a verify service cannot be used; empty if it can.

        Switches to the service's model if more replicas run it than the current target.
        """
        if problem := protocol_misfit(f"the verify service at {service.address}", info):
            return problem
        self._kinds.note(service.address, info.model)
        self.drafters.adopt_heads(self.targets, info.heads)
        known = self._target
        if (
            known is not None
            and self._misfit(service, info)
            and self._count(info.model) > self._count(known.info.model)
        ):
            target = await self._read_target(service, info)
            for check in self._on_target:
                check(target)
            log.warning("the target is now %s; most of its replicas run it", info.model.name)
            self._target = target
        return ""

    def _count(self, model: ModelInfo) -> int:
        listed = [replica.address for replica in self.targets.replicas if replica.listed]
        return self._kinds.count(model, listed)

    def _misfit(self, service: VerifyUpstream, info: VerifyServiceInfo) -> str:
        """Return why new generations cannot use a replica: it differs from the target."""
        if self._target is None:
            return ""
        known, mixed = self._target.info.model, self._settings.allow_mixed_numerics
        if what := difference(known, info.model, mixed):
            return f"the verify service at {service.address} runs {info.model.name}: {what}"
        return ""

    async def _read_target(self, service: VerifyUpstream, info: VerifyServiceInfo) -> Target:
        """Make a replica's model the target. Raises `UnavailableError`, `IncompatibleError`."""
        bundle = await service.tokenizer()
        try:
            return Target(info, Tokenizer(bundle, self._settings.allow_special_tokens), bundle)
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise IncompatibleError(
                f"the tokenizer of the verify service at {service.address} cannot be read: {error}"
            ) from error

    def offer(self, target: Target) -> VerifyServiceInfo:
        """Return a target's description, with the judge that most of its replicas have now.

        A judge comes and goes with a replica's restart, and changes nothing for other rules.
        """
        mixed, known = self._settings.allow_mixed_numerics, target.info.model
        asked = [replica.info for replica in self._targets_asked]
        having = [info for info in asked if not difference(known, info.model, mixed)]
        judges = Counter(info.judge for info in having if info.judge is not None)
        judge = judges.most_common(1)[0][0] if judges else None
        like = next((info for info in having if info.judge == judge), None)
        return target.info if like is None else replace(target.info, rules=like.rules, judge=judge)

    def replicas_of(self, model: ModelInfo, judge_fingerprint: str = "") -> TargetReplicas:
        """Return the verify services that a generation with that model and judge may use."""
        mixed = self._settings.allow_mixed_numerics
        return TargetReplicas(self.targets, model, mixed, judge_fingerprint)

    def on_target(self, check: Callable[[Target], None]) -> None:
        """Call `check` with the target, now and whenever it is about to be replaced.

        If `check` raises, the replacement is rejected.
        """
        check(self.target)
        self._on_target.append(check)

    def _connect_drafter(self, address: str, name: str, kind: str = "") -> Pool[DraftUpstream]:
        """Create the pool of a draft service, not started; a drafter of the `kind` is tried."""
        settings = self._settings
        return Pool(
            name,
            self._addresses(address, "address" if name != "draft service" else "--draft-address"),
            self._connector.to_draft,
            lambda service, info: drafter_misfit(service, info, self.target),
            Breaker,
            settings.probe_interval_s,
            settings.probe_timeout_s,
            trial=lambda replica: self._try_drafter(replica, kind),
        )

    async def _try_drafter(self, replica: Replica[DraftUpstream], kind: str) -> int:
        """Try a drafter of that kind (empty: the first that fits); return the time taken, in ns."""
        offered = replica.info.drafters
        kind = kind or next(fitting(offered, self.target.info.model), offered[0]).name
        if of_kind(offered, kind) is None:
            return 0  # whoever registers it is told
        try:
            return await try_drafter(replica, kind, self.target)
        except DrafterFaultError as error:
            self.drafters.faulted(replica, kind, error.fault)
            raise

    def _addresses(self, spec: str, what: str) -> Addresses:
        """Parse the addresses in a setting, and refuse plaintext connections to other machines.

        Raises `ConfigError`.
        """
        addresses = Addresses(spec, what)
        if not self._connector.secure and not self._settings.allow_insecure:
            for host in addresses.hosts:
                if not is_loopback(host):
                    raise ConfigError(
                        f"{what}: traffic to {host} would be unencrypted; set --ssl-ca-certs, or "
                        "--allow-insecure if the network is otherwise protected"
                    )
        return addresses

    # --- state --------------------------------------------------------------------------------

    @property
    def target(self) -> Target:
        """The target. Raises `UnavailableError` before it has answered."""
        if self._target is None:
            raise UnavailableError("the target is not ready yet; retry later")
        return self._target

    @property
    def max_draft_tokens(self) -> int:
        limit = self.target.info.max_speculative_tokens
        drafter = self.drafters.active.max_draft_tokens
        return limit if drafter is None else min(limit, drafter)

    @property
    def max_sessions(self) -> int:
        usable = self._targets_asked
        limit: int = sum(r.info.sessions.limit for r in usable)
        pool = self.drafters.active.pool
        drafting = [r for r in pool.usable if r.info] if pool else []
        if drafting:
            limit = min(limit, sum(r.info.sessions.limit for r in drafting))
        return max(1, limit)

    @property
    def others(self) -> int | None:
        """Other orchestrators' sessions on the target, as last reported.

        None if they neither have nor await any.
        """
        asked = self._targets_asked
        return sum(r.others for r in asked) if any(r.shared for r in asked) else None

    @property
    def _targets_asked(self) -> list[Replica[VerifyUpstream]]:
        """The target's usable replicas or, if there are none, all that have answered."""
        replicas = [r for r in self.targets.replicas if r.info is not None]
        return [r for r in replicas if r.usable] or replicas

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.targets.close()
        await self.drafters.close()
        if self._draft_pool is not None:
            await self._draft_pool.close()


def _refuse_misfit(pool: Pool[Any]) -> None:
    """Raise `IncompatibleError` if a replica has answered and has a problem."""
    for replica in pool.replicas:
        if replica.info is not None and replica.problem:
            raise IncompatibleError(replica.problem)


def _named_addresses(setting: str) -> dict[str, str]:
    form = "NAME=ADDRESS; give NAME=host:port[,host:port]"
    found = named_values("--drafters", setting, form)
    for name, address in found.items():
        Addresses(address, f"--drafters {name}")
    return found

"""Who is behind the orchestrator: the target, the drafters, and which of them fit together."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from flyspec.config import OrchestratorSettings
from flyspec.errors import FlyspecError, IncompatibleError, NotFoundError, UnavailableError
from flyspec.tokenizer import Tokenizer
from flyspec.types import (
    PROTOCOL_VERSION,
    DrafterInfo,
    DraftOpen,
    DraftServiceInfo,
    VerifyOpen,
    VerifyServiceInfo,
)
from orchestrator.drafting import FALLBACK_NAME, Drafting, LocalLookup
from orchestrator.plan import GenerationPlan
from orchestrator.upstreams import DraftUpstream, Traffic, VerifySession, VerifyUpstream

log = logging.getLogger(__name__)

RETRY_S = 0.2
DRAFT_WAIT_S = 30.0
MONITOR_S = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """The target as the orchestrator knows it."""

    info: VerifyServiceInfo
    tokenizer: Tokenizer


def incompatibility(drafter: DrafterInfo, target: VerifyServiceInfo) -> str:
    """Why this drafter cannot draft for this target; empty when it can."""
    if drafter.model is None:
        return ""
    ours, theirs = target.model.tokenizer_fingerprint, drafter.model.tokenizer_fingerprint
    if ours != theirs:
        return (
            f"drafter {drafter.name!r} ({drafter.model.name}) speaks another tokenizer "
            f"(fingerprint {theirs[:8]}) than the target {target.model.name} ({ours[:8]}): use a "
            "draft model with the target's tokenizer, or the drafter prompt_lookup"
        )
    return ""


class Directory:
    """Connections to the services, and what they said of themselves."""

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self.verify = VerifyUpstream(
            settings.verify_address, settings.round_timeout_s, settings.reopen_timeout_s
        )
        self.draft = (
            DraftUpstream(settings.draft_address, settings.round_timeout_s)
            if settings.draft_address
            else None
        )
        self._target: Target | None = None
        self._draft_info: DraftServiceInfo | None = None

    async def connect(self) -> None:
        """Wait for the target, and for a while for the drafter.

        Raises `IncompatibleError` when what answers cannot work together.
        """
        info = await self._wait_for_target()
        self._target = Target(info, Tokenizer(await self.verify.tokenizer()))
        if self.draft is None:
            return
        deadline = asyncio.get_running_loop().time() + DRAFT_WAIT_S
        while not await self._describe_draft():
            if asyncio.get_running_loop().time() > deadline:
                log.warning("no draft service yet; going on with prompt lookup")
                return
            await asyncio.sleep(RETRY_S)

    async def monitor(self) -> None:
        """Look for the draft service as long as it is missing; one that does not fit stays out."""
        refused = ""
        while True:
            await asyncio.sleep(MONITOR_S)
            if self.draft is None or self._draft_info is not None:
                continue
            try:
                await self._describe_draft()
            except IncompatibleError as error:
                if str(error) != refused:
                    refused = str(error)
                    log.error("going on with prompt lookup: %s", error)

    async def _wait_for_target(self) -> VerifyServiceInfo:
        waiting = False
        while True:
            try:
                info = await self.verify.describe()
            except UnavailableError as error:
                if not waiting:
                    log.info("waiting for the target: %s", error)
                    waiting = True
                await asyncio.sleep(RETRY_S)
                continue
            if info.protocol_version != PROTOCOL_VERSION:
                raise IncompatibleError(
                    f"the verify service speaks protocol {info.protocol_version}, this "
                    f"orchestrator {PROTOCOL_VERSION}: run the same release of both"
                )
            return info

    async def _describe_draft(self) -> bool:
        """Whether the draft service is there. Raises `IncompatibleError` when it does not fit."""
        assert self.draft is not None
        try:
            info = await self.draft.describe()
        except FlyspecError as error:
            log.debug("draft service: %s", error)
            return False
        if info.protocol_version != PROTOCOL_VERSION:
            raise IncompatibleError(
                f"the draft service speaks protocol {info.protocol_version}, this "
                f"orchestrator {PROTOCOL_VERSION}: run the same release of both"
            )
        if reason := incompatibility(info.drafters[0], self.target.info):
            raise IncompatibleError(reason)
        self._draft_info = info
        return True

    @property
    def target(self) -> Target:
        """The target. Raises `UnavailableError` before it has answered."""
        if self._target is None:
            raise UnavailableError("the target is not ready yet; retry later")
        return self._target

    @property
    def drafters(self) -> tuple[DrafterInfo, ...]:
        """The drafters on offer, the default first; at least prompt lookup."""
        offered = self._draft_info.drafters if self._draft_info else ()
        if any(d.name == FALLBACK_NAME for d in offered):
            return offered
        return (*offered, DrafterInfo(FALLBACK_NAME, FALLBACK_NAME))

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens that one round may draft."""
        limit = self.target.info.max_speculative_tokens
        if self._draft_info:
            limit = min(limit, self._draft_info.max_speculative_tokens)
        return limit

    @property
    def max_sessions(self) -> int:
        """Generations that both services can hold."""
        limit = self.target.info.sessions.limit
        if self._draft_info:
            limit = min(limit, self._draft_info.sessions.limit)
        return limit

    def choose_drafter(self, name: str) -> DrafterInfo:
        """The drafter of that name, or the default. Raises when there is none or it cannot."""
        drafters = self.drafters
        drafter = next((d for d in drafters if d.name == name), None) if name else drafters[0]
        if drafter is None:
            raise NotFoundError(
                f"speculation.drafter: no drafter {name!r}; "
                f"there are {', '.join(d.name for d in drafters)}"
            )
        if reason := incompatibility(drafter, self.target.info):
            raise IncompatibleError(f"speculation.drafter: {reason}")
        return drafter

    def open_drafting(
        self, plan: GenerationPlan, drafter: DrafterInfo, traffic: Traffic
    ) -> Drafting:
        """A generation's drafting with that drafter."""
        vocab_size = self.target.info.model.vocab_size
        distributions = plan.distribution is not None
        if self.draft is None or self._draft_info is None:
            return Drafting(LocalLookup(distributions), vocab_size, distributions)
        open_ = DraftOpen(
            token_ids=(),
            sampling=plan.sampling,
            seed=plan.seed,
            drafter=drafter.name,
            prompt_length=len(plan.prompt_token_ids),
            distribution=plan.distribution,
        )
        return Drafting(self.draft.session(open_, traffic), vocab_size, distributions)

    def open_verifying(self, plan: GenerationPlan, traffic: Traffic) -> VerifySession:
        """A generation's session with the target."""
        open_ = VerifyOpen(
            token_ids=(),
            prompt_length=len(plan.prompt_token_ids),
            rule=plan.rule,
            sampling=plan.sampling,
            seed=plan.seed,
            logprobs=plan.logprobs,
        )
        return self.verify.session(open_, traffic)

    async def close(self) -> None:
        """Close the connections."""
        await self.verify.close()
        if self.draft is not None:
            await self.draft.close()

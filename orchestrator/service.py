"""The gRPC face of the orchestrator: `GenerationService` for clients, `AdminService` for operators.

A generation is the task that gRPC runs the handler in: when the client goes away the task is
cancelled, and leaving it frees both services' sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from flyspec import rpc, wire
from flyspec.config import OrchestratorSettings
from flyspec.errors import FlyspecError
from flyspec.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from orchestrator import messages
from orchestrator.admission import Admission
from orchestrator.directory import Directory, incompatibility
from orchestrator.ledger import Ledger
from orchestrator.output import Output
from orchestrator.plan import make_plan
from orchestrator.rounds import Rounds
from orchestrator.rule_files import RuleBook

log = logging.getLogger(__name__)

LONG_REQUEST_BYTES = 1 << 16
"""A longer request is read in a thread: to tokenize a megabyte takes a second."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Streams generations."""

    def __init__(
        self,
        directory: Directory,
        admission: Admission,
        settings: OrchestratorSettings,
        rules: RuleBook,
    ) -> None:
        self._directory = directory
        self._admission = admission
        self._settings = settings
        self._rules = rules

    @rpc.handler
    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:
        """One generation: admitted, started, its rounds written as they end, completed."""
        arrived = time.perf_counter_ns()
        target = self._directory.target
        arguments = (
            request,
            target.tokenizer,
            target.info,
            self._settings,
            self._directory.max_draft_tokens,
            self._rules,
        )
        if request.ByteSize() > LONG_REQUEST_BYTES:
            plan = await asyncio.to_thread(make_plan, *arguments)
        else:
            plan = make_plan(*arguments)
        drafter = self._directory.choose_drafter(plan.drafter)
        output = Output(target.tokenizer, plan.max_tokens, plan.stop, plan.ignore_eos)
        ledger = Ledger(plan.max_loose_tokens, plan.max_loose_cost_nats)
        async with self._admission.slot():
            admitted = time.perf_counter_ns()
            await context.write(messages.started(plan, target.info.model.name, drafter.name))
            drafting = self._directory.open_drafting(plan, drafter, ledger.traffic)
            verifying = self._directory.open_verifying(plan, ledger.traffic)
            first_token_ns = 0
            try:
                rounds = Rounds(plan, drafting, verifying, ledger)
                async with contextlib.aclosing(rounds.__aiter__()) as running:  # type: ignore[type-var]
                    async for round_ in running:
                        update = output.apply(round_.commands)
                        ledger.record(round_, update.final)
                        if update.retraction is not None:
                            await context.write(messages.retract(update.retraction))
                        if update.piece.tokens or update.final:
                            first_token_ns = first_token_ns or time.perf_counter_ns() - arrived
                            await context.write(
                                messages.chunk(update.piece, output.num_final_tokens)
                            )
                        if output.finish_reason is not None:
                            break
            finally:
                drafting.close()
                verifying.close()
        ledger.finish()
        timings = generation_pb2.GenerationTimings(
            time_to_first_token_ns=first_token_ns,
            total_ns=time.perf_counter_ns() - arrived,
            draft_model_ns=ledger.draft_model_ns,
            target_model_ns=ledger.target_model_ns,
            round_overhead_p50_ns=ledger.round_overhead_p50_ns,
            queue_ns=admitted - arrived,
        )
        loop_guard_index = rounds.loop_guard_index(output.num_final_tokens)
        await context.write(messages.completion(plan, output, ledger, timings, loop_guard_index))

    @rpc.handler
    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: Any
    ) -> generation_pb2.ListModelsResponse:
        """The target, the drafters and the rules."""
        info = self._directory.target.info
        return generation_pb2.ListModelsResponse(
            target=wire.model_info_to_proto(info.model),
            drafters=[d.name for d in self._directory.drafters],
            rules=self._rules.names(self._settings.rule, info.rules),
        )


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Tells the operator how things stand."""

    def __init__(self, directory: Directory, admission: Admission) -> None:
        self._directory = directory
        self._admission = admission

    @rpc.handler
    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: Any
    ) -> admin_pb2.GetStatusResponse:
        """Ask both services now, and add what runs here."""
        verify = await self._status_of(self._directory.verify)
        draft = await self._status_of(self._directory.draft) if self._directory.draft else None
        return admin_pb2.GetStatusResponse(
            ready=verify.ready,
            active_generations=self._admission.active,
            waiting_generations=self._admission.waiting,
            verify=verify,
            draft=draft,
        )

    async def _status_of(self, upstream: Any) -> admin_pb2.UpstreamStatus:
        try:
            info = await upstream.describe()
        except FlyspecError as error:
            return admin_pb2.UpstreamStatus(address=upstream.address, error=str(error))
        model = info.model if hasattr(info, "model") else info.drafters[0].model
        return admin_pb2.UpstreamStatus(
            address=upstream.address,
            ready=True,
            sessions=wire.session_status_to_proto(info.sessions),
            model=wire.model_info_to_proto(model) if model else None,
        )

    @rpc.handler
    async def ListDrafters(
        self, request: admin_pb2.ListDraftersRequest, context: Any
    ) -> admin_pb2.ListDraftersResponse:
        """The drafters that requests can name."""
        target = self._directory.target.info
        upstream = self._directory.draft
        statuses = []
        for index, drafter in enumerate(self._directory.drafters):
            reason = incompatibility(drafter, target)
            statuses.append(
                admin_pb2.DrafterStatus(
                    name=drafter.name,
                    kind=drafter.kind,
                    active=index == 0,
                    address=upstream.address if upstream else "",
                    usable=not reason,
                    reason=reason,
                    model=wire.model_info_to_proto(drafter.model) if drafter.model else None,
                )
            )
        return admin_pb2.ListDraftersResponse(drafters=statuses)

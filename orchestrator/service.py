"""The gRPC face of the orchestrator: `GenerationService` for clients, `AdminService` for operators.

A generation is the task that gRPC runs the handler in: when the client goes away the task is
cancelled, and leaving it frees both services' sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Any

from flyspec import rpc, wire
from flyspec.config import OrchestratorSettings
from flyspec.errors import FlyspecError
from flyspec.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
)
from orchestrator.admission import Admission
from orchestrator.directory import Directory, incompatibility
from orchestrator.ledger import Ledger
from orchestrator.output import Output, Piece
from orchestrator.plan import GenerationPlan, make_plan
from orchestrator.rounds import Rounds

log = logging.getLogger(__name__)

LONG_REQUEST_BYTES = 1 << 16
"""A longer request is read in a thread: to tokenize a megabyte takes a second."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Streams generations."""

    def __init__(
        self, directory: Directory, admission: Admission, settings: OrchestratorSettings
    ) -> None:
        self._directory = directory
        self._admission = admission
        self._settings = settings

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
            await context.write(_started(plan, target.info.model.name, drafter.name))
            drafting = self._directory.open_drafting(drafter, plan.sampling, plan.seed)
            verifying = self._directory.verify.session(
                len(plan.prompt_token_ids), plan.rule, plan.sampling, plan.seed
            )
            first_token_ns = 0
            try:
                rounds = Rounds(plan, drafting, verifying, ledger)
                async with contextlib.aclosing(rounds.__aiter__()) as running:  # type: ignore[type-var]
                    async for round_ in running:
                        piece = output.push(round_.token_ids, round_.origins)
                        ledger.record(round_, len(piece.token_ids))
                        first_token_ns = first_token_ns or time.perf_counter_ns() - arrived
                        await context.write(_chunk(piece))
                        if output.finish_reason is not None:
                            break
            finally:
                drafting.close()
                verifying.close()
        timings = generation_pb2.GenerationTimings(
            time_to_first_token_ns=first_token_ns,
            total_ns=time.perf_counter_ns() - arrived,
            draft_model_ns=ledger.draft_model_ns,
            target_model_ns=ledger.target_model_ns,
            round_overhead_p50_ns=ledger.round_overhead_p50_ns,
            queue_ns=admitted - arrived,
        )
        await context.write(_completion(plan, output, ledger, timings))

    @rpc.handler
    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: Any
    ) -> generation_pb2.ListModelsResponse:
        """The target, the drafters and the rules."""
        info = self._directory.target.info
        default = self._settings.rule
        return generation_pb2.ListModelsResponse(
            target=wire.model_info_to_proto(info.model),
            drafters=[d.name for d in self._directory.drafters],
            rules=[default, *(r for r in info.rules if r != default)],
        )


def _started(plan: GenerationPlan, model: str, drafter: str) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        started=generation_pb2.GenerationStarted(
            request_id=secrets.token_hex(8),
            model=model,
            drafter=drafter if plan.num_speculative_tokens else "",
            seed=plan.seed,
            prompt_token_ids=plan.prompt_token_ids,
            rule=wire.rule_to_proto(plan.rule),
            num_speculative_tokens=plan.num_speculative_tokens,
        )
    )


def _chunk(piece: Piece) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        chunk=generation_pb2.GenerationChunk(
            text=piece.text,
            token_ids=piece.token_ids,
            origins=[common_pb2.TokenOrigin.ValueType(o) for o in piece.origins],
            token_texts=piece.texts,
        )
    )


def _completion(
    plan: GenerationPlan,
    output: Output,
    ledger: Ledger,
    timings: generation_pb2.GenerationTimings,
) -> generation_pb2.GenerateResponse:
    assert output.finish_reason is not None
    return generation_pb2.GenerateResponse(
        completion=generation_pb2.GenerationCompletion(
            finish_reason=generation_pb2.FinishReason.ValueType(output.finish_reason),
            stop_reason=output.stop_reason,
            usage=generation_pb2.Usage(
                prompt_tokens=len(plan.prompt_token_ids), completion_tokens=output.num_tokens
            ),
            speculation=generation_pb2.SpeculationMetrics(
                num_spec_steps=ledger.num_spec_steps,
                num_draft_tokens=ledger.num_draft_tokens,
                num_accepted_draft_tokens=ledger.num_accepted_draft_tokens,
                num_loose_tokens=ledger.num_loose_tokens,
                loose_cost_nats=ledger.loose_cost_nats,
                num_rollbacks=ledger.num_rollbacks,
                acceptance_histogram=ledger.acceptance_histogram,
                num_rounds=ledger.num_rounds,
            ),
            timings=timings,
        )
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

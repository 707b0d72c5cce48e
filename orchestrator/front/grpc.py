"""The gRPC face of the orchestrator to its clients: `GenerationService`.

A generation is the task that gRPC runs the handler in: when the client goes away the task is
cancelled, and leaving it frees both services' sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from flyspec import rpc, wire
from flyspec.config import OrchestratorSettings
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from orchestrator.fleet.directory import Directory
from orchestrator.front.access import caller
from orchestrator.front.admission import Admission, Visit, deadline_of
from orchestrator.front.clients import check_tokens, client_of
from orchestrator.front.writer import Writer
from orchestrator.generation import messages
from orchestrator.generation.ledger import Ledger
from orchestrator.generation.output import Output
from orchestrator.generation.plan import make_plan
from orchestrator.generation.recoveries import Recoveries
from orchestrator.generation.rounds import Rounds
from orchestrator.generation.rule_files import RuleBook
from orchestrator.telemetry.observation import Observation, Observer

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
        observer: Observer,
    ) -> None:
        self._directory = directory
        self._observer = observer
        self._admission = admission
        self._settings = settings
        self._rules = rules

    @rpc.handler
    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:
        """One generation, within what there is room for and what its client takes."""
        writer = Writer(context, self._settings.write_timeout_s)
        with self._observer.request(context.invocation_metadata()) as observation:
            client, deadline = client_of(context), deadline_of(context)
            async with self._admission.visit(client, deadline, caller()) as visit:
                await self._generate(request, writer, visit, observation)

    async def _generate(
        self,
        request: generation_pb2.GenerateRequest,
        writer: Writer,
        visit: Visit,
        observation: Observation,
    ) -> None:
        """Admitted, started, its rounds written as they end, completed."""
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
        check_tokens(caller(), len(plan.prompt_token_ids) + plan.max_tokens)
        self._directory.drafters.check(plan.drafter)
        output = Output(target.tokenizer, plan.max_tokens, plan.stop, plan.ignore_eos)
        ledger = Ledger(plan.max_loose_tokens, plan.max_loose_cost_nats)
        recoveries = Recoveries(observation.recovered)
        accounts = ledger.traffic, recoveries, observation.correlation
        async with visit.slot(len(plan.prompt_token_ids) + plan.max_tokens):
            admitted = time.perf_counter_ns()
            drafting = self._directory.open_drafting(plan, *accounts)
            verifying = self._directory.open_verifying(plan, *accounts)
            model, drafter = target.info.model.name, drafting.assigned_name
            observation.admitted(plan, ledger, model, drafter, request.HasField("chat"))
            first_token_ns = 0
            try:
                await writer.write(messages.started(plan, model, drafter, observation.request_id))
                rounds = Rounds(plan, drafting, verifying, ledger, recoveries)
                async with contextlib.aclosing(rounds.__aiter__()) as running:  # type: ignore[type-var]
                    async for round_ in running:
                        update = output.apply(round_.commands)
                        ledger.record(round_, update.final)
                        observation.round(round_, update)
                        visit.used(len(plan.prompt_token_ids) + output.num_final_tokens)
                        if plan.return_rounds:
                            await writer.write(messages.round_(round_))
                        if update.retraction is not None:
                            await writer.write(messages.retract(update.retraction))
                        if update.piece.tokens or update.final:
                            first_token_ns = first_token_ns or time.perf_counter_ns() - arrived
                            await writer.write(
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
        observation.completed(output, ledger, timings)
        loop_guard_index = rounds.loop_guard_index(output.num_final_tokens)
        await writer.write(
            messages.completion(
                plan, output, ledger, timings, loop_guard_index, recoveries, drafting.shares
            )
        )

    @rpc.handler
    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: Any
    ) -> generation_pb2.ListModelsResponse:
        """The target, the drafters and the rules."""
        info = self._directory.target.info
        return generation_pb2.ListModelsResponse(
            target=wire.model_info_to_proto(info.model),
            drafters=[d.name for d in self._directory.drafters.all],
            rules=self._rules.names(self._settings.rule, info.rules),
        )

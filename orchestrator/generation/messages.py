"""What clients are told: the messages of `GenerateResponse`, from the orchestrator's own values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flyspec import wire
from flyspec.v1 import common_pb2, generation_pb2
from flyspec.values.tokens import Origin
from orchestrator.generation.ledger import Ledger, Round
from orchestrator.generation.output import Output, Piece, Retraction
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.recoveries import Recoveries
from orchestrator.generation.window import RollBack


def started(
    plan: GenerationPlan, model: str, drafter: str, request_id: str
) -> generation_pb2.GenerateResponse:
    """The first message: what was decided for the request."""
    return generation_pb2.GenerateResponse(
        started=generation_pb2.GenerationStarted(
            request_id=request_id,
            model=model,
            drafter=drafter if plan.num_speculative_tokens else "",
            seed=plan.seed,
            prompt_token_ids=plan.prompt_token_ids,
            rule=wire.rule_to_proto(plan.rule),
            num_speculative_tokens=plan.num_speculative_tokens,
            warnings=plan.warnings,
        )
    )


def chunk(piece: Piece, num_final_tokens: int) -> generation_pb2.GenerateResponse:
    """Tokens with their text; all final but with eager."""
    tokens = piece.tokens
    return generation_pb2.GenerateResponse(
        chunk=generation_pb2.GenerationChunk(
            text=piece.text,
            token_ids=[t.token_id for t in tokens],
            origins=[common_pb2.TokenOrigin.ValueType(t.origin) for t in tokens],
            token_texts=piece.texts,
            num_final_tokens=num_final_tokens,
            loose_gaps_nats=[t.gap_nats or 0.0 for t in tokens if t.origin is Origin.LOOSE],
            logprobs=[wire.logprobs_to_proto(t.logprobs) for t in tokens if t.logprobs],
        )
    )


def retract(retraction: Retraction) -> generation_pb2.GenerateResponse:
    """Provisional tokens did not stand."""
    return generation_pb2.GenerateResponse(
        retract=generation_pb2.GenerationRetract(
            output_token_index=retraction.num_tokens,
            text_byte_offset=retraction.num_text_bytes,
        )
    )


def round_(round_: Round) -> generation_pb2.GenerateResponse:
    """What was drafted and decided, and all that the verdict depended on besides the sequence."""
    request, verdict = round_.request, round_.verdict
    message = generation_pb2.GenerationRound(
        start_length=round_.start,
        drafter=round_.drafter,
        committed_length=round_.committed_length,
    )
    if request is not None and verdict is not None:
        message.draft_token_ids.extend(request.draft_token_ids)
        message.decisions.extend(wire.decision_to_proto(d) for d in verdict.decisions)
        message.keep_length, message.next_token_id = verdict.keep_length, verdict.next_token_id
        message.exact_until_position = request.exact_until_position
        if request.budget.loose_tokens is not None:
            message.remaining_loose_tokens = request.budget.loose_tokens
        if request.budget.loose_cost_nats is not None:
            message.remaining_loose_cost_nats = request.budget.loose_cost_nats
        if (window := wire.window_to_proto(request.open_window)) is not None:
            message.open_window.CopyFrom(window)
    else:  # a window failed for want of drafts
        for command in round_.commands:
            if isinstance(command, RollBack):
                message.keep_length, message.next_token_id = command.length, command.token_id
    return generation_pb2.GenerateResponse(round=message)


def completion(
    plan: GenerationPlan,
    output: Output,
    ledger: Ledger,
    timings: generation_pb2.GenerationTimings,
    loop_guard_index: int | None,
    recoveries: Recoveries,
    shares: Mapping[str, Sequence[int]],
) -> generation_pb2.GenerateResponse:
    """The last message: why it ended, and what was counted."""
    assert output.finish_reason is not None
    return generation_pb2.GenerateResponse(
        completion=generation_pb2.GenerationCompletion(
            finish_reason=generation_pb2.FinishReason.ValueType(output.finish_reason),
            stop_reason=output.stop_reason,
            usage=generation_pb2.Usage(
                prompt_tokens=len(plan.prompt_token_ids),
                completion_tokens=output.num_final_tokens,
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
                num_rejected_tokens=ledger.num_rejected_tokens,
                rejected_cost_nats=ledger.rejected_cost_nats,
                round_bytes=ledger.traffic.round_bytes,
                distribution_bytes=ledger.traffic.distribution_bytes,
            ),
            timings=timings,
            loop_guard_token_index=loop_guard_index,
            recoveries=[
                generation_pb2.Recovery(
                    kind=generation_pb2.RecoveryKind.ValueType(r.kind),
                    output_token_index=r.output_token_index,
                    elapsed_ns=r.elapsed_ns,
                    delay_ns=r.delay_ns,
                    successor=r.successor,
                    reason=r.reason,
                )
                for r in recoveries.kept
            ],
            num_recoveries=recoveries.count,
            drafters=[
                generation_pb2.DrafterShare(
                    drafter=name,
                    num_spec_steps=steps,
                    num_draft_tokens=drafted,
                    num_accepted_draft_tokens=accepted,
                )
                for name, (steps, drafted, accepted) in shares.items()
            ],
        )
    )

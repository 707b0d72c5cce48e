"""Values of a generation to the messages of `generation.proto`, until `flyspec.wire` has them."""

from __future__ import annotations

from typing import Any

from flyspec import wire
from flyspec.errors import InvalidArgumentError
from flyspec.v1 import common_pb2, generation_pb2
from flyspec.values.generation import (
    Chat,
    Chunk,
    Completion,
    Event,
    GenerateOptions,
    GenerationRequest,
    Prompt,
    Retract,
    RoundRecord,
    Started,
)


def request_from_proto(m: generation_pb2.GenerateRequest) -> GenerationRequest:
    """Read a request."""
    s = m.speculation

    def given(message: Any, name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    prompt: Prompt
    match m.WhichOneof("prompt"):
        case "text":
            prompt = m.text
        case "token_ids":
            prompt = list(m.token_ids.ids)
        case "chat":
            prompt = Chat(tuple((c.role, c.content) for c in m.chat.messages))
        case _:
            raise InvalidArgumentError("prompt: set one of text, token_ids, chat")
    return GenerationRequest(
        prompt,
        GenerateOptions(
            sampling=wire.sampling_from_proto(m.sampling),
            seed=given(m, "seed"),
            max_tokens=given(m, "max_tokens"),
            stop=tuple(m.stop),
            ignore_eos=m.ignore_eos,
            drafter=s.drafter,
            rule=wire.rule_from_proto(s.rule),
            num_speculative_tokens=given(s, "num_speculative_tokens"),
            max_loose_tokens=given(s, "max_loose_tokens"),
            max_loose_cost_nats=given(s, "max_loose_cost_nats"),
            exact_prefix_tokens=s.exact_prefix_tokens,
            eager=s.eager,
            disable_loop_guard=s.disable_loop_guard,
            logprobs=given(m, "logprobs"),
            return_rounds=m.return_rounds,
        ),
    )


def event_to_proto(e: Event) -> generation_pb2.GenerateResponse:
    """Write an event."""
    match e:
        case Started():
            return generation_pb2.GenerateResponse(
                started=generation_pb2.GenerationStarted(
                    request_id=e.request_id,
                    model=e.model,
                    drafter=e.drafter,
                    seed=e.seed,
                    prompt_token_ids=e.prompt_token_ids,
                    rule=wire.rule_to_proto(e.rule),
                    num_speculative_tokens=e.num_speculative_tokens,
                    warnings=e.warnings,
                )
            )
        case Chunk():
            return generation_pb2.GenerateResponse(
                chunk=generation_pb2.GenerationChunk(
                    text=e.text,
                    token_ids=e.token_ids,
                    origins=[common_pb2.TokenOrigin.ValueType(o) for o in e.origins],
                    token_texts=e.token_texts,
                    num_final_tokens=e.num_final_tokens,
                    loose_gaps_nats=e.loose_gaps_nats,
                    logprobs=[wire.logprobs_to_proto(entry) for entry in e.logprobs],
                )
            )
        case Retract():
            return generation_pb2.GenerateResponse(
                retract=generation_pb2.GenerationRetract(
                    output_token_index=e.output_token_index, text_byte_offset=e.text_byte_offset
                )
            )
        case RoundRecord():
            return generation_pb2.GenerateResponse(
                round=generation_pb2.GenerationRound(
                    start_length=e.start_length,
                    drafter=e.drafter,
                    draft_token_ids=e.draft_token_ids,
                    decisions=[wire.decision_to_proto(d) for d in e.decisions],
                    keep_length=e.keep_length,
                    next_token_id=e.next_token_id,
                    committed_length=e.committed_length,
                    remaining_loose_tokens=e.budget.loose_tokens,
                    remaining_loose_cost_nats=e.budget.loose_cost_nats,
                    exact_until_position=e.exact_until_position,
                    open_window=wire.window_to_proto(e.open_window),
                )
            )
        case Completion():
            s, t = e.speculation, e.timings
            return generation_pb2.GenerateResponse(
                completion=generation_pb2.GenerationCompletion(
                    finish_reason=generation_pb2.FinishReason.ValueType(e.finish_reason),
                    stop_reason=e.stop_reason,
                    usage=generation_pb2.Usage(
                        prompt_tokens=e.prompt_tokens, completion_tokens=e.completion_tokens
                    ),
                    speculation=generation_pb2.SpeculationMetrics(
                        **{f: getattr(s, f) for f in s.__slots__}
                    ),
                    timings=generation_pb2.GenerationTimings(
                        **{f: getattr(t, f) for f in t.__slots__}
                    ),
                    loop_guard_token_index=e.loop_guard_token_index,
                    recoveries=[
                        generation_pb2.Recovery(
                            kind=generation_pb2.RecoveryKind.ValueType(r.kind),
                            output_token_index=r.output_token_index,
                            elapsed_ns=r.elapsed_ns,
                            delay_ns=r.delay_ns,
                            successor=r.successor,
                            reason=r.reason,
                        )
                        for r in e.recoveries
                    ],
                    num_recoveries=e.num_recoveries,
                    drafters=[
                        generation_pb2.DrafterShare(
                            drafter=d.drafter,
                            num_spec_steps=d.num_spec_steps,
                            num_draft_tokens=d.num_draft_tokens,
                            num_accepted_draft_tokens=d.num_accepted_draft_tokens,
                        )
                        for d in e.drafters
                    ],
                )
            )

"""Protobuf messages of the orchestrator to the client's values and back."""

from __future__ import annotations

from flyspec import wire
from flyspec.errors import FlyspecError, InvalidArgumentError
from flyspec.metadata import REQUEST_ID_KEY, TRACEPARENT_KEY, is_request_id, is_traceparent
from flyspec.rules import PARAMETERS, Rule
from flyspec.v1 import generation_pb2
from flyspec.validation import MAX_TOP_K, MAX_TOP_LOGPROBS
from flyspec.values.generation import (
    Chat,
    Chunk,
    Completion,
    DrafterShare,
    Event,
    FinishReason,
    GenerateOptions,
    GenerationTimings,
    Prompt,
    Recovery,
    RecoveryKind,
    Retract,
    RoundRecord,
    SpeculationMetrics,
    Started,
)
from flyspec.values.rounds import Budget
from flyspec.values.tokens import Origin

# Looked up once a token: several times faster than calling the enum.
_ORIGINS = {int(origin): origin for origin in Origin}

_UINT32, _UINT64 = 2**32 - 1, 2**64 - 1


def request_to_proto(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """Write a request. Raises ValueError or TypeError for what a field cannot hold."""
    request = generation_pb2.GenerateRequest(
        sampling=wire.sampling_to_proto(options.sampling),
        seed=options.seed,
        max_tokens=options.max_tokens,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        speculation=generation_pb2.Speculation(
            drafter=options.drafter,
            rule=wire.rule_to_proto(options.rule) if options.rule else None,
            num_speculative_tokens=options.num_speculative_tokens,
            max_loose_tokens=options.max_loose_tokens,
            max_loose_cost_nats=options.max_loose_cost_nats,
            exact_prefix_tokens=options.exact_prefix_tokens,
            eager=options.eager,
            disable_loop_guard=options.disable_loop_guard,
        ),
        logprobs=options.logprobs,
        return_rounds=options.return_rounds,
    )
    match prompt:
        case str():
            request.text = prompt
        case Chat():
            request.chat.messages.extend(
                generation_pb2.ChatMessage(role=role, content=content)
                for role, content in prompt.messages
            )
        case _:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
    return request


def metadata_of(options: GenerateOptions) -> tuple[tuple[str, str], ...]:
    """What goes beside the request. Raises `InvalidArgumentError`."""
    found = []
    if options.request_id:
        if not is_request_id(options.request_id):
            raise InvalidArgumentError(
                f"request_id must be 1 to 128 letters, digits and ._:@/+=-, got "
                f"{options.request_id[:200]!r}"
            )
        found.append((REQUEST_ID_KEY, options.request_id))
    if options.traceparent:
        if not is_traceparent(options.traceparent):
            raise InvalidArgumentError(
                "traceparent must be VERSION-TRACE-SPAN-FLAGS with 2, 32, 16 and 2 digits in "
                f"lower-case hex (W3C Trace Context), got {options.traceparent[:200]!r}"
            )
        found.append((TRACEPARENT_KEY, options.traceparent))
    return tuple(found)


def misfit(prompt: Prompt, options: GenerateOptions) -> str | None:
    """The first integer of a request that its field cannot hold, in words; None if all fit."""
    sampling, rule = options.sampling, options.rule or Rule("")
    for name, token_ids in (
        ("prompt", () if isinstance(prompt, str | Chat) else prompt),
        ("sampling.logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("rule.guarded_token_ids", rule.guarded_token_ids),
    ):
        for token_id in token_ids:
            if not _fits(token_id, 0, _UINT32):
                return f"{name}: token id {token_id} is out of range; ids are 0 to {_UINT32}"
    for name, value, low, high in (
        ("seed", options.seed, 0, _UINT64),
        ("max_tokens", options.max_tokens, 1, _UINT32),
        ("logprobs", options.logprobs, 0, MAX_TOP_LOGPROBS),
        ("sampling.top_k", sampling.top_k, 0, MAX_TOP_K),
        ("sampling.min_tokens", sampling.min_tokens, 0, _UINT32),
        ("speculation.num_speculative_tokens", options.num_speculative_tokens, 0, _UINT32),
        ("speculation.max_loose_tokens", options.max_loose_tokens, 0, _UINT32),
        ("speculation.exact_prefix_tokens", options.exact_prefix_tokens, 0, _UINT32),
        *(
            (f"rule.{name}", getattr(rule, name), range_.low, range_.high)
            for name, parameter in PARAMETERS.items()
            for range_ in parameter.ranges.values()
            if range_.integers
        ),
    ):
        if not _fits(value, low, high):
            return f"{name} must be an integer between {low} and {high}, got {value}"
    return None


def _fits(value: object, low: float, high: float) -> bool:
    """Whether an integer is in range; what is no integer is not judged here."""
    return not isinstance(value, int) or low <= value <= high


def event_from_proto(message: generation_pb2.GenerateResponse) -> Event:
    """Read a message of a generation."""
    match message.WhichOneof("response"):
        case "started":
            s = message.started
            return Started(
                request_id=s.request_id,
                model=s.model,
                drafter=s.drafter,
                seed=s.seed,
                prompt_token_ids=list(s.prompt_token_ids),
                rule=wire.rule_from_proto(s.rule),
                num_speculative_tokens=s.num_speculative_tokens,
                warnings=tuple(s.warnings),
            )
        case "chunk":
            c = message.chunk
            return Chunk(
                text=c.text,
                token_ids=list(c.token_ids),
                origins=[_ORIGINS[o] for o in c.origins],
                token_texts=list(c.token_texts),
                num_final_tokens=c.num_final_tokens,
                loose_gaps_nats=list(c.loose_gaps_nats),
                logprobs=[wire.logprobs_from_proto(entry) for entry in c.logprobs],
            )
        case "retract":
            r = message.retract
            return Retract(r.output_token_index, r.text_byte_offset)
        case "round":
            return _round_from_proto(message.round)
        case "completion":
            return _completion_from_proto(message.completion)
        case _:
            raise FlyspecError("the server sent a message that this client does not know")


def _round_from_proto(message: generation_pb2.GenerationRound) -> RoundRecord:
    has = message.HasField
    return RoundRecord(
        start_length=message.start_length,
        drafter=message.drafter,
        draft_token_ids=list(message.draft_token_ids),
        decisions=[wire.decision_from_proto(d) for d in message.decisions],
        keep_length=message.keep_length,
        next_token_id=message.next_token_id,
        committed_length=message.committed_length,
        budget=Budget(
            message.remaining_loose_tokens if has("remaining_loose_tokens") else None,
            message.remaining_loose_cost_nats if has("remaining_loose_cost_nats") else None,
        ),
        exact_until_position=message.exact_until_position,
        open_window=wire.window_from_proto(message.open_window) if has("open_window") else None,
    )


def _completion_from_proto(message: generation_pb2.GenerationCompletion) -> Completion:
    m, t = message.speculation, message.timings
    return Completion(
        finish_reason=FinishReason(message.finish_reason),
        stop_reason=message.stop_reason if message.HasField("stop_reason") else None,
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        speculation=SpeculationMetrics(
            num_spec_steps=m.num_spec_steps,
            num_draft_tokens=m.num_draft_tokens,
            num_accepted_draft_tokens=m.num_accepted_draft_tokens,
            num_loose_tokens=m.num_loose_tokens,
            loose_cost_nats=m.loose_cost_nats,
            num_rollbacks=m.num_rollbacks,
            acceptance_histogram=list(m.acceptance_histogram),
            num_rounds=m.num_rounds,
            num_rejected_tokens=m.num_rejected_tokens,
            rejected_cost_nats=m.rejected_cost_nats,
            round_bytes=m.round_bytes,
            distribution_bytes=m.distribution_bytes,
        ),
        timings=GenerationTimings(
            time_to_first_token_ns=t.time_to_first_token_ns,
            total_ns=t.total_ns,
            draft_model_ns=t.draft_model_ns,
            target_model_ns=t.target_model_ns,
            round_overhead_p50_ns=t.round_overhead_p50_ns,
            queue_ns=t.queue_ns,
        ),
        loop_guard_token_index=(
            message.loop_guard_token_index if message.HasField("loop_guard_token_index") else None
        ),
        recoveries=[
            Recovery(
                RecoveryKind(r.kind),
                r.output_token_index,
                r.elapsed_ns,
                r.delay_ns,
                r.successor,
                r.reason,
            )
            for r in message.recoveries
        ],
        num_recoveries=message.num_recoveries,
        drafters=[
            DrafterShare(
                d.drafter, d.num_spec_steps, d.num_draft_tokens, d.num_accepted_draft_tokens
            )
            for d in message.drafters
        ],
    )

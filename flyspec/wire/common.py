"""Messages of `common.proto`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, TypeVar

from flyspec.errors import InvalidArgumentError
from flyspec.rules import PARAMETERS, Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.v1 import common_pb2
from flyspec.values.admin import ModelInfo, ProcessInfo, SessionStatus
from flyspec.values.tokens import SamplingParams, TokenDistribution, TokenLogprobs

_MEASURES = {int(m): m for m in EntropyMeasure}
_SCOPES = {int(s): s for s in WindowScope}
_DIVERGENCES = {int(d): d for d in Divergence}
_OPTIONAL_RULE_FIELDS = tuple(p.name for p in PARAMETERS.values() if not p.members)

E = TypeVar("E", bound=IntEnum)


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Write sampling parameters; defaults stay unset."""
    message = common_pb2.SamplingParams(
        temperature=sampling.temperature,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
    )
    if sampling.top_p != 1.0:
        message.top_p = sampling.top_p
    if sampling.top_k:
        message.top_k = sampling.top_k
    if sampling.repetition_penalty != 1.0:
        message.repetition_penalty = sampling.repetition_penalty
    return message


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Read sampling parameters."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=(
            message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
        ),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        min_tokens=message.min_tokens,
    )


def rule_to_proto(rule: Rule) -> common_pb2.Rule:
    """Write a rule; parameters left to the preset stay unset."""
    return common_pb2.Rule(
        name=rule.name,
        entropy_measure=common_pb2.EntropyMeasure.ValueType(rule.entropy_measure or 0),
        window_scope=common_pb2.WindowScope.ValueType(rule.window_scope or 0),
        divergence=common_pb2.Divergence.ValueType(rule.divergence or 0),
        guarded_token_ids=rule.guarded_token_ids,
        **{name: getattr(rule, name) for name in _OPTIONAL_RULE_FIELDS},
    )


def rule_from_proto(message: common_pb2.Rule) -> Rule:
    """Read a rule."""
    return Rule(
        name=message.name,
        entropy_measure=_member("rule.entropy_measure", message.entropy_measure, _MEASURES),
        window_scope=_member("rule.window_scope", message.window_scope, _SCOPES),
        divergence=_member("rule.divergence", message.divergence, _DIVERGENCES),
        guarded_token_ids=tuple(message.guarded_token_ids),
        **{
            name: value
            for name in _OPTIONAL_RULE_FIELDS
            if (value := _given(message, name)) is not None
        },
    )


def _given(message: Any, name: str) -> Any:
    """The value of an optional field, None if it is unset."""
    return getattr(message, name) if message.HasField(name) else None


def _member(field: str, number: int, members: Mapping[int, E]) -> E | None:
    """The enum's member of a number; 0 is unspecified."""
    if number == 0:
        return None
    if number not in members:
        allowed = ", ".join(f"{m.name.lower()} ({int(m)})" for m in members.values())
        raise InvalidArgumentError(f"{field}: {number} is not one of {allowed}")
    return members[number]


def distribution_to_proto(distribution: TokenDistribution) -> common_pb2.TokenDistribution:
    """Write a drafter's distribution at one position."""
    return common_pb2.TokenDistribution(
        log_probs=distribution.log_probs, token_ids=distribution.token_ids
    )


def distribution_from_proto(message: common_pb2.TokenDistribution) -> TokenDistribution:
    """Read a drafter's distribution at one position."""
    return TokenDistribution(message.log_probs, tuple(message.token_ids))


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """Write the target's log-probabilities at one position."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    """Read the target's log-probabilities at one position."""
    return TokenLogprobs(message.logprob, tuple(message.top_token_ids), tuple(message.top_logprobs))


def model_info_to_proto(info: ModelInfo) -> common_pb2.ModelInfo:
    """Write facts about a model."""
    return common_pb2.ModelInfo(
        name=info.name,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        dtype=info.dtype,
        device=info.device,
        num_parameters=info.num_parameters,
    )


def model_info_from_proto(message: common_pb2.ModelInfo) -> ModelInfo:
    """Read facts about a model."""
    return ModelInfo(
        name=message.name,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        dtype=message.dtype,
        device=message.device,
        num_parameters=message.num_parameters,
    )


def session_status_to_proto(status: SessionStatus) -> common_pb2.SessionStatus:
    """Write a session count."""
    return common_pb2.SessionStatus(
        active=status.active,
        limit=status.limit,
        opened_total=status.opened_total,
        prefix_cache_queries=status.prefix_cache_queries,
        prefix_cache_hits=status.prefix_cache_hits,
    )


def session_status_from_proto(message: common_pb2.SessionStatus) -> SessionStatus:
    """Read a session count."""
    return SessionStatus(
        message.active,
        message.limit,
        message.opened_total,
        message.prefix_cache_queries,
        message.prefix_cache_hits,
    )


def process_info_to_proto(info: ProcessInfo) -> common_pb2.ProcessInfo:
    """Write what a process says of itself."""
    return common_pb2.ProcessInfo(
        instance_id=info.instance_id,
        process_id=info.process_id,
        num_model_loads=info.num_model_loads,
        uptime_ns=info.uptime_ns,
    )


def process_info_from_proto(message: common_pb2.ProcessInfo) -> ProcessInfo:
    """Read what a process says of itself."""
    return ProcessInfo(
        message.instance_id, message.process_id, message.num_model_loads, message.uptime_ns
    )

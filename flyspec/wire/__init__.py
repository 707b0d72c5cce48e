"""Protobuf messages to our types and back: the only package that knows both.

Conversions are total: what protobuf cannot rule out (an unknown enum number, a missing oneof) is
refused here with `InvalidArgumentError`. Ranges are the receiving service's business.
"""

from flyspec.wire.common import (
    distribution_from_proto,
    distribution_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    model_info_from_proto,
    model_info_to_proto,
    rule_from_proto,
    rule_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    session_status_from_proto,
    session_status_to_proto,
)
from flyspec.wire.draft import (
    draft_advance_to_proto,
    draft_chunk_from_proto,
    draft_chunk_to_proto,
    draft_info_from_proto,
    draft_info_to_proto,
    draft_open_to_proto,
    draft_request_from_proto,
    drafter_info_from_proto,
    drafter_info_to_proto,
)
from flyspec.wire.verify import (
    distributions_to_proto,
    round_verdict_from_proto,
    round_verdict_to_proto,
    tokenizer_from_protos,
    tokenizer_to_protos,
    verify_info_from_proto,
    verify_info_to_proto,
    verify_open_to_proto,
    verify_request_from_proto,
    verify_round_to_proto,
)

__all__ = [
    "distribution_from_proto",
    "distribution_to_proto",
    "distributions_to_proto",
    "draft_advance_to_proto",
    "draft_chunk_from_proto",
    "draft_chunk_to_proto",
    "draft_info_from_proto",
    "draft_info_to_proto",
    "draft_open_to_proto",
    "draft_request_from_proto",
    "drafter_info_from_proto",
    "drafter_info_to_proto",
    "logprobs_from_proto",
    "logprobs_to_proto",
    "model_info_from_proto",
    "model_info_to_proto",
    "round_verdict_from_proto",
    "round_verdict_to_proto",
    "rule_from_proto",
    "rule_to_proto",
    "sampling_from_proto",
    "sampling_to_proto",
    "session_status_from_proto",
    "session_status_to_proto",
    "tokenizer_from_protos",
    "tokenizer_to_protos",
    "verify_info_from_proto",
    "verify_info_to_proto",
    "verify_open_to_proto",
    "verify_request_from_proto",
    "verify_round_to_proto",
]

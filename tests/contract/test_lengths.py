"""Every list of a request has a declared limit, or the model's context."""

from __future__ import annotations

from flyspec.v1 import generation_pb2
from flyspec.validation import LENGTHS

BY_CONTEXT = {"ids", "messages", "num_draft_tokens_per_round", "prediction_token_ids"}


def lists_in(descriptor):
    for field in descriptor.fields:
        if field.is_repeated:
            yield field.name
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from lists_in(field.message_type)


def test_every_list_of_a_request_has_a_limit():
    requests = generation_pb2.GenerateRequest, generation_pb2.ScoreRequest
    found = {name for request in requests for name in lists_in(request.DESCRIPTOR)}
    assert found == LENGTHS.keys() | BY_CONTEXT

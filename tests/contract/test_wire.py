"""Values survive the round trip over the wire, and no field of either side is forgotten."""

from __future__ import annotations

import dataclasses
from enum import IntEnum
from inspect import Parameter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyspec import wire
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Divergence, EntropyMeasure, WindowScope
from flyspec.speculation_length import AUTO
from flyspec.v1 import admin_pb2, common_pb2, draft_pb2, generation_pb2, verify_pb2
from flyspec.validation import LENGTHS
from flyspec.values.admin import BreakerState, DrafterState, TokenizerBundle
from flyspec.values.chat import Chat
from flyspec.values.generation import Completion, FinishReason, RecoveryKind
from flyspec.values.requests import GenerateOptions, GenerationRequest
from flyspec.values.rounds import (
    Decision,
    DraftChunk,
    OpenWindow,
    Outcome,
    Verdict,
    VerifyRound,
)
from flyspec.values.tokens import Origin, SamplingParams, TokenDistribution
from flyspec.wire.codec import fields_of, pair
from flyspec.wire.messages import ENVELOPES, LOCAL, VALUES
from tests.examples import examples

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PLAIN = {
    int: u32,
    float: st.floats(-1e6, 1e6, width=32),
    bool: st.booleans(),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | PLAIN[str],
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN[str], inner, max_size=3),
    max_leaves=5,
)


def chats():
    """Chats with any JSON where a chat template may read it."""
    objects = st.dictionaries(PLAIN[str], JSON, max_size=3)
    message = st.fixed_dictionaries(
        {"role": PLAIN[str]},
        optional={"content": PLAIN[str] | st.lists(objects, max_size=2), "tool_calls": JSON},
    )
    return st.builds(
        Chat,
        st.lists(message, max_size=3).map(tuple),
        tools=st.lists(objects, max_size=2).map(tuple),
        documents=st.lists(objects, max_size=2).map(tuple),
        add_generation_prompt=st.booleans(),
        continue_final_message=st.booleans(),
        template_kwargs=objects,
    )


LONG = ("round_id", "prefix_hash", "seed", "round_bytes", "total_ns", "uptime_ns")
NOT_SENT = {name for names in LOCAL.values() for name in names}
SPECIAL = {
    (GenerationRequest, "prompt"): st.text(max_size=8) | st.lists(u32, max_size=4) | chats(),
    (SamplingParams, "logit_bias"): st.dictionaries(u32, PLAIN[float], max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    (GenerateOptions, "num_speculative_tokens"): st.none() | u32 | st.just(AUTO),
    (GenerateOptions, "prediction"): PLAIN[str] | st.lists(u32, min_size=1, max_size=4),
    (Completion, "stop_reason"): st.none() | PLAIN[str] | u32,
    (VerifyRound, "max_plain_tokens"): st.integers(1, 2**32 - 1),
    (Verdict, "keep_length"): st.integers(0, 2**32 - 2),
}
EXACT = Decision(Outcome.EXACT)


def values_of(cls):
    """Return a value of a class with every transmitted field set."""
    if cls is DraftChunk:
        return chunks()
    if cls is Decision:  # of a match no more is said
        others = [outcome for outcome in Outcome if outcome is not Outcome.EXACT]
        rest = [st.none() | PLAIN[kind] for kind in (int, float, float, float)]
        return st.just(EXACT) | st.builds(Decision, st.sampled_from(others), *rest)
    return st.builds(cls, **{f.name: field_of(cls, f) for f in fields_of(cls) if keeps(f)})


def keeps(field):
    return field.name not in NOT_SENT or field.default is Parameter.empty


def field_of(cls, field):
    if field.name in NOT_SENT:
        return st.just(field.item())
    if (cls, field.name) in SPECIAL:
        return SPECIAL[cls, field.name]
    if field.is_value:
        found = values_of(field.item)
    elif issubclass(field.item, IntEnum):
        found = st.sampled_from(field.item)
    else:
        found = u64 if field.name in LONG else PLAIN[field.item]
    if field.container:
        found = st.lists(found, max_size=3).map(field.container)
    return st.none() | found if field.none else found


@st.composite
def chunks(draw):
    ids = draw(st.lists(u32, max_size=5))
    origins = [draw(st.sampled_from(Origin)) for _ in ids]
    given_, known = draw(st.booleans()), draw(st.booleans())
    return DraftChunk(
        draw(u64), 10, 7, 11, ids, origins, True,
        distributions=tuple(draw(values_of(TokenDistribution)) for _ in ids if given_),
        confidences=tuple(draw(st.floats(0, 1, width=32)) for _ in ids if known),
        agreements=tuple(draw(st.lists(st.booleans(), max_size=5))),
    )  # fmt: skip


def there_and_back(value, **local):
    message = wire.encode(value)
    read = type(message).FromString(message.SerializeToString())
    if type(message) in ENVELOPES and not local:
        return wire.unwrap(read)
    return wire.decode(type(value), read, **local)


WHOLE = [cls for cls in VALUES.values() if cls is not TokenizerBundle]


@pytest.mark.parametrize("cls", WHOLE)
@settings(max_examples=examples(10))
@given(data=st.data())
def test_every_value_comes_back(cls, data):
    value = data.draw(values_of(cls))
    assert there_and_back(value) == value


def test_every_field_has_its_place():
    for message, cls in VALUES.items():
        pair(cls, message.DESCRIPTOR)


def test_what_does_not_travel_is_given_by_who_reads():
    verdict = Verdict(12, 7, (EXACT,), start_length=11)
    assert there_and_back(verdict) == dataclasses.replace(verdict, start_length=0)
    assert there_and_back(verdict, start_length=11) == verdict
    request = GenerationRequest("x", GenerateOptions(timeout_s=1.0, request_id="r"))
    assert there_and_back(request) == GenerationRequest("x")


@pytest.mark.parametrize("window", [None, OpenWindow(9, 5, 1, 0.5)])
def test_what_is_final_is_told(window):
    message = wire.encode(Verdict(12, 7, open_window=window))
    assert message.committed_length == (9 if window else 13)


def test_verdict_leaves_out_the_target_token_where_it_is_the_drafted_one():
    decisions = (
        Decision(Outcome.EXACT, 5),
        Decision(Outcome.LOOSE, 6, 0.5, 0.25),
        Decision(Outcome.REJECTED, 7, None, 1.5),
        Decision(Outcome.NOT_REACHED),
    )
    assert there_and_back(Verdict(10, 7, decisions)).decisions == (EXACT, *decisions[1:])


def test_defaults_that_are_not_zero_stay_unset():
    message = wire.encode(GenerationRequest("x"))
    assert message == generation_pb2.GenerateRequest(text="x", sampling={}, speculation={})


def test_tokenizer_in_chunks(monkeypatch):
    monkeypatch.setattr(wire, "TOKENIZER_CHUNK_BYTES", 7)
    value = TokenizerBundle(b"x" * 100, "abc", (1, 2), (1, 2, 3), None, "{{ x }}", "{}")
    messages = wire.tokenizer_messages(value, value.tokenizer_json)
    assert len(messages) > 10
    read = [type(m).FromString(m.SerializeToString()) for m in messages]
    assert wire.tokenizer_of(read) == value
    with pytest.raises(InvalidArgumentError, match="metadata must come first"):
        wire.tokenizer_of(read[1:])


def chunk_of(**fields):
    return wire.decode(DraftChunk, draft_pb2.DraftResponse(token_ids=[1], **fields))


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda: wire.unwrap(draft_pb2.DraftRequest()), "set one of open, advance"),
        (lambda: wire.unwrap(verify_pb2.VerifyRequest()), "set one of open, round, distributions"),
        (
            lambda: wire.decode(GenerationRequest, generation_pb2.GenerateRequest()),
            "prompt: set one of text, token_ids, chat",
        ),
        (chunk_of, "origins: 0 for 1 token_ids"),
        (
            lambda: chunk_of(origins=[1], distributions=[{}, {}]),
            "distributions: 2 for 1 token_ids",
        ),
        (lambda: chunk_of(origins=[1], confidences=[0.5, 0.5]), "confidences: 2 for 1 token_ids"),
        (
            lambda: chunk_of(origins=[99]),
            r"DraftResponse.origins: 99 is not one of exact_model \(1\), ",
        ),
        (lambda: chunk_of(origins=[0]), "DraftResponse.origins: 0 is not one of"),
        (
            lambda: wire.unwrap(verify_pb2.VerifyRequest(open={"rule": {"entropy_measure": 9}})),
            r"rule.entropy_measure: 9 is not one of normalized \(1\), top_k \(2\)",
        ),
        (
            lambda: wire.decode(Verdict, verify_pb2.VerifyResponse(decisions=[{"outcome": 77}])),
            "Decision.outcome: 77 is not one of exact",
        ),
    ],
)
def test_what_protobuf_cannot_rule_out_is_refused(read, error):
    with pytest.raises(InvalidArgumentError, match=error):
        read()


def test_a_round_without_room_for_plain_tokens_takes_one():
    message = verify_pb2.VerifyRequest(round=verify_pb2.VerifyRound())
    assert wire.unwrap(message).max_plain_tokens == 1


def test_a_round_stays_small():
    """At K = 15, without distributions: under 300 bytes in both directions together."""
    drafts = list(range(120_000, 120_015))
    request = wire.encode(
        VerifyRound(1000, 1000, [], drafts, prefix_hash=2**63, exact_until_position=10)
    )
    decisions = [Decision(Outcome.EXACT, t) for t in drafts[:-2]]
    decisions += [Decision(Outcome.LOOSE, 1, 0.5, 0.1), Decision(Outcome.REJECTED, 1, 0.5, 4.0)]
    response = wire.encode(Verdict(1015, 5, tuple(decisions), round_id=1000))
    assert request.ByteSize() + response.ByteSize() < 300


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Origin, common_pb2.TokenOrigin, "TOKEN_ORIGIN_"),
        (EntropyMeasure, common_pb2.EntropyMeasure, "ENTROPY_MEASURE_"),
        (WindowScope, common_pb2.WindowScope, "WINDOW_SCOPE_"),
        (Divergence, common_pb2.Divergence, "DIVERGENCE_"),
        (Outcome, verify_pb2.DecisionOutcome, "DECISION_OUTCOME_"),
        (FinishReason, generation_pb2.FinishReason, "FINISH_REASON_"),
        (RecoveryKind, generation_pb2.RecoveryKind, "RECOVERY_KIND_"),
        (BreakerState, admin_pb2.BreakerState, "BREAKER_STATE_"),
        (DrafterState, admin_pb2.DrafterState, "DRAFTER_STATE_"),
    ],
)
def test_numbers_agree(ours, theirs, prefix):
    assert {prefix + e.name: int(e) for e in ours} | {prefix + "UNSPECIFIED": 0} == dict(
        theirs.items()
    )


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

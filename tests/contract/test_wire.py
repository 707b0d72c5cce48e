"""What goes over the wire comes back the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec import wire
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.v1 import draft_pb2, verify_pb2
from flyspec.values.admin import TokenizerBundle
from flyspec.values.rounds import (
    Budget,
    Decision,
    DistributionSpec,
    DraftAdvance,
    DraftChunk,
    DraftDistributions,
    DraftOpen,
    OpenWindow,
    Outcome,
    RoundVerdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import Origin, SamplingParams, TokenDistribution, TokenLogprobs

ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
rules = st.builds(
    Rule,
    name=st.text(max_size=10),
    fly_window_size=st.none() | st.integers(0, 1024),
    fly_entropy_threshold=st.none() | st.floats(0, 20),
    fly_entropy_top_k=st.none() | st.integers(2, 1024),
    entropy_measure=st.none() | st.sampled_from(EntropyMeasure),
    window_scope=st.none() | st.sampled_from(WindowScope),
    margin_threshold=st.none() | st.floats(0, 5),
    divergence=st.none() | st.sampled_from(Divergence),
    divergence_threshold=st.none() | st.floats(0, 2),
    divergence_top_k=st.none() | st.integers(0, 1024),
    typical_epsilon=st.none() | st.floats(0, 1),
    typical_delta=st.none() | st.floats(0, 2),
    random_acceptance=st.none() | st.floats(0, 1),
    guarded_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 1000),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(
        st.integers(0, 2**32 - 1), st.floats(-100, 100, width=32), max_size=4
    ).map(lambda bias: tuple(sorted(bias.items()))),
    min_tokens=st.integers(0, 2**32 - 1),
)
float32s = st.floats(-50, 0, width=32)
logprobs = st.builds(
    TokenLogprobs,
    float32s,
    st.just((3, 4)),
    st.tuples(float32s, float32s),
)
windows = st.builds(
    OpenWindow, u32, u32, st.integers(1, 1024), st.floats(0, 50), st.none() | logprobs
)
distributions = st.builds(
    TokenDistribution, st.binary(max_size=8), st.lists(u32, max_size=4).map(tuple)
)


def reparse(message):
    return type(message).FromString(message.SerializeToString())


@given(
    st.builds(
        DraftOpen,
        ids,
        samplings,
        u64,
        st.text(max_size=8),
        u32,
        st.none() | st.builds(DistributionSpec, u32, st.booleans(), st.booleans()),
    )
)
def test_draft_open(value):
    assert wire.draft_request_from_proto(reparse(wire.draft_open_to_proto(value))) == value


@given(st.builds(DraftAdvance, u64, u32, ids, u32))
def test_draft_advance(value):
    assert wire.draft_request_from_proto(reparse(wire.draft_advance_to_proto(value))) == value


@given(st.lists(st.tuples(u32, st.sampled_from([Origin.EXACT_MODEL, Origin.EXACT_LOOKUP]))))
def test_draft_chunk(tokens):
    value = DraftChunk(3, 10, 7, 11, [t for t, _ in tokens], [o for _, o in tokens], True)
    assert wire.draft_chunk_from_proto(reparse(wire.draft_chunk_to_proto(value))) == value


@given(st.builds(VerifyOpen, ids, u32, rules, samplings, u64, st.none() | u32))
def test_verify_open(value):
    assert wire.verify_request_from_proto(reparse(wire.verify_open_to_proto(value))) == value


@given(
    st.builds(
        VerifyRound,
        round_id=u64,
        keep_length=u32,
        append_token_ids=ids,
        draft_token_ids=ids,
        prefix_hash=u64,
        max_plain_tokens=st.integers(1, 2**32 - 1),
        budget=st.builds(Budget, st.none() | u32, st.none() | st.floats(0, 1e6)),
        exact_until_position=u32,
        open_window=st.none() | windows,
    )
)
def test_verify_round(value):
    assert wire.verify_request_from_proto(reparse(wire.verify_round_to_proto(value))) == value


@given(st.builds(DraftDistributions, u64, u32, st.lists(distributions, max_size=3)))
def test_distributions(value):
    assert wire.verify_request_from_proto(reparse(wire.distributions_to_proto(value))) == value


@given(st.none() | windows, st.lists(logprobs, max_size=3).map(tuple))
def test_verdict_with_window_and_logprobs(window, tokens):
    value = RoundVerdict(1, 10, 7, 9, [], True, open_window=window, logprobs=tokens)
    assert wire.round_verdict_from_proto(reparse(wire.round_verdict_to_proto(value))) == value


def test_verdict_leaves_out_the_target_token_where_it_is_the_drafted_one():
    decisions = [
        Decision(Outcome.EXACT, 5),
        Decision(Outcome.LOOSE, 6, 0.5, 0.25),
        Decision(Outcome.REJECTED, 7, None, 1.5),
        Decision(Outcome.NOT_REACHED),
    ]
    value = RoundVerdict(1, 10, 7, 11, decisions, True)
    back = wire.round_verdict_from_proto(reparse(wire.round_verdict_to_proto(value)))
    assert back.decisions == [Decision(Outcome.EXACT), *decisions[1:]]


def test_tokenizer_in_chunks(monkeypatch):
    monkeypatch.setattr(wire.verify, "TOKENIZER_CHUNK_BYTES", 7)
    value = TokenizerBundle(b"x" * 100, "abc", (1, 2), (1, 2, 3), None, "{{ x }}", "{}")
    messages = [reparse(m) for m in wire.tokenizer_to_protos(value)]
    assert len(messages) > 10
    assert wire.tokenizer_from_protos(messages) == value


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (wire.draft_request_from_proto, draft_pb2.DraftRequest()),
        (wire.verify_request_from_proto, verify_pb2.VerifyRequest()),
        (wire.draft_chunk_from_proto, draft_pb2.DraftResponse(token_ids=[1])),
        (wire.draft_chunk_from_proto, draft_pb2.DraftResponse(token_ids=[1], origins=[99])),
        (
            wire.verify_request_from_proto,
            verify_pb2.VerifyRequest(open=verify_pb2.VerifyOpen(rule={"entropy_measure": 9})),
        ),
        (wire.round_verdict_from_proto, verify_pb2.VerifyResponse(decisions=[{"outcome": 77}])),
    ],
)
def test_what_protobuf_cannot_rule_out_is_refused(convert, message):
    with pytest.raises(InvalidArgumentError):
        convert(message)


def test_a_round_stays_small():
    """At K = 15, without distributions: under 300 bytes there and back."""
    drafts = list(range(120_000, 120_015))
    request = wire.verify_round_to_proto(
        VerifyRound(1000, 1000, [], drafts, prefix_hash=2**63, exact_until_position=10)
    )
    decisions = [Decision(Outcome.EXACT, t) for t in drafts[:-2]]
    decisions += [Decision(Outcome.LOOSE, 1, 0.5, 0.1), Decision(Outcome.REJECTED, 1, 0.5, 4.0)]
    response = wire.round_verdict_to_proto(RoundVerdict(1000, 1015, 5, 1016, decisions, True))
    assert request.ByteSize() + response.ByteSize() < 300

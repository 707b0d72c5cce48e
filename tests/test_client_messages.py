"""What the client writes and reads, and the result of a stream with retracted tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec import wire
from flyspec.client import (
    Chat,
    Chunk,
    Completion,
    GenerateOptions,
    Generation,
    GenerationTimings,
    Retract,
    SpeculationMetrics,
    Started,
    Transcript,
)
from flyspec.client.generation import event_of
from flyspec.client.messages import message_of, metadata_of, time_limit
from flyspec.client.requests import AnyPrompt, GenerateKeywords, options_of, prompt_of
from flyspec.errors import FlyspecError, InvalidArgumentError
from flyspec.rules import Rule
from flyspec.speculation_length import SpeculationLength
from flyspec.v1 import generation_pb2
from flyspec.values.generation import FinishReason
from flyspec.values.phases import Phase
from flyspec.values.requests import GenerationRequest
from flyspec.values.tokens import Origin, TokenLogprobs

EXACT, LOOSE = Origin.EXACT_MODEL, Origin.LOOSE
SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


# --- requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "fields"),
    [
        (None, {}),
        ("auto", {"adaptive": True}),
        (0, {"num_speculative_tokens": 0}),
        (7, {"num_speculative_tokens": 7}),
    ],
)
def test_k_is_a_number_or_auto_or_left_to_the_server(
    k: SpeculationLength | None, fields: dict[str, Any]
) -> None:
    request = GenerationRequest("hi", GenerateOptions(num_speculative_tokens=k))
    message = wire.encode(request)
    assert message.speculation == generation_pb2.Speculation(**fields)
    read = generation_pb2.GenerateRequest.FromString(message.SerializeToString())
    assert wire.decode(GenerationRequest, read) == request


# --- requests that cannot be sent -----------------------------------------------------------


def refusal(keywords: dict[str, Any], prompt: AnyPrompt = "x") -> str:
    """The error for a request; empty if it can be sent."""
    try:
        options = options_of(None, keywords)
        message_of(GenerationRequest(prompt_of(prompt), options))
        metadata_of(options)
        time_limit(options.timeout_s)
    except InvalidArgumentError as error:
        return str(error)
    return ""


INTEGERS = [
    "seed", "max_tokens", "logprobs", "num_speculative_tokens", "max_loose_tokens",
    "exact_prefix_tokens", "top_k", "min_tokens", "fly_window_size", "fly_entropy_top_k",
    "divergence_top_k",
]  # fmt: skip


@pytest.mark.parametrize("value", [-1, 1 << 70])
@pytest.mark.parametrize("name", [*INTEGERS, "logit_bias", "guarded_token_ids"])
def test_an_integer_that_does_not_fit_is_named(name: str, value: int) -> None:
    given = {"logit_bias": {value: 1.0}, "guarded_token_ids": (3, value)}.get(name, value)
    of_the_rule = name in {field.name for field in dataclasses.fields(Rule)}
    reason = refusal({"rule": Rule("fly", **{name: given})} if of_the_rule else {name: given})
    assert name in reason
    assert f" {value}" in reason


@pytest.mark.parametrize("name", GenerateKeywords.__annotations__)
def test_an_option_of_a_wrong_type_is_named(name: str) -> None:
    reason = refusal({"max_tokens": 3, "rule": "exact", name: object()})
    assert f".{reason}".partition(" must be ")[0].removesuffix(":").endswith(f".{name}")
    assert ", got <object object at" in reason


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"max_tokens": 2.5}, "max_tokens: must be an integer or None, got 2.5"),
        ({"seed": True}, f"seed must be an integer between 0 and {2**64 - 1}, got True"),
        ({"stop": 5}, "stop: must be a string or a sequence of strings, got 5"),
        ({"stop": ["a", 5]}, "stop[1]: must be a string, got 5"),
        ({"prediction": 5}, "prediction: must be a string or a sequence of integers, got 5"),
        ({"prediction": [1, "a"]}, "prediction[1]: must be an integer, got 'a'"),
        ({"temperature": "1"}, "sampling.temperature: must be a number, got '1'"),
        ({"phases": 5}, "speculation.phases: must be a sequence of Phases, got 5"),
        ({"phases": [5]}, r"speculation.phases[0]: must be a Phase, got 5"),
        ({"phases": [Phase(), Phase(until=[5])]},
         "speculation.phases[1].until[0]: must be a string, got 5"),
        ({"phases": [Phase(Rule("fly", fly_window_size="x"))]},
         "speculation.phases[0].rule.fly_window_size: must be an integer or None, got 'x'"),
        ({"exact_inside": [3]}, "speculation.exact_inside[0]: must be a string, got 3"),
        ({"rule": 5}, "speculation.rule: must be a Rule, a string or None, got 5"),
        ({"rule": Rule("fly", entropy_measure="x")},
         "rule.entropy_measure: must be an EntropyMeasure or None, got 'x'"),
        ({"num_speculative_tokens": "x"},
         "speculation.num_speculative_tokens: must be an integer, 'auto' or None, got 'x'"),
        ({"stop_token_ids": [3, -1]},
         f"stop_token_ids[1] must be an integer between 0 and {2**32 - 1}, got -1"),
        ({"logit_bias": 5}, "sampling.logit_bias: must be a mapping of integers to numbers or a "
         "sequence of pairs of an integer and a number, got 5"),
        ({"logit_bias": {3: 1.0, "a": 1}},
         "sampling.logit_bias: must be pairs of an integer and a number, got ('a', 1)"),
        ({"logit_bias": {-1: 1.0}},
         f"sampling.logit_bias: token id -1 is out of range; ids are 0 to {2**32 - 1}"),
        ({"timeout_s": "5"}, "timeout_s must be more than 0 seconds, or None, got '5'"),
        ({"timeout_s": float("nan")}, "timeout_s must be more than 0 seconds, or None, got nan"),
    ],
)  # fmt: skip
def test_what_an_option_must_be(keywords: dict[str, Any], reason: str) -> None:
    assert refusal(keywords) == reason


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        *((prompt, f"prompt: must be a text, token ids or the messages of a chat, got {prompt!r}")
          for prompt in (5, None, b"x", {1}, {"role": "user"})),
        ([7, "a"], "prompt[1]: must be an integer, got 'a'"),
        ([-1], f"prompt[0] must be an integer between 0 and {2**32 - 1}, got -1"),
        ([{"role": "user"}, 5], "prompt.messages[1]: must be a JSON object, got 5"),
        ([{"role": 5}], "prompt.messages[0].role: must be a string, got 5"),
        ([{"content": {1}}], "prompt.messages[0]: must be a JSON object, got {'content': {1}}"),
        (Chat((), tools=[{1}]), "prompt.tools[0]: must be a JSON object, got {1}"),
        (Chat((), template_kwargs={"role": 5, "x": {1}}),
         "prompt.template_kwargs: must be a JSON object, got {'role': 5, 'x': {1}}"),
        ("\ud800", "prompt: 'utf-8' codec can't encode character '\\ud800' in position 0: "
         "surrogates not allowed"),
    ],
)  # fmt: skip
def test_what_a_prompt_must_be(prompt: Any, reason: str) -> None:
    assert refusal({}, prompt) == reason


def test_a_time_limit_that_grpc_could_not_count_is_its_longest() -> None:
    assert time_limit(float("inf")) == time_limit(1e300) == 1e9
    assert (time_limit(None), time_limit(2)) == (None, 2.0)


def test_what_goes_beside_a_request() -> None:
    assert metadata_of(GenerateOptions()) == ()
    named = GenerateOptions(request_id="ticket:4711", traceparent=SPAN)
    assert metadata_of(named) == (("x-request-id", "ticket:4711"), ("traceparent", SPAN))


@pytest.mark.parametrize("value", ["two words", "a\nb", "é", "x" * 129])
def test_a_request_id_that_no_server_would_take(value: str) -> None:
    with pytest.raises(InvalidArgumentError, match="request_id must be 1 to 128 letters"):
        metadata_of(GenerateOptions(request_id=value))


@pytest.mark.parametrize("value", ["1", SPAN.upper(), SPAN + "\n", SPAN.replace("-", "")])
def test_a_traceparent_that_is_none(value: str) -> None:
    with pytest.raises(InvalidArgumentError, match="traceparent must be VERSION-TRACE"):
        metadata_of(GenerateOptions(traceparent=value))


def test_an_event_of_a_newer_server_is_refused() -> None:
    with pytest.raises(FlyspecError, match="unknown to this client"):
        event_of(generation_pb2.GenerateResponse())


def test_means_of_gaps() -> None:
    metrics = SpeculationMetrics(
        num_loose_tokens=4, loose_cost_nats=1.0, num_rejected_tokens=2, rejected_cost_nats=8.0
    )
    assert (metrics.mean_loose_gap_nats, metrics.mean_rejected_gap_nats) == (0.25, 4.0)
    nothing = SpeculationMetrics()
    assert (nothing.mean_loose_gap_nats, nothing.mean_rejected_gap_nats) == (None, None)


# --- transcripts ----------------------------------------------------------------------------


def chunk_of(tokens: Sequence[tuple[int, Origin, str]], final: int = 0) -> Chunk:
    """A chunk whose gaps and log-probabilities identify their token."""
    return Chunk(
        "".join(text for _, _, text in tokens),
        [token for token, _, _ in tokens],
        [origin for _, origin, _ in tokens],
        [text for _, _, text in tokens],
        final,
        [float(token) for token, origin, _ in tokens if origin is LOOSE],
        [TokenLogprobs(-float(token)) for token, _, _ in tokens],
    )


TOKEN = st.tuples(
    st.integers(0, 99),
    st.sampled_from([EXACT, LOOSE]),
    st.sampled_from(["a", "żó", "😀", "", "\n"]),
)


@given(steps=st.lists(st.tuples(st.lists(TOKEN, max_size=4), st.integers(0, 6))))
def test_what_was_taken_back_is_gone(steps: list[tuple[list[Any], int]]) -> None:
    transcript = Transcript()
    stands: list[tuple[int, Origin, str]] = []
    for tokens, dropped in steps:
        transcript.add(chunk_of(tokens))
        stands += tokens
        if dropped:
            stands = stands[: max(0, len(stands) - dropped)]
            text = "".join(text for _, _, text in stands)
            transcript.add(Retract(len(stands), len(text.encode())))
    started = Started("", "", "", 0, (), Rule("fly"), 0)
    completion = Completion(
        FinishReason.STOP, None, 0, len(stands), SpeculationMetrics(), GenerationTimings()
    )
    whole = Generation(started, transcript.chunks, completion)
    expected = chunk_of(stands)
    assert whole.text == transcript.text == expected.text
    assert whole.token_ids == expected.token_ids
    assert whole.origins == expected.origins
    assert whole.loose_gaps_nats == expected.loose_gaps_nats
    assert whole.logprobs == expected.logprobs
    assert [t for c in transcript.chunks for t in c.token_texts] == expected.token_texts


def test_text_that_came_after_its_token_is_cut_for_itself() -> None:
    """Text that might become a stop string is held back and comes with a later token."""
    transcript = Transcript()
    transcript.add(Chunk("", [1, 2], [EXACT, LOOSE], ["", ""], 0, [0.5]))
    transcript.add(Chunk("abc", [3], [EXACT], ["abc"]))
    transcript.add(Retract(1, 1))
    assert transcript.text == "a"
    assert [list(c.token_ids) for c in transcript.chunks] == [[1], []]
    assert [list(c.loose_gaps_nats) for c in transcript.chunks] == [[], []]
    assert transcript.chunks[1].token_texts == ()


@pytest.mark.parametrize("retract", [Retract(3, 0), Retract(2, 3), Retract(0, 0)])
def test_a_server_that_takes_back_too_much(retract: Retract) -> None:
    transcript = Transcript()
    transcript.add(chunk_of([(1, EXACT, "a"), (2, LOOSE, "b")], final=1))
    with pytest.raises(FlyspecError, match=r"had sent 2 tokens \(1 of them final\) and 2 bytes"):
        transcript.add(retract)

"""Responses: text and function calls as items and events, read by OpenAI's client."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec.client import Chat, GenerateOptions
from flyspec.rules import Rule
from flyspec.tokenizer import Tokenizer
from flyspec.values.admin import TokenizerBundle
from flyspec.values.generation import (
    Chunk,
    Completion,
    FinishReason,
    GenerationTimings,
    SpeculationMetrics,
    Started,
)
from orchestrator.front.http.bodies import ChatBody, ResponsesBody
from orchestrator.front.http.chat import ChatReply
from orchestrator.front.http.responses import ResponsesReply, chat_of_items
from orchestrator.front.http.tool_calls import ToolCall, ToolCallParser, parser_for
from tests.tiny import make_tokenizer

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'


async def test_a_text(served, api):
    reply = await api.responses.create(model="target:exact", input="the cat", max_output_tokens=12)
    by_grpc = await served.client.complete(
        Chat.of_user("the cat"), GenerateOptions(max_tokens=12, rule=Rule("exact"))
    )
    assert reply.output_text == by_grpc.text
    assert reply.status == "incomplete"
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage.output_tokens == 12
    assert reply.usage.input_tokens == len(by_grpc.started.prompt_token_ids)
    assert reply.metrics["speculative_decoding"]
    assert reply.metrics["speculation"] == {"rule": {"name": "exact"}, "lossless": True}
    assert reply.store is False


async def test_a_stream_of_events(api):
    asked = {"model": "target", "input": "the cat", "max_output_tokens": 12}
    whole = await api.responses.create(**asked)
    events = [event async for event in await api.responses.create(**asked, stream=True)]
    final = events[-1].response
    types = [event.type for event in events]
    assert types[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert types[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.output_text == whole.output_text


async def test_items_are_the_chat_that_they_were(served, api):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "the cat"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "sat"}],
        },
        {"role": "user", "content": "and?"},
    ]
    reply = await api.responses.create(
        model="target", input=items, instructions="Be brief.", max_output_tokens=6
    )
    chat = Chat(
        [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": "sat"}, {"role": "user", "content": "and?"},
        ]
    )  # fmt: skip
    expected = await served.client.complete(chat, GenerateOptions(max_tokens=6))
    assert reply.output_text == expected.text


async def test_what_a_coding_agent_sends(served, api):
    """The fields of OpenAI's Codex, which asks for any model like this."""
    say = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "the cat"}],
    }
    reply = await api.responses.create(
        model="target:exact",
        input=[{**say, "id": "msg_0", "role": "developer"}, {**say, "id": "msg_1"}],
        tools=[{**TOOL, "strict": False}], tool_choice="auto", parallel_tool_calls=False,
        reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"], store=False,
        prompt_cache_key="thread", max_output_tokens=4,
        extra_body={"client_metadata": {"session_id": "s"}},
    )  # fmt: skip
    assert reply.usage.output_tokens == 4
    assert reply.parallel_tool_calls is False


def test_calls_and_their_outputs_for_the_template():
    body = ResponsesBody(
        input=[
            {"role": "user", "content": "weather?"},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{broken"},
            {"type": "function_call_output", "call_id": "a", "output": "sun"},
        ],
        tools=[TOOL],
    )
    chat = chat_of_items(body)
    assert chat.tools == [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    ]
    calls = chat.messages[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"x": 1}, "{broken"]
    assert chat.messages[2] == {"role": "tool", "content": "sun", "tool_call_id": "a"}
    assert chat_of_items(body.model_copy(update={"tool_choice": "none"})).tools == ()


USAGE, CONTENT = "stream_options.include_usage", "input[0].content[0].type"


def item(**fields):
    return {"input": [fields]}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "is missing"),
        ({"input": "x", "store": True}, "store", "only false is served here"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id", "is not served"),
        ({"input": "x", "reasoning": {"effort": "low"}}, "reasoning.effort", "must be"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "only functions"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "function's name"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type", "only message, function_call"),
        (item(role="user", content=[{"type": "input_image"}]), CONTENT, "only text is served"),
        (item(role="user", content=3), "input[0].content", "must be a text"),
        (item(role="user", content=["x"]), CONTENT, "only text"),
        (item(content="x"), "input[0].role", "is missing"),
        (item(type="function_call"), "input[0].name", "is missing"),
        (item(type="function_call_output", output="x"), "input[0].call_id", "is missing"),
        ({"input": []}, "input", "is empty; give at least one"),
        ({"input": "x", "stream_options": {"include_usage": True}}, USAGE, ""),
        ({"input": "x", "max_tokens": 3}, "max_tokens", "did you mean max_output_tokens"),
        ({"input": "word " * 300}, "input", "maximum context length is 256 tokens"),
        ({"input": "x", "max_output_tokens": 256}, "max_output_tokens", "is 256 tokens, of which"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text", "is served here"),
        ({"input": "x", "model": "y"}, "model", "there is no 'y'"),
    ],
)
async def test_what_is_not_served(bare, body, param, message):
    for more in ({}, {"stream": True}):
        reply = await bare.post("/v1/responses", json=body | more)
        error = reply.json()["error"]
        assert reply.status_code == (404 if param == "model" else 400)
        assert error["param"] == param
        assert message in error["message"]


# --- function calls in a model's text -------------------------------------------------------------


@given(st.lists(st.integers(1, 30), max_size=12), st.booleans())
def test_calls_are_found_however_the_text_is_cut(sizes, broken):
    inside = "{nonsense}" if broken else '{"name": "f", "arguments": {"a": [1]}}'
    text = f"a < b <tool <tool_call>{inside}</tool_call> and <tool_cal"
    parser, found, at = ToolCallParser(), [], 0
    for size in [*sizes, len(text)]:
        found += parser.push(text[at : at + size])
        at += size
    found += parser.end()
    calls = [piece for piece in found if isinstance(piece, ToolCall)]
    shown = "".join(piece for piece in found if isinstance(piece, str))
    if broken:
        assert (calls, shown) == ([], text)
    else:
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"a": [1]})]
        assert shown == "a < b <tooland <tool_cal"


def parsed(text, stop=None):
    """The text and the names of calls, each piece by itself."""
    parser = ToolCallParser()
    pieces = [p for character in text for p in parser.push(character)] + [*parser.end(stop)]
    return [piece if isinstance(piece, str) else {piece.name} for piece in pieces]


def joined(pieces):
    """The same, with neighbouring texts as one."""
    found = []
    for piece in pieces:
        if found and isinstance(piece, str) and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (f"a {CALL}\n{CALL}\n", None, ["a", {"weather"}, {"weather"}]),
        (f"a {CALL}\n b ", None, ["a", {"weather"}, "b "]),
        (" no call \n", None, [" no call \n"]),
        ("", None, []),
        (f"a{CALL[: -len('</tool_call>')]}", "</tool_call>", ["a", {"weather"}]),
        ("nothing begun", "</tool_call>", ["nothing begun</tool_call>"]),
        (f"{CALL} <tool_call>{{", None, [{"weather"}, "<tool_call>{"]),
    ],
)
def test_white_space_around_calls_is_dropped(text, stop, expected):
    assert joined(parsed(text, stop)) == expected


def test_tools_that_are_not_shown_are_not_called():
    tokens = make_tokenizer().backend_tokenizer.to_str().encode()
    tags = Tokenizer(TokenizerBundle(tokens, "f", (1,), (1,), chat_template="{# <tool_call> #}"))
    assert parser_for(ResponsesBody(input="x", tools=[TOOL]), tags)
    assert parser_for(ResponsesBody(input="x", tools=[TOOL], tool_choice="none"), tags) is None
    assert parser_for(ResponsesBody(input="x"), tags) is None


async def said(*texts):
    """The events of a generation that says this."""
    yield 0, Started("r", "m", "model", 1, [1], Rule("exact"), 5)
    for text in texts:
        yield 0, Chunk(text, [1], [1], [text])
    nothing = SpeculationMetrics(), GenerationTimings()
    yield 0, Completion(FinishReason.STOP, None, 1, len(texts), *nothing)


PIECES = ["Let me see. <tool", CALL[5:40], CALL[40:], "<tool_call>{}", "</tool_call>"]


async def test_a_response_with_a_call():
    body = ResponsesBody(input="x", tools=[TOOL])
    whole = await ResponsesReply(body, "m", ToolCallParser()).whole(said(*PIECES))
    message, call, rest = whole["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["type"], call["name"]) == ("function_call", "weather")
    assert json.loads(call["arguments"]) == {"place": "Ulm"}
    assert rest["content"][0]["text"] == "<tool_call>{}</tool_call>"
    frames = [f async for f in ResponsesReply(body, "m", ToolCallParser()).stream(said(*PIECES))]
    events = [json.loads(frame.split(b"data: ")[1]) for frame in frames]
    (done,) = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert json.loads(done["arguments"]) == {"place": "Ulm"}
    assert done["output_index"] == 1
    assert events[-1]["type"] == "response.completed"
    assert [item["type"] for item in events[-1]["response"]["output"]] == [
        "message", "function_call", "message",
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_with_a_call(stream):
    tokens = make_tokenizer().backend_tokenizer.to_str().encode()
    bundle = TokenizerBundle(tokens, "f", (1,), (1,), chat_template="{# <tool_call> #}")
    tool = {"type": "function", "function": {"name": "weather"}}
    body = ChatBody(messages=[{"role": "user", "content": "x"}], tools=[tool], stream=stream)
    reply = ChatReply(body, "m", "fp", Tokenizer(bundle), 1)
    if not stream:
        (choice,) = (await reply.whole(said(*PIECES[:3])))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        calls = choice["message"]["tool_calls"]
    else:
        frames = [frame async for frame in reply.stream(said(*PIECES[:3]))]
        chunks = [json.loads(frame[6:])["choices"][0] for frame in frames[:-1]]
        assert "".join(c["delta"].get("content") or "" for c in chunks) == "Let me see."
        assert chunks[-1]["finish_reason"] == "tool_calls"
        calls = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
        assert calls[0]["index"] == 0
    (call,) = calls
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"place": "Ulm"}

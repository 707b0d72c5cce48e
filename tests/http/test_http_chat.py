"""Chat completions by OpenAI's client: what it reads is what the generation says."""

from __future__ import annotations

import json
import shutil

import httpx2
import pytest

from flyspec.client import Chat, GenerateOptions
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from tests.orchestrator.stacks import start_stack

SAID = [{"role": "user", "content": "The cat sat on the"}]
EXACT = {"speculation": {"rule": {"name": "exact"}}}


async def expected(stack, options, messages=SAID):
    return await stack.client.complete(Chat(messages), options)


async def test_a_message_is_the_generation(served, api):
    reply = await api.chat.completions.create(model="target", messages=SAID, max_tokens=20)
    by_grpc = await expected(served, GenerateOptions(max_tokens=20))
    (choice,) = reply.choices
    assert choice.message.content == by_grpc.text
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.logprobs is None
    usage = reply.usage
    assert usage.prompt_tokens == len(by_grpc.started.prompt_token_ids)
    assert (usage.completion_tokens, usage.total_tokens) == (20, usage.prompt_tokens + 20)
    assert usage.completion_tokens_details is None
    assert reply.object == "chat.completion"
    assert reply.model == "target"
    assert reply.system_fingerprint
    metrics = reply.metrics["speculative_decoding"]
    assert {"num_draft_tokens", "mean_acceptance_length", "num_loose_tokens"} <= metrics.keys()
    assert reply.timings["predicted_n"] == 20
    assert reply.timings["prompt_n"] == usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "speculation", "rule", "lossless"),
    [
        ("target", {}, "relaxed", False),
        ("target:rejection", {}, "rejection", True),
        (
            "target",
            {"phases": [{"rule": {"name": "fly"}, "until": "a"}, {}]},
            "fly, relaxed",
            False,
        ),
        ("target:exact", {"phases": [{"until": "a"}, {}]}, "exact, exact", True),
    ],
)
async def test_a_reply_names_its_rule(api, model, speculation, rule, lossless, stream):
    reply = await api.chat.completions.with_raw_response.create(
        model=model, messages=SAID, max_tokens=4, stream=stream,
        extra_body={"speculation": speculation},
    )  # fmt: skip
    assert reply.headers["x-flyspec-rule"] == rule
    parsed = reply.parse()
    last = [chunk async for chunk in parsed][-1] if stream else parsed
    said = last.metrics["speculation"]
    assert (said["rule"]["name"], said["lossless"]) == (rule.split(", ")[0], lossless)
    named = [phase["rule"]["name"] for phase in said.get("phases", [said])]
    assert ", ".join(named) == rule
    if rule == "relaxed":
        assert said["rule"]["relaxed_delta"] == 0.01
    if rule.startswith("fly"):
        assert said["rule"]["entropy_measure"] == "top_k"


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
async def test_a_stream_is_the_same_in_parts(api, usage):
    asked = {"model": "target:exact", "messages": SAID, "max_completion_tokens": 20}
    whole = await api.chat.completions.create(**asked)
    more = {"stream_options": usage} if usage else {}
    chunks = [c async for c in await api.chat.completions.create(**asked, stream=True, **more)]
    first, *rest = chunks
    assert first.choices[0].delta.role == "assistant"
    assert {c.id for c in chunks} == {first.id}
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    ended = [c for c in chunks if c.choices and c.choices[0].finish_reason]
    assert [c.choices[0].finish_reason for c in ended] == ["length"]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert all(c.choices[0].delta.role is None for c in rest if c.choices)
    last = chunks[-1]
    assert "speculative_decoding" in last.metrics
    if usage:
        assert last.choices == []
        assert last.usage == whole.usage
        assert all(c.usage is None for c in chunks[:-1])
    else:
        assert last is ended[0]
        assert all(c.usage is None for c in chunks)


async def test_the_wire_ends_with_done_and_is_not_cached(bare):
    body = {"messages": SAID, "max_tokens": 3, "stream": True}
    reply = await bare.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)


async def test_choices_differ_by_seed_and_repeat(served, api):
    asked = {"model": "target", "messages": SAID, "max_tokens": 8, "temperature": 1.5}
    asked |= {"n": 3, "seed": 7, "extra_body": EXACT}
    reply = await api.chat.completions.create(**asked)
    texts = [choice.message.content for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert reply.usage.completion_tokens == 24
    for choice in reply.choices:
        assert choice.seed == 7 + choice.index
        options = GenerateOptions(
            sampling=SamplingParams(temperature=1.5), seed=choice.seed, max_tokens=8,
            rule=Rule("exact"),
        )  # fmt: skip
        assert (await expected(served, options)).text == choice.message.content
    parts, seeds = dict.fromkeys(range(3), ""), {}
    async for chunk in await api.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
            seeds[choice.index] = getattr(choice, "seed", None)  # at the end
    assert list(parts.values()) == texts
    assert seeds == {0: 7, 1: 8, 2: 9}


async def test_stop_strings_end_it_and_never_leak(served, api):
    text = (await expected(served, GenerateOptions(max_tokens=40))).text
    stop = text[9:13]
    asked = {"model": "target", "messages": SAID, "max_tokens": 40, "stop": ["\0", stop]}
    reply = await api.chat.completions.create(**asked)
    (choice,) = reply.choices
    assert choice.message.content == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    sent = ""
    async for chunk in await api.chat.completions.create(**asked, stream=True):
        sent += chunk.choices[0].delta.content or ""
        assert stop not in sent
    assert sent == choice.message.content


async def test_stop_tokens_end_it(served, api):
    generation = await expected(served, GenerateOptions(max_tokens=12))
    token = generation.token_ids[5]
    at = generation.token_ids.index(token)
    more = {"stop_token_ids": [token], "return_token_ids": True}
    reply = await api.chat.completions.create(
        model="target", messages=SAID, max_tokens=12, extra_body=more
    )
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token)
    assert choice.token_ids == generation.token_ids[: at + 1]
    assert choice.prompt_token_ids == list(generation.started.prompt_token_ids)


async def test_log_probabilities(served, api):
    asked = {"model": "target", "messages": SAID, "max_tokens": 6, "logprobs": True}
    reply = await api.chat.completions.create(**asked, top_logprobs=2, extra_body=EXACT)
    options = GenerateOptions(max_tokens=6, logprobs=2, rule=Rule("exact"))
    by_grpc = await expected(served, options)
    content = reply.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(
        [entry.logprob for entry in by_grpc.logprobs]
    )
    joined = b"".join(bytes(entry.bytes) for entry in content)
    assert joined.decode(errors="replace") == reply.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content)  # greedy
    bare = await api.chat.completions.create(**asked)
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


async def test_origins_and_costs_when_asked(api):
    more = {"return_origins": True, "speculation": {"numSpeculativeTokens": 4}}
    asked = {"model": "target", "messages": SAID, "max_tokens": 16}
    reply = await api.chat.completions.create(**asked, extra_body=more)
    (choice,) = reply.choices
    assert len(choice.origins) == 16
    assert choice.origins.count("LOOSE") == len(choice.loose_gaps_nats)
    assert reply.metrics["speculative_decoding"]["num_spec_steps"] > 0
    origins = []
    async for chunk in await api.chat.completions.create(**asked, stream=True, extra_body=more):
        origins += getattr(chunk.choices[0], "origins", [])
    assert origins == choice.origins


@pytest.mark.parametrize(
    ("asked", "same"),
    [({}, {"temperature": 1e-6}), ({"temperature": 1, "seed": 3}, {"extra_body": {"top_k": -1}})],
)
async def test_a_tiny_temperature_is_greedy_and_top_k_of_minus_one_is_all(api, asked, same):
    asked = {"model": "target", "messages": SAID, "max_tokens": 8} | asked
    texts = [
        (await api.chat.completions.create(**asked | more)).choices[0].message.content
        for more in ({}, same)
    ]
    assert texts[0] == texts[1]


async def test_tools_reach_the_template_unless_none_is_to_be_called(api):
    tool = {"type": "function", "function": {"name": "a_long_name", "parameters": {}}}
    asked = {"model": "target", "messages": SAID, "max_tokens": 1}
    counts = [
        (await api.chat.completions.create(**asked, **more)).usage.prompt_tokens
        for more in ({}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "none"})
    ]
    assert counts[0] == counts[2] < counts[1]


async def test_parts_of_text_and_the_developer(served, api):
    parts = [{"type": "text", "text": "The cat"}, {"type": "text", "text": "sat"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    reply = await api.chat.completions.create(model="target", messages=messages, max_tokens=5)
    same = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "The cat\nsat"}
    ]  # fmt: skip
    assert (
        reply.choices[0].message.content
        == (await expected(served, GenerateOptions(max_tokens=5), same)).text
    )


async def test_a_final_message_is_continued(api):
    messages = [*SAID, {"role": "assistant", "content": "mat, and"}]
    more = {"continue_final_message": True, "return_token_ids": True}
    reply = await api.chat.completions.create(
        model="target", messages=messages, max_tokens=4, extra_body=more
    )
    other = await api.completions.create(
        model="target",
        prompt="user: The cat sat on the\nassistant: mat, and",
        max_tokens=4,
        extra_body={"return_token_ids": True},
    )
    assert reply.choices[0].prompt_token_ids == other.choices[0].prompt_token_ids[1:]  # no <s>


async def test_a_prediction_is_drafted_and_counted(served, api):
    asked = {"model": "target:exact", "messages": SAID, "max_tokens": 40}
    plain = await api.chat.completions.create(**asked)
    assert plain.usage.completion_tokens_details is None
    text = plain.choices[0].message.content
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    for content in (text, parts):
        reply = await api.chat.completions.create(
            **asked, prediction={"type": "content", "content": content}
        )
        assert reply.choices[0].message.content == text
        details = reply.usage.completion_tokens_details
        share = reply.metrics["speculative_decoding"]
        counted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
        assert 0 <= counted <= share["num_draft_tokens"]
    useless = {"type": "content", "content": "nothing of the kind " * 5}
    reply = await api.chat.completions.create(**asked, prediction=useless)
    assert reply.usage.completion_tokens_details.accepted_prediction_tokens == 0


async def test_a_call_before_is_an_object_for_the_template(chat_dirs, tmp_path):
    """As with `/v1/responses`: templates write arguments as JSON themselves."""
    target = tmp_path / "target"
    shutil.copytree(chat_dirs[0], target)
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    template = f"{{% for m in messages %}}{{{{ m.role }}}}{calls}{{% endfor %}}"
    (target / "chat_template.jinja").write_text(template)
    function = {"name": "f", "arguments": '{"a": 12}'}
    called = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    async with (
        start_stack((str(target), chat_dirs[1]), http_port=0) as stack,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{stack.http_port}") as client,
    ):
        asked = {"messages": [*SAID, called], "add_generation_prompt": False}
        tokens = (await client.post("/tokenize", json=asked)).json()["tokens"]
        text = (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    assert text.endswith('assistant{"a": 12}')


async def test_warnings(api):
    odd = {"speculation": {"numSpeculativeTokens": 6, "rule": {"name": "fly"}}}
    asked = {"model": "target", "messages": SAID, "max_tokens": 3, "extra_body": odd}
    reply = await api.chat.completions.create(**asked)
    assert "rule.fly_window_size is 5 instead of 6" in reply.warnings[0]
    *_, last = [chunk async for chunk in await api.chat.completions.create(**asked, stream=True)]
    assert last.warnings == reply.warnings
    response = await api.responses.create(model="target", input="x", extra_body=odd)
    assert response.warnings == reply.warnings

"""Bad requests: OpenAI's shape, the right code, and a message that says what to change."""

from __future__ import annotations

import gzip
import json

import openai
import pytest

SAID = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def spec(**given):
    return {"messages": SAID, "speculation": given}


async def refused(bare, path, body, param, message):
    for more in ({}, {"stream": True}) if path in (CHAT, TEXT) else ({},):
        reply = await bare.post(path, json=body | more)
        error = reply.json()["error"]
        assert reply.status_code == 400, error
        assert error["type"] == "invalid_request_error"
        code = "context_length_exceeded" if "context length" in message else None
        assert (error["param"], error["code"]) == (param, code)
        assert message in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"frobnicate": 1}, "there is no such parameter"),
        ({"temperature": "hot"}, "must be a number"),
        ({"temperature": -1}, "must be 0 (greedy) or"),
        ({"top_p": 0}, "must be"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"n": 129}, "less than or equal to 128"),
        ({"seed": 2**53}, "less than 9007199254740992"),
        ({"stop": ["a"] * 5}, "at most 4 allowed, got 5"),
        ({"stop": ""}, "1 to 1024 characters"),
        ({"stop": 3}, "must be a string"),
        ({"stop_token_ids": [400]}, "out of range"),
        ({"stop_token_ids": [-1]}, "not a token id"),
        ({"logit_bias": {"x": 1}}, "'x' is not a token id"),
        ({"top_logprobs": 21}, "less than or equal to 20"),
        ({"top_logprobs": 3}, "only with logprobs true"),
        ({"min_tokens": 9, "max_tokens": 3}, "between 0 and 3"),
        ({"response_format": {"type": "json_object"}}, 'only {"type": "text"} is served here'),
        ({"tool_choice": "required"}, "'auto' or 'none'"),
        ({"reasoning_effort": "low"}, 'only "none" is'),
        ({"guided_json": {}}, "is not served here"),
        ({"max_token": 3}, "no such parameter; did you mean max_tokens?"),
        ({"chat_template_kwargs": {"messages": []}}, "messages is a field of the chat"),
        (
            {"prediction": {"type": "content", "content": "x"},
             "speculation": {"numSpeculativeTokens": 0}},
            "not with speculation.num_speculative_tokens 0",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt to false",
        ),
        ({"speculation": {"rule": {"nam": "x"}}}, 'has no field named "nam"'),
        ({"speculation": {"frob": 1}}, "frob"),
    ],
)  # fmt: skip
async def test_bad_parameters_of_a_chat(bare, body, message):
    await refused(bare, CHAT, {"messages": SAID, **body}, next(iter(body)), message)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, {}, "messages", "is missing"),
        (CHAT, {"messages": []}, "messages", "is empty; give at least one"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "must be"),
        (CHAT, {"messages": SAID, "logit_bias": {"1": 101}}, "logit_bias[1]", "must be"),
        (
            CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type", "only text is served",
        ),
        (CHAT, spec(rule={"name": "x"}), "speculation.rule.name", "one of"),
        (CHAT, spec(rule="exact"), "speculation.rule", 'an object such as {"name": "exact"}'),
        (
            CHAT, spec(rule={"name": "exact", "flyEntropyThreshold": 0.4}),
            "speculation.rule.fly_entropy_threshold", "does not apply",
        ),
        (CHAT, spec(eager=True), "speculation.eager", "over"),
        (
            CHAT, {"messages": SAID, "tools": [{"type": "function", "name": "f"}]},
            "tools[0].function", "must be an object with a name",
        ),
        (
            CHAT, {"messages": [*SAID, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[1].tool_calls[0].function", "must be an object",
        ),
        (
            CHAT, {"messages": [{"role": "user", "content": "word " * 300}]},
            "messages", "this model's maximum context length is 256 tokens, but",
        ),
        (
            CHAT,
            {"messages": SAID, "model": "target:exact", "speculation": {"rule": {"name": "fly"}}},
            "speculation.rule.name", "give one of them",
        ),
        (
            CHAT, {"messages": SAID, "max_completion_tokens": 256},
            "max_tokens", "context length is 256 tokens, of which the prompt has",
        ),
        (TEXT, {"prompt": "a", "frob": 1, "nicate": 2}, "frob", "there is no such parameter"),
        (TEXT, {"prompt": ["a", "word " * 300]}, "prompt[1]", "maximum context length is 256"),
        (
            TEXT, {"prompt": "a", "max_tokens": 0, "echo": True, "temperature": -5},
            "temperature", "must be",
        ),
        (TEXT, {"prompt": ""}, "prompt", "text is empty"),
        (TEXT, {"prompt": []}, "prompt", "is empty; give"),
        (TEXT, {"prompt": [400]}, "prompt", "token id 400 is out of range"),
        (TEXT, {"prompt": [[-1]]}, "prompt[0]", "-1 is not a token id"),
        (TEXT, {"prompt": ["a"] * 129}, "prompt", "at most 128 allowed, got 129"),
        (TEXT, {"prompt": ["a"] * 65, "n": 2}, "prompt", "more than 128 choices"),
        (TEXT, {"prompt": [1] * 256}, "prompt", "maximum context length is 256 tokens, but"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "or 0 with echo"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "is served here"),
        (TEXT, {"prompt": "a", "best_of": 2}, "best_of", "only 1 is served here"),
        ("/tokenize", {}, "prompt", "give either prompt or messages"),
        ("/detokenize", {"tokens": [400]}, "tokens", "out of range"),
    ],
)  # fmt: skip
async def test_bad_values(bare, path, body, param, message):
    await refused(bare, path, body, param, message)


@pytest.mark.parametrize(
    "neutral",
    [
        {"response_format": {"type": "text"}}, {"tool_choice": "auto"}, {"store": False},
        {"parallel_tool_calls": False}, {"reasoning_effort": "none"},
        {"modalities": ["text"]}, {"service_tier": "auto"},
        {"stop": None, "seed": None, "temperature": None, "tools": None}, {"frequency_penalty": 0},
        {"user": "someone", "metadata": {"a": "b"}}, {"logit_bias": {}}, {"top_k": 0, "min_p": 0.0},
    ],
)  # fmt: skip
async def test_values_that_change_nothing(bare, neutral):
    reply = await bare.post(CHAT, json={"messages": SAID, "max_tokens": 1, **neutral})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{nope", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"3", "must be a JSON object"),
        (b"", "must be a JSON object"),
        (b'{"messages": ' + b"[" * 50_000, "nested too deeply"),
        (b'{"messages": "\xff"}', "the body is not UTF-8: byte 14 is invalid"),
        (gzip.compress(b"{}", mtime=0), "the body is not UTF-8"),
    ],
)
async def test_bodies_that_are_no_objects(bare, content, message):
    headers = {"content-type": "application/json"}
    reply = await bare.post(CHAT, content=content, headers=headers)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


async def test_compressed_bodies(bare):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    reply = await bare.post(CHAT, content=gzip.compress(b"{}", mtime=0), headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (415, "invalid_request_error")
    assert error["message"].startswith("content-encoding: 'gzip' is not supported; send the body")
    headers["content-encoding"] = "identity"
    sent = json.dumps({"messages": SAID, "max_tokens": 1})
    assert (await bare.post(CHAT, content=sent, headers=headers)).status_code == 200


async def test_special_tokens_in_messages_stay_text(bare):
    """Of the target's tokenizer: 0 is <s>, 1 is </s>."""
    said = [{"role": "system", "content": "a<s>"}, {"role": "user", "content": "b</s>c"}]
    asked = {"messages": said, "tools": [{"type": "function", "function": {"name": "</s>"}}]}
    found = (await bare.post("/tokenize", json=asked)).json()["tokens"]
    assert min(found) > 2
    text = await bare.post("/detokenize", json={"tokens": found})
    assert text.json()["prompt"] == "system: a<s>\nuser: b</s>c\n</s>\nassistant:"
    more = {"max_tokens": 1, "return_token_ids": True}
    reply = await bare.post(CHAT, json=asked | more)
    assert reply.json()["choices"][0]["prompt_token_ids"] == found
    reply = await bare.post(TEXT, json={"prompt": "b</s>c", **more})
    assert 1 in reply.json()["choices"][0]["prompt_token_ids"]  # a prompt is the client's to write


async def test_unknown_models_paths_and_methods(bare):
    reply = await bare.post(CHAT, json={"messages": SAID, "model": "gpt-9"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "served is target, or target:RULE" in error["message"]
    assert (await bare.get("/v1/models/target:nope")).status_code == 404
    reply = await bare.get("/v1/nothing")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    reply = await bare.get(CHAT)
    assert (reply.status_code, reply.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_a_body_that_is_too_large(bare):
    reply = await bare.post(CHAT, content=b" " * (4 << 20))
    assert reply.status_code == 413
    assert "bytes; shorten it" in reply.json()["error"]["message"]

    async def pieces():
        for _ in range(64):
            yield b" " * (1 << 16)

    reply = await bare.post(CHAT, content=pieces())  # without its length
    assert reply.status_code == 413


async def test_openai_raises_what_it_raises_elsewhere(api):
    long = [{"role": "user", "content": "x" * (4 << 20)}]
    for error, code, message, asked in (
        (openai.NotFoundError, 404, "there is no 'x'", {"model": "x"}),
        (openai.BadRequestError, 400, "stop: at most 4", {"stop": ["a"] * 5}),
        (openai.APIStatusError, 413, "shorten it", {"messages": long}),
    ):
        with pytest.raises(error, match=message) as caught:
            await api.chat.completions.create(**{"model": "target", "messages": SAID, **asked})
        assert caught.value.status_code == code


async def test_models_and_their_aliases(api):
    models = [model async for model in api.models.list()]
    assert models[0].id == "target"
    assert "target:exact" in [model.id for model in models]
    alias = await api.models.retrieve("target:exact")
    assert (alias.id, alias.rule, alias.max_model_len) == ("target:exact", "exact", 256)


async def test_tokens_there_and_back(bare):
    reply = await bare.post("/tokenize", json={"prompt": "The 😀", "return_token_strs": True})
    found = reply.json()
    assert found["tokens"][0] == 0
    assert found["token_strs"][:2] == ["<s>", "The"]
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 256
    text = await bare.post("/detokenize", json={"tokens": found["tokens"]})
    assert text.json() == {"prompt": "The 😀"}
    bare_text = {"prompt": "The 😀", "add_special_tokens": False}
    assert (await bare.post("/tokenize", json=bare_text)).json()["tokens"] == found["tokens"][1:]
    chat = (await bare.post("/tokenize", json={"messages": SAID})).json()["tokens"]
    reply = await bare.post(
        CHAT, json={"messages": SAID, "max_tokens": 1, "return_token_ids": True}
    )
    assert reply.json()["choices"][0]["prompt_token_ids"] == chat


async def test_health_version_and_schema(bare):
    assert (await bare.get("/health")).status_code == 200
    assert (await bare.get("/version")).json() == {"version": "0.1.0"}
    schema = (await bare.get("/openapi.json")).json()
    assert {CHAT, TEXT, "/v1/models", "/tokenize"} <= schema["paths"].keys()
    chat = schema["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "top_k", "min_p", "speculation", "stop"} <= chat.keys()


async def test_request_ids(bare):
    given = {"x-request-id": "mine-1"}
    assert (await bare.get("/version", headers=given)).headers["x-request-id"] == "mine-1"
    made = (await bare.get("/version", headers={"x-request-id": "a b"})).headers["x-request-id"]
    assert len(made) == 16

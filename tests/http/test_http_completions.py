"""Completions: lists of prompts, echo, and log-probabilities of given texts."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from flyspec.client import GenerateOptions
from flyspec.engine.loading import load_model
from flyspec.rules import Rule

TEXT = "The cat sat on the mat, and the dog saw 😀"


@pytest.fixture(scope="module")
def reference(chat_dirs):
    """transformers' log-probabilities [n - 1, V] of a text's tokens behind the first."""
    loaded = load_model(chat_dirs[0], "cpu", "float64")

    def score(token_ids):
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([token_ids])).logits[0, :-1]
        return torch.log_softmax(logits.double(), -1)

    return score


@pytest.mark.parametrize("kind", ["text", "ids", "texts", "lists of ids"])
async def test_prompts_in_every_form(served, api, kind):
    texts = ["The cat", "the dog saw"]
    ids = []
    for text in texts:
        generation = await served.client.complete(text, GenerateOptions(max_tokens=1))
        ids.append(list(generation.started.prompt_token_ids))
    prompt = {"text": texts[0], "ids": ids[0], "texts": texts, "lists of ids": ids}[kind]
    reply = await api.completions.create(model="target", prompt=prompt, max_tokens=6, n=2)
    expected = [
        (await served.client.complete(text, GenerateOptions(max_tokens=6))).text
        for text in (texts[:1] if kind in ("text", "ids") else texts)
        for _ in range(2)
    ]
    assert [choice.text for choice in reply.choices] == expected
    assert [choice.index for choice in reply.choices] == list(range(len(expected)))
    counted = sum(map(len, ids[: len(expected) // 2]))
    assert reply.usage.prompt_tokens == counted
    assert reply.object == "text_completion"


async def test_more_prompts_than_run_at_once(api):
    prompts = [f"{number} cats" for number in range(20)]
    reply = await api.completions.create(model="target", prompt=prompts, max_tokens=2)
    alone = await api.completions.create(model="target", prompt=prompts[17], max_tokens=2)
    assert reply.choices[17].text == alone.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_is_scored_as_transformers_scores_it(api, reference, stream):
    asked = {"model": "target:exact", "prompt": TEXT, "max_tokens": 3, "echo": True, "logprobs": 2}
    asked["extra_body"] = {"return_token_ids": True}
    reply = await api.completions.create(**asked)
    (choice,) = reply.choices
    tokens = [*choice.prompt_token_ids, *choice.token_ids]
    if stream:
        chunks = [c.choices[0] async for c in await api.completions.create(**asked, stream=True)]
        assert "".join(c.text for c in chunks) == choice.text
        found = [c.logprobs for c in chunks if c.logprobs]
        entries = {
            name: [entry for part in found for entry in getattr(part, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        assert entries == {name: getattr(choice.logprobs, name) for name in entries}
    table = reference(tokens)
    expected = [table[place, token].item() for place, token in enumerate(tokens[1:])]
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert others == pytest.approx(expected, abs=1e-5)
    assert choice.text.startswith(TEXT)
    top = [sorted(e.values(), reverse=True)[:2] for e in choice.logprobs.top_logprobs[1:]]
    chosen = zip(choice.logprobs.tokens[1:], others, choice.logprobs.top_logprobs[1:], strict=True)
    assert all(found[name] == logprob for name, logprob, found in chosen)
    assert [*itertools.chain(*top)] == pytest.approx(
        table.topk(2).values.flatten().tolist(), abs=1e-5
    )
    offsets = choice.logprobs.text_offset
    assert offsets == sorted(offsets)
    assert len(offsets) == len(tokens)


async def test_only_scoring(api, reference):
    asked = {"model": "target", "prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = await api.completions.create(**asked, extra_body={"return_token_ids": True})
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    tokens = choice.prompt_token_ids
    assert reply.usage.prompt_tokens == len(tokens)
    assert reply.usage.completion_tokens == 0
    expected = reference(tokens)[range(len(tokens) - 1), tokens[1:]]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-5)


async def test_echo_without_log_probabilities(api):
    asked = {"model": "target", "prompt": "The cat", "max_tokens": 3}
    plain = await api.completions.create(**asked)
    echoed = await api.completions.create(**asked, echo=True)
    assert echoed.choices[0].text == "The cat" + plain.choices[0].text
    assert echoed.choices[0].logprobs is None


@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 200])
async def test_scores_over_grpc_of_any_length(served, reference, length):
    tokens = [(7 * i) % 371 for i in range(length)]
    pieces = [piece async for piece in served.client.score(tokens, logprobs=3)]
    assert [token for piece in pieces for token in piece.token_ids] == tokens
    found = [entry for piece in pieces for entry in piece.logprobs]
    assert len(found) == length - 1
    if found:
        table = reference(tokens)
        expected = table[range(length - 1), tokens[1:]].tolist()
        assert [entry.logprob for entry in found] == pytest.approx(expected, abs=1e-5)
        assert [e.top_token_ids for e in found] == [
            tuple(r) for r in table.topk(3).indices.tolist()
        ]
    bytes_of = served.orchestrator.fleet.target.tokenizer.bytes_of
    assert [entry.token for entry in found] == [*map(bytes_of, tokens[1:])]
    texts = "".join(text for piece in pieces for text in piece.token_texts)
    assert texts == served.orchestrator.fleet.target.tokenizer.decode(tokens)
    assert await served.idle()


async def test_scoring_does_not_depend_on_the_rule_or_disturb_generations(served):
    options = GenerateOptions(max_tokens=10, rule=Rule("exact"))
    before = await served.client.complete(TEXT, options)
    async for _ in served.client.score(TEXT):
        pass
    assert (await served.client.complete(TEXT, options)).text == before.text


@pytest.mark.parametrize(
    ("asked", "temperature"),
    [({"prompt": TEXT}, 0.8), ({"messages": [{"role": "user", "content": TEXT}]}, 0.0)],
)
async def test_a_client_resumes_a_stream_that_broke_off(bare, asked, temperature):
    """By docs/reliability.md, "Resuming", also where the request was a chat."""
    path = "/v1/completions" if "prompt" in asked else "/v1/chat/completions"
    same = {"model": "target:exact", "seed": 7, "temperature": temperature, "ignore_eos": True}
    same["return_token_ids"] = True
    whole = (await bare.post(path, json={**asked, **same, "max_tokens": 40})).json()["choices"][0]
    received = []
    body = {**asked, **same, "max_tokens": 40, "stream": True}
    async with bare.stream("POST", path, json=body) as reply:
        async for line in reply.aiter_lines():
            for choice in json.loads(line.removeprefix("data: "))["choices"] if line else []:
                received += choice.get("token_ids", [])
            if len(received) >= 10:
                break
    assert len(received) < 40
    prompt = (await bare.post("/tokenize", json={"model": "target", **asked})).json()["tokens"]
    body = {"prompt": prompt + received, **same, "max_tokens": 40 - len(received)}
    rest = (await bare.post("/v1/completions", json=body)).json()["choices"][0]
    assert received + rest["token_ids"] == whole["token_ids"]
    body = {"model": "target", "tokens": whole["token_ids"]}
    text = (await bare.post("/detokenize", json=body)).json()["prompt"]
    assert text == (whole["text"] if "prompt" in asked else whole["message"]["content"])

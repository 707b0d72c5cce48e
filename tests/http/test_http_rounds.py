"""Rounds over HTTP: what they tell, when they were made, and repeating a run by their lengths."""

from __future__ import annotations

import json
from itertools import cycle

import pytest

from flyspec.client import GenerateOptions
from flyspec.client.recordings import from_line, recordable, recording_of
from flyspec.rules import Rule
from flyspec.values.phases import Phase

SAID = [{"role": "user", "content": "the cat saw the dog and the cat saw"}]
WANTED = {
    "return_rounds": True, "return_origins": True, "return_token_ids": True,
    "return_token_texts": True, "max_tokens": 40, "ignore_eos": True,
}  # fmt: skip
ACROSS = {
    "name": "fly", "entropy_measure": "top_k", "fly_entropy_threshold": 0.0, "fly_window_size": 2,
    "window_scope": "across_rounds",
}  # fmt: skip
"""Accepts every mismatch for the time being, so most windows fail."""


async def streamed(bare, path, body):
    """Return a stream's frames."""
    async with bare.stream("POST", path, json={"stream": True, **WANTED, **body}) as reply:
        assert reply.status_code == 200, await reply.aread()
        lines = [line async for line in reply.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(frames, name):
    """Return a list that the only choice's frames have parts of."""
    return [item for f in frames for choice in f["choices"] for item in choice.get(name, ())]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_rounds_are_those_of_grpc(served, bare, path):
    spec = {"rule": ACROSS, "num_speculative_tokens": 1}
    prompt = {"prompt": "the cat saw"} if path == "/v1/completions" else {"messages": SAID}
    body = {**prompt, "seed": 3, "speculation": spec}
    reply = (await bare.post(path, json={**WANTED, **body})).json()
    frames = await streamed(bare, path, body)
    (choice,) = reply["choices"]
    rounds = choice["rounds"]
    assert rounds == joined(frames, "rounds")
    assert reply["metrics"]["speculative_decoding"]["num_rollbacks"] > 0
    assert any(r["keep_length"] < r["start_length"] for r in rounds)
    for name in ("origins", "token_ids", "token_texts"):
        assert choice[name] == joined(frames, name)
    text = choice["text"] if "prompt" in prompt else choice["message"]["content"]
    assert "".join(choice["token_texts"]) == text
    if "prompt" in prompt:
        rule = Rule("fly", 2, 0.0, window_scope=2)
        asked = GenerateOptions(
            seed=3, max_tokens=40, ignore_eos=True, rule=rule, num_speculative_tokens=1,
            return_rounds=True,
        )  # fmt: skip
        same = await served.client.complete("the cat saw", asked)
        assert [r["draft_token_ids"] for r in rounds] == [
            [*record.draft_token_ids] for record in same.rounds
        ]
        for told, record in zip(rounds, same.rounds, strict=True):
            for decision, whole in zip(told["decisions"], record.decisions, strict=True):
                assert decision["outcome"] == whole.outcome.name
                assert decision["target_token_id"] == whole.target_token_id
                assert decision["gap_nats"] == whole.gap_nats


async def test_phases_are_those_of_grpc(served, bare):
    loose = Rule("margin", margin_threshold=9.0, fly_window_size=0, window_scope=1)
    spec = {
        "rule": {"name": "margin", "margin_threshold": 9.0, "fly_window_size": 0,
                 "window_scope": "within_round"},
        "num_speculative_tokens": 6,
        "phases": [{"until": "a", "max_loose_tokens": 4}, {"rule": {"name": "exact"}}],
        "exact_inside": ["json"],
    }  # fmt: skip
    body = {"prompt": "the cat saw", "seed": 3, "speculation": spec}
    (choice,) = (await bare.post("/v1/completions", json={**WANTED, **body})).json()["choices"]
    phases = [Phase(until=["a"], max_loose_tokens=4), Phase(Rule("exact"))]
    same = await served.client.complete(
        "the cat saw", seed=3, max_tokens=40, ignore_eos=True, rule=loose, phases=phases,
        exact_inside=["json"], num_speculative_tokens=6, return_rounds=True,
    )  # fmt: skip
    assert choice["text"] == same.text
    assert [r["rule_segments"] for r in choice["rounds"]] == [
        [segment.document() for segment in record.rule_segments] for record in same.rounds
    ]
    assert any(len(record.rule_segments) > 1 for record in same.rounds)


async def test_tokens_of_rounds_have_texts(served, bare):
    body = {"prompt": "the cat saw", "speculation": {"rule": ACROSS, "num_speculative_tokens": 5}}
    (choice,) = (await bare.post("/v1/completions", json={**WANTED, **body})).json()["choices"]
    known = served.orchestrator.fleet.target.tokenizer.bytes_of

    def spelled(token_id, text):
        return text == known(token_id).decode(errors="ignore") or text.startswith("bytes:")

    for round_ in choice["rounds"]:
        pairs = [*zip(round_["draft_token_ids"], round_["draft_token_texts"], strict=True)]
        pairs.append((round_["next_token_id"], round_["next_token_text"]))
        parts = [*round_["decisions"], *([round_["open_window"]] if round_["open_window"] else [])]
        for part in parts:
            if part["target_token_id"] is None:
                assert part["target_token_text"] is None
            else:
                pairs.append((part["target_token_id"], part["target_token_text"]))
        assert all(spelled(*pair) for pair in pairs)
    assert any(d["target_token_text"] for r in choice["rounds"] for d in r["decisions"])


SPECULATIONS = {
    "auto": {},
    "auto, exact": {"rule": {"name": "exact"}},
    "fixed": {"num_speculative_tokens": 6, "rule": {"name": "fly", "fly_entropy_threshold": 0.1}},
    "across rounds": {"rule": ACROSS, "num_speculative_tokens": 2},
    "across rounds, auto": {"rule": ACROSS},
    "margin": {"rule": {"name": "margin", "margin_threshold": 0.3}, "num_speculative_tokens": 7},
}


@pytest.mark.parametrize(
    ("name", "temperature"), [*zip(SPECULATIONS, cycle([0.0, 0.9]), strict=False)]
)
async def test_a_run_is_repeated_by_its_seed_and_round_lengths(bare, name, temperature):
    speculation = SPECULATIONS[name]
    body = {"messages": SAID, "temperature": temperature, "speculation": speculation}
    first = await streamed(bare, "/v1/chat/completions", body)
    end = first[-1]["choices"][0]
    lengths = end["num_draft_tokens_per_round"]
    again = body | {
        "seed": end["seed"],
        "speculation": {**speculation, "num_draft_tokens_per_round": lengths},
    }
    second = await streamed(bare, "/v1/chat/completions", again)
    assert second[-1]["choices"][0]["num_draft_tokens_per_round"] == lengths
    for what in ("token_ids", "origins", "loose_gaps_nats", "token_texts"):
        assert joined(first, what) == joined(second, what)
    with_drafts = [[r for r in joined(f, "rounds") if r["decisions"]] for f in (first, second)]
    assert with_drafts[0] == with_drafts[1]
    assert [len(r["decisions"]) for r in with_drafts[0]] == [n for n in lengths if n]


async def test_frames_have_the_servers_time(bare):
    options = {"include_usage": True, "include_elapsed_ms": True}
    body = {"messages": SAID, "stream_options": options}
    frames = await streamed(bare, "/v1/chat/completions", body)
    times = [frame["elapsed_ms"] for frame in frames]
    assert times == sorted(times)
    assert times[0] >= 0
    timings = frames[-1]["timings"]
    assert times[-1] >= timings["predicted_ms"]


async def test_nothing_of_it_unless_it_is_asked_for(bare):
    body = {"messages": SAID, "stream": True, "max_tokens": 8}
    async with bare.stream("POST", "/v1/chat/completions", json=body) as reply:
        text = (await reply.aread()).decode()
    for name in ("rounds", "elapsed_ms", "num_draft_tokens_per_round", "token_texts"):
        assert f'"{name}"' not in text
    whole = (await bare.post("/v1/chat/completions", json=body | {"stream": False})).text
    assert '"rounds"' not in whole
    assert "token_texts" not in whole


BITS = "speculation.rule.entropy_measure must be one of normalized, top_k, got 'bits'"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_draft_tokens_per_round": [99]}, "num_draft_tokens_per_round[0] must be an integer"),
        ({"rule": {"name": "fly", "entropy_measure": "bits"}}, BITS),
        ({"rule": {"name": "fly", "entropyMeasure": "bits"}}, BITS),
        ({"rule": {"name": "fly", "entropyMeasure": ["top_k"]}}, "speculation: "),
        (
            {"phases": [{"until": "a"}, {"rule": {"name": "fly", "entropy_measure": "bits"}}]},
            "speculation.phases[1].rule.entropy_measure must be one of normalized, top_k",
        ),
        ({"phases": [{"rule": "fly"}]}, "speculation.phases[0].rule: must be an object"),
        ({"phases": [{"until": "a"}]}, "speculation.phases[0].until: the last phase has no end"),
        ({"phases": ["fly"]}, "speculation: "),
        ({"exact_inside": ["xml"]}, "exact_inside must be one of tool_call, json, got 'xml'"),
    ],
)
async def test_bad_speculation_is_refused_by_name(bare, given, message):
    body = {"messages": SAID, "max_tokens": 1, "speculation": given}
    reply = await bare.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


async def test_a_recording_is_that_of_grpc(served, bare):
    """With log-probabilities and rounds, which the choice itself does not have."""
    asked = {"prompt": "the cat saw", "seed": 3, "max_tokens": 20, "return_recording": True}
    (choice,) = (await bare.post("/v1/completions", json=asked)).json()["choices"]
    recording = from_line(json.dumps(choice["recording"]))
    assert choice["logprobs"] is None
    assert "rounds" not in choice
    assert recording.output.text == choice["text"]
    assert len(recording.output.logprobs) == len(recording.output.token_ids) == 20
    options = recordable(GenerateOptions(seed=3, max_tokens=20))
    same = recording_of(await served.client.complete("the cat saw", options))
    assert recording.output.token_ids == same.output.token_ids
    assert recording.started.numerics == same.started.numerics != ""
    streamed = await bare.post("/v1/completions", json={**asked, "stream": True})
    assert streamed.status_code == 400
    assert "return_recording" in streamed.text

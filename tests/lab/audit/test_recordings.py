"""Files of recordings: what is wrong with one is said with its line and field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flyspec.client.recordings import from_line, read_recordings, recordable, recording_of, to_line
from flyspec.errors import ConfigError, InvalidArgumentError
from flyspec.rules import Rule
from flyspec.rules.resolve import resolve_rule
from flyspec.values.generation import (
    Chunk,
    Completion,
    FinishReason,
    Generation,
    GenerationTimings,
    RoundRecord,
    SpeculationMetrics,
    Started,
)
from flyspec.values.requests import GenerateOptions
from flyspec.values.rounds import Budget, Decision, OpenWindow, Outcome
from flyspec.values.tokens import Origin, SamplingParams, TokenDistribution, TokenLogprobs


def generation(rule: str = "margin", **known: Any) -> Generation:
    started = Started(
        "id", "target", "model", 2**53 - 1, [1, 2], resolve_rule(Rule(rule)), 4,
        sampling=SamplingParams(temperature=0.7), max_tokens=9, max_loose_cost_nats=1.5,
        exact_until_position=2, weights_fingerprint="ab" * 16, numerics="float32, torch",
        server_version="0.1.0",
    )  # fmt: skip
    chunk = Chunk(
        "ab", [7, 8], [Origin.LOOSE, Origin.CORRECTION], ["a", "b"], 2, [0.25],
        [TokenLogprobs(-0.5, token=b"a"), TokenLogprobs(-0.25, token=b"b")],
    )  # fmt: skip
    round_ = RoundRecord(
        2, "model", [7, 9],
        [Decision(Outcome.LOOSE, 8, None, 0.25, 0.25), Decision(Outcome.REJECTED, 8, None, 3.5)],
        3, 8, 4, Budget(None, 1.5), 2, OpenWindow(1, 5, 2, 0.125), 0,
        [Origin.EXACT_MODEL, Origin.EXACT_LOOKUP], [],
        [TokenDistribution(b"\0\0\0\xfc", (7, 8)), TokenDistribution()],
    )  # fmt: skip
    completion = Completion(
        FinishReason.STOP, None, 2, 2, SpeculationMetrics(), GenerationTimings()
    )
    return Generation(started, [chunk], completion, known.get("rounds", [round_]))


def line_with(change) -> str:
    document = json.loads(to_line(recording_of(generation())))
    change(document)
    return json.dumps(document)


def test_a_line_has_everything() -> None:
    recording = recording_of(generation())
    line = to_line(recording)
    assert to_line(from_line(line)) == line
    read = from_line(line)
    assert read.started == recording.started
    assert read.rounds[0].draft_distributions == tuple(recording.rounds[0].draft_distributions)
    assert read.rounds[0].decisions == recording.rounds[0].decisions
    assert read.rounds[0].budget == recording.rounds[0].budget
    assert read.output.token_ids == [7, 8]
    assert [entry.logprob for entry in read.output.logprobs] == [-0.5, -0.25]


def test_recordable_options_ask_for_what_is_needed() -> None:
    asked = recordable(GenerateOptions())
    assert (asked.return_rounds, asked.return_draft_distributions, asked.logprobs) == (1, 1, 0)
    assert recordable(GenerateOptions(logprobs=3)).logprobs == 3


def test_generations_without_what_is_needed_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="return_rounds: must be set"):
        recording_of(generation(rounds=[]))
    bare = RoundRecord(2, "model", [7], [Decision(Outcome.EXACT)], 3, 8, 4)
    with pytest.raises(InvalidArgumentError, match="return_draft_distributions: must be set"):
        recording_of(generation("rejection", rounds=[bare]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"is not JSON"),
        ("[1]", r"is not a recording, which is an object with format_version"),
        ("{}", r"is not a recording"),
        (line_with(lambda d: d.update(format_version=2)), r"format_version is 2, but .* reads 1"),
        (line_with(lambda d: d.update(extra=1)), r'no field named "extra"'),
        (
            line_with(lambda d: d["rounds"][0]["draft_token_ids"].append("x")),
            r"rounds\.draft_token_ids: invalid literal",
        ),
        (
            line_with(lambda d: d["rounds"][0]["decisions"][1].update(outcome="FOO")),
            r"rounds\[0\]\.decisions\[1\]\.outcome: Invalid enum value FOO",
        ),
        (
            line_with(lambda d: d["started"]["rule"].update(name="flee")),
            r"rule",
        ),
        (
            line_with(lambda d: d["started"]["sampling"].update(temperature=-1)),
            r"sampling.temperature must be",
        ),
        (
            line_with(lambda d: d["rounds"][0]["decisions"].pop()),
            r"rounds\[0\]\.decisions: has 1 entries for 2 draft_token_ids",
        ),
        (
            line_with(lambda d: d["output"]["origins"].pop()),
            r"output\.origins: has 1 entries, where 2 are needed",
        ),
        (
            line_with(lambda d: d["output"]["loose_gaps_nats"].pop()),
            r"output\.loose_gaps_nats: has 0 entries, where 1 are needed",
        ),
        (
            line_with(lambda d: d["started"].pop("prompt_token_ids")),
            r"started\.prompt_token_ids: is empty",
        ),
        (line_with(lambda d: d["started"].pop("max_tokens")), r"started\.max_tokens: is missing"),
        (line_with(lambda d: d.pop("completion")), r"completion: is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path, line: str, message: str) -> None:
    path = tmp_path / "recordings.jsonl"
    path.write_text(to_line(recording_of(generation())) + "\n\n" + line + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        list(read_recordings(path))
    assert str(error.value).startswith(f"{path}:3: ")


def test_files_without_recordings(tmp_path) -> None:
    (empty := tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="has no recordings"):
        list(read_recordings(empty))
    with pytest.raises(ConfigError, match="No such file"):
        list(read_recordings(tmp_path / "none"))

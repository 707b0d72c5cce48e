"""`flyspec generate --record` and `flyspec audit`: files, verdicts, exit codes."""

from __future__ import annotations

import json

import pytest

from flyspec.client.recordings import RecordedLine, from_line, to_line
from tests.cli.processes import invoke
from tests.lab.audit.recorded import claiming, with_token

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def recorded(stack, tmp_path_factory):
    """A file of two recordings of the tiny pair, made while texts were printed."""
    path = tmp_path_factory.mktemp("recordings") / "two.jsonl"
    done = invoke(
        "generate", PROMPT, "one two three", "--address", stack.address, "--max-tokens",
        "12", "--num-speculative-tokens", "4", "--temperature", "1", "--seed", "5", "--json",
        "--record", str(path),
    )  # fmt: skip
    assert done.code == 0, done.err
    return path, done


def test_recording_changes_nothing_that_is_printed(recorded) -> None:
    path, done = recorded
    lines = path.read_text().splitlines()
    assert len(lines) == len(done.documents) == 2
    for line, document in zip(lines, done.documents, strict=True):
        assert "rounds" not in document
        assert "logprobs" not in document
        output = from_line(line).output
        assert list(output.token_ids) == document["token_ids"]
        assert output.text == document["text"]
        assert len(output.logprobs) == len(output.token_ids)


def test_what_follows_and_what_does_not(recorded, models, tmp_path) -> None:
    path, _ = recorded
    line = from_line(path.read_text().splitlines()[0])
    forged = with_token(RecordedLine("", line), 3, 7, rounds_too=False)
    seed = claiming(RecordedLine("", line), seed=6)
    other = tmp_path / "forged.jsonl"
    other.write_text("".join(to_line(each.recording) + "\n" for each in (forged, seed)))
    target = ["--model", models[1], "--threads", "1"]
    done = invoke("audit", str(other), str(path), *target, "--json")
    assert done.code == 1
    (document,) = done.documents
    assert [each["follows"] for each in document["generations"]] == [False, False, True, True]
    found = document["generations"][0]["discrepancy"]
    assert (found["token_index"], found["kind"]) == (3, "record")

    done = invoke("audit", str(other), str(path), *target, "--quiet", "--limit", "3")
    assert done.code == 1
    assert f"{path}:1" not in done.out
    assert "altered text" in done.out
    assert "1 of 3 generations follow from the target; " in done.out

    done = invoke("audit", str(path), *target)
    assert done.code == 0, done.out + done.err
    assert f"{path.name}:2" in done.out
    assert done.out.endswith("2 of 2 generations follow from the target\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}\n", "bad.jsonl:1: is not a recording"),
        (json.dumps({"format_version": 9}), "bad.jsonl:1: format_version is 9"),
        ("", "has no recordings; make some with generate --record"),
    ],
)
def test_files_that_are_no_recordings(tmp_path, content, message) -> None:
    (path := tmp_path / "bad.jsonl").write_text(content)
    done = invoke("audit", str(path))
    assert done.code == 2
    assert message in done.err


def test_files_that_cannot_be_written() -> None:
    done = invoke("generate", PROMPT, "--record", "/nowhere/file.jsonl")
    assert done.code == 2
    assert "--record /nowhere/file.jsonl: no such directory" in done.err

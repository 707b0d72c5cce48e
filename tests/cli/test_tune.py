"""`flyspec tune`: records once, replays again, writes a preset that a server reads."""

from __future__ import annotations

import pytest

from flyspec.rule_files import read_rules
from flyspec.rules import Rule
from flyspec_lab.tuning.search import AXES
from tests.cli.processes import invoke

PROBLEMS = ["--problems", "4", "--problem-seed", "11", "--max-tokens", "96", "--threads", "1"]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """The file of a recording, and what its making printed."""
    path = tmp_path_factory.mktemp("tune") / "problems.npz"
    done = invoke("tune", *PROBLEMS, "--recording", str(path), "--rules", "margin")
    assert done.code == 0, done.err
    return path, done


def test_it_records_and_shows_each_rule(recording) -> None:
    path, done = recording
    assert path.is_file()
    assert "loading both models\nrecording 4 problems of word_problems" in done.err
    assert "margin_threshold" in done.out
    assert "4 problems of word_problems" in done.out
    # With so few problems no threshold can be known to keep 99 %.
    assert "chosen: exact decoding" in done.out


def test_a_recording_is_replayed_and_the_choice_written(recording, tmp_path) -> None:
    path, preset = recording[0], tmp_path / "tuned.toml"
    before = path.read_bytes()
    done = invoke(
        "tune", *PROBLEMS, "--recording", str(path), "--target-recovery", "0.5", "--name", "mine",
        "--preset-file", str(preset), "--certify-rate", "0.02", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert path.read_bytes() == before
    (document,) = done.documents
    tried = {candidate["axis"] for candidate in document["candidates"]}
    assert tried == {"exact", *(axis.name for axis in AXES)}
    chosen = document["chosen"]
    assert chosen["axis"] != "exact"
    assert all(c["index"] is None for c in document["certificates"].values())
    resolved = read_rules(preset).resolve(Rule("mine"), 15)
    (axis,) = [axis for axis in AXES if axis.name == chosen["axis"]]
    assert getattr(resolved, axis.parameter) == chosen["value"]
    text = " ".join(preset.read_text().replace("#", "").split())
    assert "on 4 problems of word_problems" in text


@pytest.mark.parametrize("command", ["tune", "eval"])
def test_without_arguments_nothing_long_begins(command: str) -> None:
    done = invoke(command)
    assert done.code == 2
    assert "--prompt-file" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "exact"], "must be one of fly, margin"),
        (["--target-recovery", "1.5"], "must be between 0 and 1"),
        (["--certify-rate", "1"], "--certify-rate must be between 0 and 1"),
        (["--model", "somewhere"], "--draft-model: name the draft model"),
        (["--preset-file", "/nowhere/tuned.toml"], "no such directory"),
        (["--task", "gsm8k", "--recording", "new.npz"], "needs the path of its data set"),
    ],
)
def test_mistakes_are_named_at_once(arguments, message) -> None:
    done = invoke("tune", *arguments)
    assert done.code == 2
    assert message in done.err

"""Arrivals stay within their time; prompts come in turn."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec.client import Chat, GenerateOptions
from flyspec.errors import ConfigError
from loadtest.load import Closed, LoadPhase, Open, prompts_in_turn


@given(st.floats(0.01, 500), st.floats(0, 5), st.integers())
def test_arrivals_ascend_within_their_time_and_depend_on_the_seed_alone(rate, seconds, seed):
    times = list(Open(rate).arrivals(seconds, random.Random(seed)))
    assert times == sorted(times)
    assert all(0 <= t < seconds for t in times)
    assert times == list(Open(rate).arrivals(seconds, random.Random(seed)))


# --- prompts ----------------------------------------------------------------------------------


def test_all_prompts_of_files_come_in_turn(tmp_path):
    code, questions = tmp_path / "code.jsonl", tmp_path / "questions.jsonl"
    code.write_text('{"prompt": "def f"}\n{"prompt": "def g"}\n')
    questions.write_text('{"question": "Q?", "answer": "#### 1"}\n')
    following = prompts_in_turn([str(code), str(questions)], 0)
    first, again = ([following() for _ in range(3)] for _ in range(2))
    assert first == again
    assert sorted(p for p in first if isinstance(p, str)) == ["def f", "def g"]
    assert [p for p in first if isinstance(p, Chat)] == [Chat.of_user("Q?")]
    with pytest.raises(ConfigError, match="cannot be read"):
        prompts_in_turn([str(tmp_path / "none")], 0)


def text_of(chat):
    return "".join(chat.texts)


def test_fresh_problems_are_different_and_the_same_for_a_seed():
    drawn = [prompts_in_turn([], seed) for seed in (1, 1, 2)]
    first, again, others = ([text_of(following()) for _ in range(50)] for following in drawn)
    assert first == again
    assert len(set(first)) > 45
    assert not set(first) & set(others)


# --- requests ---------------------------------------------------------------------------------


def test_some_clients_leave():
    rng = random.Random(3)
    phase = LoadPhase("p", Closed(1), 1.0, GenerateOptions(), cancelled=0.5, cancel_after_s=2.0)
    drawn = [phase.draw(rng)[1] for _ in range(4000)]
    delays = [delay for delay in drawn if delay is not None]
    assert len(delays) == pytest.approx(2000, abs=150)
    assert statistics.mean(delays) == pytest.approx(2.0, rel=0.15)


def test_a_phase_may_vary_the_lengths_of_its_outputs():
    rng, mean = random.Random(3), GenerateOptions(max_tokens=100)
    phase = LoadPhase("p", Closed(1), 1.0, mean, vary=True)
    lengths = {phase.draw(rng)[0].max_tokens for _ in range(500)}
    assert {min(lengths), max(lengths)} == {50, 150}

"""Problems of the tasks and prompt files that options name."""

from __future__ import annotations

import pytest

from flyspec.client import Chat
from flyspec.errors import ConfigError
from flyspec_lab.options import EvalOptions, read_tasks
from flyspec_lab.problems import read_problems
from flyspec_lab.tasks import Problem
from flyspec_lab.tasks.open_ended import OpenEnded


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7.\n#### 7", "7"),
        ("so #### $1,200 in all, or 3", "1200"),
        ("first 3, then 7.", "7"),
        ("none", None),
    ],
)
def test_answers_of_a_prompt_file_are_numbers(text, answer):
    score = OpenEnded("file").score(Problem("1", "Q", "7"), text)
    assert (score.answer, score.value == 1) == (answer, answer == "7")
    assert OpenEnded("file").score(Problem("1", "Q"), text) is None


def test_word_problems_are_the_default():
    (task,) = read_problems(EvalOptions(problems=3))
    assert (task.name, len(task.problems)) == ("word_problems", 3)
    more = read_problems(EvalOptions(problems=5))[0].problems
    assert list(task.problems) == more[:3]  # so that a run can grow
    assert read_problems(EvalOptions(problems=3, problem_seed=8))[0].problems != task.problems


def test_a_prompt_file_is_a_task_of_its_own(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"question": "Q", "answer": "#### 7"}\n{"question": "R", "answer": "#### 8"}\n'
    )
    o = EvalOptions(task=read_tasks(["word_problems"]), prompt_file=str(path), problems=1)
    words, questions = read_problems(o)
    assert (words.name, questions.name) == ("word_problems", "questions")
    assert [p.prompt_id for p in questions.problems] == ["line 1", "line 2"]  # wherever it is
    assert questions.problems[0].prompt == Chat.of_user("Q")
    assert questions.facts(o)["sha256"]
    plain = read_problems(EvalOptions(prompt_file=str(path), chat=False, limit=1))[0].problems
    assert [p.prompt for p in plain] == ["Q"]


def test_a_prompt_file_has_answers_or_has_none(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"question": "Q", "answer": "#### 7"}\n{"question": "R"}\n')
    with pytest.raises(ConfigError, match="line 2: has no answer, but other prompts have one"):
        read_problems(EvalOptions(prompt_file=str(path)))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("gsm8k", "--task gsm8k: needs the path of its data set"),
        ("word_problems=x", "--task word_problems: generates its problems; leave the path out"),
        ("humaneval=x", r"--task humaneval: scores .*allow that \(--allow-code-execution\)"),
        ("humanevall", r"--task humanevall: must be one of .*\(did you mean humaneval\?\)"),
    ],
)
def test_what_a_task_needs_is_said_in_flags(task, message):
    with pytest.raises(ConfigError, match=message):
        read_problems(EvalOptions(task=read_tasks([task])))


def test_a_task_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="two tasks are named 'word_problems'"):
        read_problems(EvalOptions(task=read_tasks(["word_problems", "word_problems"])))


def test_tasks_without_a_file_have_as_many_problems_as_are_asked_for():
    o = EvalOptions(task=read_tasks(["python_code", "needle"]), problems=3, limit=2)
    assert [len(task.problems) for task in read_problems(o)] == [3, 3]

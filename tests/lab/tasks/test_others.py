"""ACPBench, needles, Spec-Bench, SPEED-Bench, open-ended prompts, and what all tasks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from flyspec.errors import ConfigError
from flyspec.values.chat import Chat
from flyspec_lab.python_source import is_held_out, python_files
from flyspec_lab.tasks import TASKS, Task
from flyspec_lab.tasks.acp_bench import AcpBench
from flyspec_lab.tasks.needle import Needle
from flyspec_lab.tasks.open_ended import OpenEnded
from flyspec_lab.tasks.python_code import PythonCode
from flyspec_lab.tasks.turns import SpecBench, SpeedBench
from flyspec_lab.tasks.word_problems import WordProblems
from tests.lab.tasks.data_files import json_array, json_lines, parquet, real, shots

ROOT = Path(__file__).resolve().parents[3]
ACP = [
    {"id": i, "group": "progression_gen", "context": f"There are {i} lamps.",
     "question": f"What does switching on lamp l{i} change?",
     "answer": {"pos": [f"(on l{i})", "(Bright)"], "neg": [f"(off l{i})"] if i else []}}
    for i in range(4)
]  # fmt: skip


def acp_asked(i: int) -> str:
    return (
        f"**Question**: There are {i} lamps. What does switching on lamp l{i} change? Provide only "
        "the two lists with the ground propositions. **Final Answer**:"
    )


def test_acp_bench_shows_the_first_other_rows(tmp_path: Path) -> None:
    path = json_array(tmp_path / "acp_prog_gen_test.json", ACP)
    problems = shots(AcpBench, 1)(path).problems()
    first = f"{acp_asked(0)} [(on l0), (Bright)] []\n\n"
    assert problems[1].prompt == first + acp_asked(1)
    assert problems[0].prompt == (
        f"{acp_asked(1)} [(on l1), (Bright)] [(off l1)]\n\n{acp_asked(0)}"
    )
    json_array(tmp_path / "acp_prog_gen_dev.json", ACP[3:])
    assert "l3" in str(shots(AcpBench, 1)(path).problems()[1].prompt)
    with pytest.raises(ConfigError, match="has 1 other rows for 2 examples"):
        AcpBench(path).problems()


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" [(on l1), (bright)] [(off l1)]", True),
        (" [(bright),(on l1)]\n[(off l1)]", True),
        (" [(bright), ( ON  L1 ), (bright)] [(off l1)]\n\n[(x)]", True),
        ("**Positive Effects**: (on l1), (bright) **Negative Effects**: (off l1)", True),
        (" [(on l1)] [(off l1)]", False),
        (" [(on l1), (bright)] [(off l1), (on l2)]", False),
        (" [(off l1)] [(on l1), (bright)]", False),
        (" [(on l1), (bright)]", False),
        ("\n\n [(on l1), (bright)] [(off l1)]", False),  # the benchmark stops at an empty line
        (" (on l1), (bright); (off l1)", False),
        ("", False),
    ],
)
def test_acp_bench_compares_sets_of_facts(tmp_path: Path, text: str, right: bool) -> None:
    task = AcpBench(json_array(tmp_path / "acp.json", ACP))
    assert task.score(task.problems()[1], text).value == right


def test_acp_bench_takes_an_absent_second_list_as_empty(tmp_path: Path) -> None:
    task = AcpBench(json_array(tmp_path / "acp.json", ACP))
    assert task.score(task.problems()[0], "[(on l0), (bright)]").value == 1
    assert task.score(task.problems()[0], "[(on l0)]").detail == "positive facts differ"


def test_real_acp_bench_answers_itself() -> None:
    task = AcpBench(real("acp_prog_gen_dev.json"))
    problems = task.problems()
    assert len(problems) == 40
    for problem in problems:
        lists = [f"[{', '.join(problem.reference[name])}]" for name in ("pos", "neg")]
        assert task.score(problem, " " + " ".join(lists)).value == 1


def test_needles_are_in_the_text_and_count_one_by_one() -> None:
    task = Needle(limit=3)
    problems = task.problems()
    assert problems[:2] == Needle(limit=2).problems()
    assert problems != Needle(limit=3, seed=8).problems()
    for problem in problems:
        assert isinstance(problem.prompt, str)
        values = problem.reference
        assert len(set(values)) == 4
        assert all(problem.prompt.count(f" is: {value}.") == 1 for value in values)
        assert 1000 < len(problem.prompt.split()) < 1150
        question = problem.prompt.rsplit("\n", 1)[1]
        assert question.startswith("What are all the special magic numbers for ")
        assert not any(value in question for value in values)
        assert task.score(problem, ", ".join(values)).value == 1
        assert task.score(problem, f"{values[0]} and {values[3]}.").value == 0.5
        assert task.score(problem, "1 and 2").value == 0
    assert len({p.prompt for p in problems}) == 3


def test_spec_bench_scores_where_there_is_a_number(tmp_path: Path) -> None:
    rows = [
        {"question_id": 1, "category": "math_reasoning", "turns": ["3 + 4?"],
         "reference": ["3 + 4 = 7\n#### 7"]},
        {"question_id": 2, "category": "math", "turns": ["And?", "So?"], "reference": ["7", "8"]},
        {"question_id": 3, "category": "writing", "turns": ["Write."]},
    ]  # fmt: skip
    task = SpecBench(json_lines(tmp_path / "question.jsonl", rows))
    first, second, third = task.problems()
    assert (first.prompt_id, first.category) == ("1", "math_reasoning")
    assert second.prompt == Chat.of_user("And?")
    assert task.score(first, "It makes 7.") == task.score(first, "#### 7\n8")
    right, wrong = task.score(first, "It makes 7."), task.score(first, "7 or 8")
    assert right
    assert right.value == 1
    assert wrong
    assert wrong.value < 1
    assert task.score(second, "7") is None
    assert task.score(third, "7") is None
    assert [task.is_open(problem) for problem in (first, second, third)] == [False, False, True]
    path = json_lines(tmp_path / "question.jsonl", [{"turns": ["x"]}])
    with pytest.raises(ConfigError, match="has no `question_id`"):
        SpecBench(path).problems()


def test_real_spec_bench() -> None:
    problems = SpecBench(real("spec_bench_question.jsonl")).problems()
    assert len({p.prompt_id for p in problems}) == 240
    assert [p.category for p in problems if p.reference] == ["math_reasoning"] * 80


def test_speed_bench_wants_its_texts_fetched(tmp_path: Path) -> None:
    row = {"question_id": "a", "category": "coding", "sub_category": None, "turns": ["Write.", "x"],
           "source": "s", "src_id": "1", "difficulty": None, "multiturn": True}  # fmt: skip
    path = parquet(tmp_path / "qualitative/test.parquet", [row])
    task = SpeedBench(str(tmp_path / "qualitative"))
    (problem,) = task.problems()
    assert problem == SpeedBench(path).problems()[0]
    assert (problem.prompt_id, problem.category) == ("a", "coding")
    assert task.score(problem, "1") is None
    held = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    path = json_lines(tmp_path / "test.jsonl", [{**row, "turns": [held]}])
    with pytest.raises(ConfigError, match=r"has a placeholder in `turns`; run .* prepare_data.py"):
        SpeedBench(path).problems()


def test_open_ended_prompts_come_from_any_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Once upon a time\n\nTwice\n")
    task = OpenEnded(str(path))
    assert [(p.prompt_id, p.prompt) for p in task.problems()] == [
        ("line 1", "Once upon a time"), ("line 3", "Twice"),
    ]  # fmt: skip
    assert task.score(task.problems()[0], "x") is None
    json_lines(path, [{"messages": [{"role": "user", "content": "Hello"}]}])
    assert isinstance(task.problems()[0].prompt, Chat)


def test_code_to_continue_was_held_out_from_training() -> None:
    task = PythonCode(limit=1000)
    problems = task.problems()
    assert len({p.prompt_id for p in problems}) == len(problems) > 100
    assert PythonCode(limit=20).problems() == problems[:20]  # so that a run can grow
    assert PythonCode(limit=20, seed=8).problems() != problems[:20]
    held_out = "".join(python_files(is_held_out).values())
    for problem in problems[:20]:
        assert isinstance(problem.prompt, str)
        assert problem.prompt in held_out
        assert 16 <= problem.prompt.count("\n") <= 40
        assert task.score(problem, "x") is None
        assert task.is_open(problem)


def test_word_problems_are_scored_by_their_last_line() -> None:
    task = WordProblems(limit=2)
    problem = task.problems()[0]
    assert task.score(problem, f"So\n#### {problem.reference}").value == 1
    assert task.score(problem, f"#### {problem.reference}\nindeed").value < 1


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_arguments_that_a_task_cannot_work_with_are_refused(task: type[Task]) -> None:
    allowed = {"allow_code_execution": True} if task.runs_code else {}
    if task.needs_path:
        with pytest.raises(ConfigError, match=rf"--task {task.name}: needs the path"):
            task(**allowed)
    else:
        with pytest.raises(ConfigError, match="generates its problems; leave the path out"):
            task("x")
    assert task.reads or not task.needs_path


def test_the_documentation_has_every_task() -> None:
    document = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    rows = {row.split("`")[1]: row for row in document.splitlines() if row.startswith("| `")}
    assert list(rows) == list(TASKS)
    for name, task in TASKS.items():
        _, reads, examples, _, tokens = (cell.strip() for cell in rows[name].split("|")[1:-1])
        assert reads == (task.reads or "nothing: generated")
        assert examples == str(task.num_shots or "–")
        assert tokens == f"{task.max_tokens:,}"
        assert f"**{name}**" in document

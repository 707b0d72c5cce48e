"""HumanEval and MBPP: what the model is shown and which answers pass."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from flyspec.errors import ConfigError
from flyspec_lab.tasks.code import HumanEval, Mbpp
from tests.lab.sandboxes import needs_bubblewrap
from tests.lab.tasks.data_files import json_array, json_lines, parquet, real, shots

PROMPT = 'def twice(x: int) -> int:\n    """Return x two times."""\n'
ROW = {
    "task_id": "Own/0",
    "prompt": PROMPT,
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n",
}


def humaneval(path: Path) -> HumanEval:
    return HumanEval(json_lines(path / "own.jsonl.gz", [ROW]), allow_code_execution=True)


@pytest.mark.parametrize("task", [HumanEval, Mbpp])
def test_code_is_run_only_if_asked_for(task: type[HumanEval | Mbpp], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"running generated code, .*--allow-code-execution"):
        task(str(tmp_path))


def test_code_is_not_run_without_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flyspec_lab.sandbox import check_sandbox

    check_sandbox.cache_clear()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="install bubblewrap"):
        humaneval(tmp_path)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("    return 2 * x\n", None),
        ("    return x + x\n\nprint(twice(7))\nraise Exception", None),  # cut at "\nprint"
        ("    return x + x\n```\nThat is all.", None),
        ("    return _two() * x\n\ndef _two(): return 2", "NameError: name '_two' is not defined"),
        ("    pass", "AssertionError"),
        ("    return x", "AssertionError"),
        ("    return 2 *", "SyntaxError: invalid syntax (<program>, line 3)"),
        ("    import os; os._exit(0)", "ended before its tests did (exit status 0)"),
        ("", None),  # a docstring is a body, whose None is no number
    ],
)
def test_humaneval_scores(tmp_path: Path, text: str, detail: str | None) -> None:
    task = humaneval(tmp_path)
    (problem,) = task.problems()
    assert (problem.prompt_id, problem.prompt) == ("Own/0", PROMPT)
    score = task.score(problem, text)
    if text:
        assert (score.value == 1, score.detail) == (detail is None, detail or "")
    assert (score.value == 1) == (detail is None and text != "")
    assert score.answer
    assert score.answer.startswith(PROMPT)


@needs_bubblewrap
def test_all_canonical_solutions_of_real_humaneval_pass_and_no_empty_body_does() -> None:
    task = HumanEval(real("HumanEval.jsonl.gz"), allow_code_execution=True)
    with gzip.open(str(task.path), "rt") as file:
        solutions = {row["task_id"]: row["canonical_solution"] for row in map(json.loads, file)}
    problems = task.problems()
    assert len(problems) == len(solutions) == 82
    failed = {
        p.prompt_id: score.detail
        for p in problems
        if (score := task.score(p, solutions[p.prompt_id])).value < 1
    }
    assert failed == {}
    assert all(task.score(p, "    pass\n").value < 1 for p in problems[::8])


MBPP = [
    {"task_id": i, "text": f"Write a function to add {i}.",
     "code": f"def f(x):\r\n  return x + {i}",
     "test_list": [f"assert f(0) == {i}", f"assert f(1) == {i + 1}", "assert f(Y) > 0"],
     "test_setup_code": f"Y = f({i})", "challenge_test_list": []}
    for i in (1, 2, 3, 4, 5, 11, 510, 511)
]  # fmt: skip
SANITIZED = [
    {"source_file": "", "task_id": row["task_id"], "prompt": row["text"], "code": row["code"],
     "test_imports": ["import math"], "test_list": ["assert f(0) == math.floor(f(0))"]}
    for row in MBPP
]  # fmt: skip
ASKED = (
    "You are an expert Python programmer, and here is your task: Write a function to add {0}. Your "
    "code should pass these tests:\n\n"
    "assert f(0) == {0}\nassert f(1) == {1}\nassert f(Y) > 0\n[BEGIN]\n"
)


@needs_bubblewrap
def test_mbpp_shows_tasks_2_to_4_and_asks_the_test_split(tmp_path: Path) -> None:
    task = Mbpp(json_lines(tmp_path / "mbpp.jsonl", MBPP), allow_code_execution=True)
    problems = task.problems()
    assert [p.prompt_id for p in problems] == ["MBPP/11", "MBPP/510"]
    shown = [
        f"{ASKED.format(i, i + 1)}def f(x):\r\n  return x + {i}\n[DONE]\n\n" for i in (2, 3, 4)
    ]
    assert problems[0].prompt == "".join(shown) + ASKED.format(11, 12)
    assert task.stop == ("[DONE]",)
    with pytest.raises(ConfigError, match="5 examples are asked for, and it has 4"):
        shots(Mbpp, 5)(task.path, allow_code_execution=True).problems()
    rest = json_lines(tmp_path / "few.jsonl", MBPP[:4])
    with pytest.raises(ConfigError, match="no task of the test split, whose ids are 11 to 510"):
        Mbpp(rest, allow_code_execution=True).problems()


@needs_bubblewrap
@pytest.mark.parametrize("form", ["original", "sanitized", "hub"])
def test_mbpp_scores_in_every_format(tmp_path: Path, form: str) -> None:
    if form == "hub":
        path = str(tmp_path)
        parquet(tmp_path / "test-00000-of-00001.parquet", MBPP[5:7])
        parquet(tmp_path / "prompt-00000-of-00001.parquet", MBPP[:5])
    elif form == "sanitized":
        path = json_array(tmp_path / "sanitized-mbpp.json", SANITIZED)
    else:
        path = json_lines(tmp_path / "mbpp.jsonl", MBPP)
    task = Mbpp(path, limit=1, allow_code_execution=True)
    (problem,) = task.problems()
    good = "def f(x):\n  return x + 11"
    for text in (good, f"{good}\n[DONE]\n[BEGIN] 1/0", f"Here:\n```python\n{good}\n```\nDone."):
        assert task.score(problem, text).value == 1, text
    for text in ("def g(x): return x", "def f(x): return 0.5", "```\nprose", ""):
        assert task.score(problem, text).value < 1, text

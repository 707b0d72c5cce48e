"""CommonsenseQA and MMLU: prompts, which letter a text chooses, and every format they come in."""

from __future__ import annotations

from pathlib import Path

import pytest

from flyspec.errors import ConfigError
from flyspec_lab.tasks.multiple_choice import CommonsenseQa, Mmlu, choose_letter
from tests.lab.tasks.data_files import json_lines, parquet, shots


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (" B", "B"),
        ("(c)", "C"),
        ("**D**", "D"),
        ("A. Paris", "A"),
        ("A) because", "A"),
        ("A", "A"),
        ("a", "A"),
        ("B because it rains", "B"),
        ("A dog is no cat. The answer is B.", "B"),
        ("Answer: C", "C"),
        ("The answer is (D).", "D"),
        ("So the correct answer is: $B$, not C", "B"),
        ("First I thought the answer is A, but the answer is B", "B"),
        ("I answer a question.", None),
        ("Because", None),
        ("E", None),
        ("Dogs", None),
        ("C's", None),
        ("", None),
    ],
)
def test_the_letter_that_a_text_chooses(text: str, letter: str | None) -> None:
    assert choose_letter(text, 4) == letter


def original(number: int, answer: str = "B") -> dict[str, object]:
    texts = ("red", f"green {number}", "blue", "warm", "loud")
    choices = [{"label": x, "text": t} for x, t in zip("ABCDE", texts, strict=True)]
    question = {"question_concept": "grass", "choices": choices, "stem": f"Colour {number}?"}
    return {"answerKey": answer, "id": f"id{number}", "question": question}


def hub(number: int, answer: str = "B") -> dict[str, object]:
    texts = ["red", f"green {number}", "blue", "warm", "loud"]
    choices = {"label": list("ABCDE"), "text": texts}
    return {"id": f"id{number}", "question": f"Colour {number}?", "question_concept": "grass",
            "choices": choices, "answerKey": answer}  # fmt: skip


ASKED = "Question: Colour {0}?\nA. red\nB. green {0}\nC. blue\nD. warm\nE. loud\nAnswer:"


def test_commonsense_qa_in_both_formats(tmp_path: Path) -> None:
    first = json_lines(tmp_path / "a/dev_rand_split.jsonl", [original(1), original(2)])
    json_lines(tmp_path / "a/train_rand_split.jsonl", [original(3), original(4)])
    json_lines(tmp_path / "a/test_rand_split_no_answers.jsonl", [original(5, "")])
    parquet(tmp_path / "b/validation-00000-of-00001.parquet", [hub(1), hub(2)])
    parquet(tmp_path / "b/train-00000-of-00001.parquet", [hub(3), hub(4)])
    parquet(tmp_path / "b/test-00000-of-00001.parquet", [hub(5, "")])
    for path in (first, str(tmp_path / "a"), str(tmp_path / "b")):
        problems = CommonsenseQa(path).problems()
        assert [(p.prompt_id, p.prompt) for p in problems] == [
            ("id1", ASKED.format(1)), ("id2", ASKED.format(2)),
        ]  # fmt: skip
        task = CommonsenseQa(path)
        assert task.score(problems[0], " B").value == 1
        assert task.score(problems[0], "\n\nB. green\nC").value == 1
        assert task.score(problems[0], " E").value < 1
        assert task.score(problems[0], "F").answer is None


def test_commonsense_qa_refuses_what_has_no_answers(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [original(5, "")])
    with pytest.raises(ConfigError, match=r"has no answers; give the validation \(dev\) split"):
        CommonsenseQa(path).problems()
    for row in (original(1, "F"), {"question": "?", "answerKey": "A"}):
        path = json_lines(tmp_path / "rows.jsonl", [row])
        with pytest.raises(ConfigError, match="line 1: is not a question with choices"):
            CommonsenseQa(path).problems()


HEADER = "The following are multiple choice questions (with answers) about own maths.\n\n"


def mmlu_asked(n: int) -> str:
    return f"What is {n},\nreally?\nA. {n}\nB. {n + 1}\nC. 0\nD. -1\nAnswer:"


def mmlu_rows(*numbers: int) -> list[dict[str, object]]:
    return [
        {"question": f"What is {n},\nreally?", "subject": subject,
         "choices": [str(n), str(n + 1), "0", "-1"], "answer": 0}
        for n in numbers for subject in ("own_maths", "zoology")
    ]  # fmt: skip


def test_mmlu_shows_the_first_rows_of_the_subjects_dev_split(tmp_path: Path) -> None:
    parquet(tmp_path / "all/test-00000-of-00001.parquet", mmlu_rows(1))
    parquet(tmp_path / "all/dev-00000-of-00001.parquet", mmlu_rows(3, 4, 5))
    parquet(tmp_path / "all/auxiliary_train-00000-of-00001.parquet", mmlu_rows(9))
    task = shots(Mmlu, 2)(str(tmp_path / "all"))
    first, second = task.problems()
    assert first.prompt == f"{HEADER}{mmlu_asked(3)} A\n\n{mmlu_asked(4)} A\n\n{mmlu_asked(1)}"
    assert second.category == "zoology"
    assert task.score(first, " A").value == 1
    assert task.score(second, " B").value < 1
    with pytest.raises(ConfigError, match="dev split has 3 rows of own_maths for 5 examples"):
        Mmlu(task.path).problems()


def test_mmlu_needs_its_dev_split_for_examples(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", mmlu_rows(1))
    with pytest.raises(ConfigError, match="examples need the dev split beside it"):
        Mmlu(path).problems()
    path = json_lines(tmp_path / "own_test.jsonl", [{**mmlu_rows(1)[0], "answer": 4}])
    json_lines(tmp_path / "own_dev.jsonl", mmlu_rows(3))
    with pytest.raises(ConfigError, match="`answer` is not the index of a choice"):
        shots(Mmlu, 1)(path).problems()

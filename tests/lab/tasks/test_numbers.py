"""GSM8K and MGSM: templates, examples and known answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from flyspec.errors import ConfigError
from flyspec_lab.tasks.numbers import Gsm8k, Mgsm
from tests.lab.tasks.data_files import json_lines, parquet, real, shots

ROWS = [
    {
        "question": f"What is {i} and {i}?",
        "answer": f"{i} + {i} = <<{i}+{i}={2 * i}>>\n#### {2 * i}",
    }
    for i in range(1000, 1010)
]


def test_gsm8k_shows_other_questions_with_their_answers(tmp_path: Path) -> None:
    task = shots(Gsm8k, 9)(json_lines(tmp_path / "rows.jsonl", ROWS), limit=4)
    problems = task.problems()
    assert [p.reference for p in problems] == ["2000", "2002", "2004", "2006"]
    assert problems == shots(Gsm8k, 9)(task.path, limit=4).problems()
    assert problems[:2] == shots(Gsm8k, 9)(task.path, limit=2).problems()
    for row, problem in zip(ROWS, problems, strict=False):
        assert isinstance(problem.prompt, str)
        assert problem.prompt.endswith(f"\n\nQuestion: {row['question']}\nAnswer:")
        assert problem.prompt.count("Question: ") == 10
        assert row["answer"] not in problem.prompt  # all nine others, never itself
    assert shots(Gsm8k, 9)(task.path, seed=8).problems() != shots(Gsm8k, 9)(task.path).problems()
    with pytest.raises(ConfigError, match="has 9 other rows for 10 examples"):
        shots(Gsm8k, 10)(task.path).problems()


def test_gsm8k_takes_examples_from_the_train_split_beside_it(tmp_path: Path) -> None:
    test = json_lines(tmp_path / "gsm8k_test.jsonl", ROWS[:3])
    json_lines(tmp_path / "gsm8k_train.jsonl", ROWS[5:])
    json_lines(tmp_path / "other_train.jsonl", [{"question": "no", "answer": "#### 1"}])
    for path in (test, str(tmp_path)):
        prompt = shots(Gsm8k, 5)(path).problems()[0].prompt
        assert isinstance(prompt, str)
        assert all(row["answer"] in prompt for row in ROWS[5:])


def test_gsm8k_of_the_hub(tmp_path: Path) -> None:
    parquet(tmp_path / "main/test-00000-of-00001.parquet", ROWS[:3])
    parquet(tmp_path / "main/train-00000-of-00001.parquet", ROWS[3:])
    problems = Gsm8k(str(tmp_path / "main")).problems()
    assert [p.reference for p in problems] == ["2000", "2002", "2004"]
    assert ROWS[1]["answer"] not in str(problems[0].prompt)


@pytest.mark.parametrize(
    ("text", "right", "elsewhere"),
    [
        (" 9 + 9 = 18\n#### 18", True, False),
        ("#### 18.00", True, False),
        ("#### 18\n\nQuestion: What is 5?\nAnswer: 5\n#### 5", True, False),
        ("#### 17 or rather #### 18", False, True),
        ("It is $18.", False, True),
        ("18 of 20", False, False),
        ("####18", False, True),
        ("#### 1,8", True, False),
        ("nothing", False, False),
        ("#### -18", False, False),
    ],
)
def test_gsm8k_scores(tmp_path: Path, text: str, right: bool, elsewhere: bool) -> None:
    row = {"question": "9 + 9?", "answer": "#### 18"}
    task = shots(Gsm8k, 0)(json_lines(tmp_path / "rows.jsonl", [row]))
    score = task.score(task.problems()[0], text)
    assert (score.value == 1, score.detail != "") == (right, elsewhere)


def test_gsm8k_refuses_other_formats(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [ROWS[0], {"question": "x", "answer": "1"}])
    with pytest.raises(ConfigError, match=r"line 2: the answer has no `####`"):
        shots(Gsm8k, 0)(path).problems()
    path = json_lines(tmp_path / "rows.jsonl", [{"text": "x"}])
    with pytest.raises(ConfigError, match=r"line 1: `question` is not .* its fields are text"):
        shots(Gsm8k, 0)(path).problems()
    (tmp_path / "prose").write_text("It was a dark night.\n")
    with pytest.raises(ConfigError, match="neither JSON lines nor a JSON array"):
        Gsm8k(str(tmp_path / "prose")).problems()
    with pytest.raises(ConfigError, match="cannot be read"):
        Gsm8k(str(tmp_path / "nowhere")).problems()
    with pytest.raises(ConfigError, match="gsm8k: needs the path of its data set"):
        Gsm8k()


def test_real_gsm8k_answers_itself() -> None:
    task = shots(Gsm8k, 1)(real("gsm8k_test.jsonl"))
    problems = task.problems()
    assert len({p.prompt_id for p in problems}) == len(problems) > 500
    import json

    rows = [json.loads(line) for line in Path(str(task.path)).read_text().splitlines()]
    assert all(task.score(p, r["answer"]).value == 1 for p, r in zip(problems, rows, strict=True))


def mgsm(path: Path, text: str) -> Mgsm:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return Mgsm(str(path))


def test_mgsm_reads_the_language_from_the_name(tmp_path: Path) -> None:
    task = mgsm(tmp_path / "mgsm_de.tsv", "Was ist 2 plus 2?\t4\nWas ist 999 plus 1?\t1,000\n")
    first, second = task.problems()
    assert first.prompt == "Frage: Was ist 2 plus 2?\nSchritt-für-Schritt-Antwort:"
    assert (first.reference, second.reference, first.category) == ("4", "1000", "de")
    assert task.stop[0] == "Frage:"
    mgsm(tmp_path / "mgsm_fr.tsv", "2 et 2 ?\t4\n")
    both = Mgsm(str(tmp_path))
    assert [p.category for p in both.problems()] == ["de", "de", "fr"]
    assert both.stop[:2] == ("Frage:", "Question :")
    with pytest.raises(ConfigError, match=r"says no language; name it mgsm_LANGUAGE"):
        mgsm(tmp_path / "else/problems.tsv", "x\t1\n")
    with pytest.raises(ConfigError, match="not a question, a tab and a number"):
        mgsm(tmp_path / "mgsm_en.tsv", "What?\tmany\n").problems()


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Das sind 1000.", True),
        ("Das sind 1.000 Euro", True),
        ("Das sind 1,000", True),
        ("1000,00? Nein: 1000.0", True),
        ("1000 - 1 = 999", False),
        ("Erst 5, dann 1000\nFrage: Und 7?", True),
        ("ung๑๐๐๐", True),  # Thai digits
        ("keine", False),
    ],
)
def test_mgsm_scores(tmp_path: Path, text: str, right: bool) -> None:
    task = mgsm(tmp_path / "mgsm_de.tsv", "999 plus 1?\t1000\n")
    assert task.score(task.problems()[0], text).value == right


def test_mgsm_of_the_hub(tmp_path: Path) -> None:
    rows = [{"question": "2 plus 2?", "answer": None, "answer_number": 4}]
    parquet(tmp_path / "de/test-00000-of-00001.parquet", rows)
    (problem,) = Mgsm(str(tmp_path / "de")).problems()
    assert (problem.reference, problem.category) == ("4", "de")


@pytest.mark.parametrize("language", ["de", "fr", "th"])
def test_real_mgsm(language: str) -> None:
    task = Mgsm(real(f"mgsm_{language}.tsv"))
    problems = task.problems()
    assert len(problems) == 125
    assert all(task.score(p, f" = {p.reference}.").value == 1 for p in problems)

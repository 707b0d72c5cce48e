"""Multiple choice, answered with a letter: CommonsenseQA and MMLU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flyspec.errors import ConfigError
from flyspec_lab.tasks.rows import DataRow, question_files, read_rows, read_with_examples
from flyspec_lab.tasks.task import Problem, Score, Task

_LETTERS = "ABCDEFGHIJ"


def choose_letter(text: str, num_choices: int) -> str | None:
    """Return the letter that a text chooses.

    It is the one with which the text begins, alone or in brackets, or else the last one that
    follows "answer is" or "answer:".
    """
    letters = _LETTERS[:num_choices]
    letter = rf"[\s*_$\"'`(\[]*([{letters}{letters.lower()}])(?![\w'’])"
    first = re.match(letter, text)
    if first and (first[1] not in "Aa" or not _goes_on(text, first)):
        return first[1].upper()
    marked = rf"(?i:answer)(?:\s+(?i:is|would be))?\s*:?{letter}"
    said = [
        found[1].upper()
        for found in re.finditer(marked, text)
        if found[1] != "a" or not _goes_on(text, found)
    ]
    return said[-1] if said else None


def _goes_on(text: str, found: re.Match[str]) -> bool:
    """True if a sentence goes on, so that an A may be an article."""
    return re.match(r"\s+[a-z]", text[found.end() :]) is not None


class MultipleChoice(Task):
    """Questions of which the answer begins with a letter, in the format of MMLU's paper."""

    max_tokens = 16
    stop = ("</s>", "\n")

    def score(self, problem: Problem, text: str) -> Score:
        answer = choose_letter(self.until_stop(text.lstrip()), problem.reference["choices"])
        return Score(float(answer == problem.reference["answer"]), answer)


def _asked(question: str, choices: Sequence[str]) -> str:
    lines = (f"{letter}. {text}" for letter, text in zip(_LETTERS, choices, strict=False))
    return "\n".join((question.strip(), *lines, "Answer:"))


class CommonsenseQa(MultipleChoice):
    """CommonsenseQA (Talmor et al. 2019, arXiv 1811.00937) in lm-evaluation-harness's template.

    The harness compares likelihoods of letters; here the letter is taken from generated text. Rows
    without an answer (the test split, whose answers are held back) are left out.
    """

    name = "commonsense_qa"
    reads = (
        "JSON lines with `id`, `question` of `stem` and `choices`, and `answerKey` "
        "(dev_rand_split.jsonl), or the hub's parquet files"
    )

    def problems(self) -> list[Problem]:
        rows = read_rows(question_files(self.path, ("validation", "dev")))
        found = [self._problem(row) for row in rows if row.get("answerKey")]
        if not found:
            raise ConfigError(f"{self.path}: has no answers; give the validation (dev) split")
        return found[: self.limit]

    def _problem(self, row: DataRow) -> Problem:
        question, answer = row.get("question"), row.get("answerKey")
        nested = question if isinstance(question, dict) else {}
        stem = nested.get("stem", question)
        texts = _choice_texts(nested.get("choices", row.get("choices")))
        if not isinstance(stem, str) or not texts or answer not in _LETTERS[: len(texts)]:
            raise row.error("is not a question with choices and an `answerKey` of these")
        reference = {"answer": answer, "choices": len(texts)}
        return Problem(str(row.get("id") or row.key), _asked(f"Question: {stem}", texts), reference)


def _choice_texts(choices: Any) -> list[str]:
    """Return them from a list of objects (the original's) or an object of lists (the hub's)."""
    if isinstance(choices, dict):
        return list(choices.get("text", ()))
    if isinstance(choices, list):
        return [c["text"] for c in choices if isinstance(c, dict) and "text" in c]
    return []


class Mmlu(MultipleChoice):
    """MMLU (Hendrycks et al. 2021, arXiv 2009.03300), five examples of the dev set, from the hub.

    Rows have `question`, `subject`, `choices`, and `answer` as an index. The examples are the first
    rows of the subject in the dev split beside the file. Prompts are those of
    lm-evaluation-harness's `mmlu_generative` with the heading of `mmlu`; the letter is taken from
    generated text, where the harness wants nothing else on the first line.
    """

    name = "mmlu"
    reads = (
        "the hub's parquet files, or JSON lines with `question`, `subject`, `choices` and "
        "`answer`; with the dev split"
    )
    num_shots = 5

    def problems(self) -> list[Problem]:
        rows, pool = read_with_examples(self.path, ("dev",))
        if pool is rows:
            raise ConfigError(
                f"{self.path}: examples need the dev split beside it; give the data set's directory"
            )
        return [self._problem(row, pool) for row in rows[: self.limit]]

    def _problem(self, row: DataRow, pool: Sequence[DataRow]) -> Problem:
        subject = row.text("subject")
        shots = [shot for shot in pool if shot.get("subject") == subject][: self.num_shots]
        if len(shots) < self.num_shots:
            raise ConfigError(
                f"{row.key}: the dev split has {len(shots)} rows of {subject} for "
                f"{self.num_shots} examples"
            )
        header = (
            "The following are multiple choice questions (with answers) about "
            f"{subject.replace('_', ' ')}.\n\n"
        )
        examples = "".join(f"{self._shown(shot)} {self._letter(shot)}\n\n" for shot in shots)
        reference = {"answer": self._letter(row), "choices": len(row.texts("choices"))}
        return Problem(row.key, header + examples + self._shown(row), reference, subject)

    def _shown(self, row: DataRow) -> str:
        return _asked(row.text("question"), row.texts("choices"))

    def _letter(self, row: DataRow) -> str:
        answer = row.get("answer")
        if not isinstance(answer, int) or not 0 <= answer < len(row.texts("choices")):
            raise row.error("`answer` is not the index of a choice")
        return _LETTERS[answer]

"""Multiple choice, answered with a letter: CommonsenseQA and MMLU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flyspec.errors import ConfigError
from flyspec_lab.tasks.rows import DataRow, choose_examples, read_with_examples
from flyspec_lab.tasks.task import Problem, Score, Task

_LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class AnswerChoices:
    """A question, what to choose from, and the right letter; "" where that is held back."""

    key: str
    question: str
    choices: Sequence[str]
    answer: str
    category: str = ""

    def shown(self) -> str:
        lines = (f"{letter}. {text}" for letter, text in zip(_LETTERS, self.choices, strict=False))
        return "\n".join((self.question.strip(), *lines, "Answer:"))


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

    scoring = "the letter chosen in the generated text"
    max_tokens = 16
    stop = ("</s>", "\n")
    header = ""

    def score(self, problem: Problem, text: str) -> Score:
        answer = choose_letter(self.until_stop(text.lstrip()), problem.reference["choices"])
        return Score(float(answer == problem.reference["answer"]), answer)

    def problem(self, item: AnswerChoices, examples: Sequence[AnswerChoices]) -> Problem:
        """Return a question after its examples."""
        header = self.header.format(category=item.category.replace("_", " "))
        shots = [f"{shot.shown()} {shot.answer}\n\n" for shot in examples]
        reference = {"answer": item.answer, "choices": len(item.choices)}
        return Problem(item.key, header + "".join(shots) + item.shown(), reference, item.category)


class CommonsenseQa(MultipleChoice):
    """CommonsenseQA (Talmor et al. 2019, arXiv 1811.00937) in lm-evaluation-harness's template.

    The harness compares likelihoods of letters and shows no examples; here the letter is taken
    from generated text. Examples, if asked for, are from the train split beside the file, or else
    from its other rows. Rows without an answer (the test split, whose answers are held back) are
    left out.
    """

    name = "commonsense_qa"
    reads = (
        "JSON lines with `id`, `question` of `stem` and `choices`, and `answerKey` "
        "(dev_rand_split.jsonl), or the hub's parquet files"
    )
    default_shots = 0

    def problems(self) -> list[Problem]:
        rows, pool = read_with_examples(
            self.path, self.num_shots, ("validation", "dev"), ("train",)
        )
        answered = [item for item in map(_commonsense, rows) if item.answer]
        if not answered:
            raise ConfigError(f"{self.path}: has no answers; give the validation (dev) split")
        known = answered
        if pool is not rows:
            known = [item for item in map(_commonsense, pool) if item.answer]
        return [
            self.problem(
                item, choose_examples(known, self.num_shots, self.seed, item.key, but=item)
            )
            for item in answered[: self.limit]
        ]


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
    default_shots = 5
    header = "The following are multiple choice questions (with answers) about {category}.\n\n"

    def problems(self) -> list[Problem]:
        rows, pool = read_with_examples(self.path, self.num_shots, examples=("dev",))
        if self.num_shots and pool is rows:
            raise ConfigError(
                f"{self.path}: examples need the dev split beside it; give the data set's "
                "directory, or num_shots 0"
            )
        shots = [_mmlu(row) for row in pool] if self.num_shots else []
        return [self._problem(_mmlu(row), shots) for row in rows[: self.limit]]

    def _problem(self, item: AnswerChoices, pool: Sequence[AnswerChoices]) -> Problem:
        known = [shot for shot in pool if shot.category == item.category]
        if len(known) < self.num_shots:
            raise ConfigError(
                f"{item.key}: the dev split has {len(known)} rows of {item.category} for "
                f"{self.num_shots} examples"
            )
        return self.problem(item, known[: self.num_shots])


def _mmlu(row: DataRow) -> AnswerChoices:
    choices, answer = row.texts("choices"), row.get("answer")
    if not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise row.error("`answer` is not the index of a choice")
    return AnswerChoices(
        row.key, row.text("question"), choices, _LETTERS[answer], row.text("subject")
    )


def _commonsense(row: DataRow) -> AnswerChoices:
    question = row.get("question")
    nested = question if isinstance(question, dict) else {}
    stem = nested.get("stem", question)
    texts = _choice_texts(nested.get("choices", row.get("choices")))
    answer = row.get("answerKey") or ""
    if not isinstance(stem, str) or not texts or answer not in ("", *_LETTERS[: len(texts)]):
        raise row.error("is not a question with choices and an `answerKey` of these")
    return AnswerChoices(str(row.get("id") or row.key), f"Question: {stem.strip()}", texts, answer)


def _choice_texts(choices: Any) -> list[str]:
    """Return them from a list of objects (the original's) or an object of lists (the hub's)."""
    if isinstance(choices, dict):
        return list(choices.get("text", ()))
    if isinstance(choices, list):
        return [c["text"] for c in choices if isinstance(c, dict) and "text" in c]
    return []

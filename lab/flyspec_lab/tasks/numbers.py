"""Problems whose answer is a number: GSM8K, and MGSM in eleven languages."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from flyspec.errors import ConfigError
from flyspec.prompts import normal_number, read_prompts
from flyspec_lab.tasks.rows import DataRow, question_files, read_rows, read_with_examples
from flyspec_lab.tasks.task import Problem, Score, Task

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_AFTER_MARK = re.compile(rf"####\s*\$?({_NUMBER})")
_ANY = re.compile(_NUMBER)
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_LABELS = {
    # language: (question, step-by-step answer), as the data set's examples have them
    "bn": ("প্রশ্ন:", "ধাপে ধাপে উত্তর:"),
    "de": ("Frage:", "Schritt-für-Schritt-Antwort:"),
    "en": ("Question:", "Step-by-Step Answer:"),
    "es": ("Pregunta:", "Respuesta paso a paso:"),
    "fr": ("Question :", "Réponse étape par étape :"),
    "ja": ("問題:", "ステップごとの答え:"),
    "ru": ("Задача:", "Пошаговоерешение:"),
    "sw": ("Swali:", "Jibu la Hatua kwa Hatua:"),
    "te": ("ప్రశ్న:", "దశలవారీగా సమాధానం:"),
    "th": ("โจทย์:", "คำตอบทีละขั้นตอน:"),
    "zh": ("问题:", "逐步解答:"),
}
_LANGUAGE = re.compile(rf"(?:^|[/_.-])({'|'.join(_LABELS)})(?=[/_.-])")
_LOCAL_NUMBER = re.compile(r"-?\d[\d.,]*")


def last_number(text: str) -> str | None:
    """Return the number after the last `####`, or else the last number; None if there is none."""
    found = _AFTER_MARK.findall(text) or _ANY.findall(text)
    return normal_number(found[-1]) if found else None


def score_last_number(problem: Problem, text: str) -> Score | None:
    """Score by `last_number`; None if there is no known answer."""
    if problem.reference is None:
        return None
    answer = last_number(text)
    return Score(float(answer == problem.reference), answer)


class Gsm8k(Task):
    """GSM8K (Cobbe et al. 2021, arXiv 2110.14168) as in lm_eval/tasks/gsm8k/gsm8k.yaml, version 3.

    Five examples from the train split beside the file, or else from its other rows. The answer is
    the number after `####`, as the examples show it (the harness's strict match). Numbers are
    compared as numbers, so that 18.00 is 18.
    """

    name = "gsm8k"
    reads = "JSON lines or parquet with `question` and `answer`, whose last line is `#### N`"
    num_shots = 5
    stop = ("Question:", "</s>", "<|im_end|>")

    def problems(self) -> list[Problem]:
        rows, pool = read_with_examples(self.path)
        return [self._problem(row, pool) for row in rows[: self.limit]]

    def score(self, problem: Problem, text: str) -> Score:
        text = self.until_stop(text)
        marked = _MARKED.search(text)
        answer = normal_number(marked[1]) if marked else None
        right = answer == problem.reference
        elsewhere = not right and last_number(text) == problem.reference
        return Score(float(right), answer, "right, but not after ####" if elsewhere else "")

    def _problem(self, row: DataRow, pool: list[DataRow]) -> Problem:
        others = [other for other in pool if other is not row]
        if len(others) < self.num_shots:
            raise ConfigError(
                f"{row.key}: has {len(others)} other rows for {self.num_shots} examples"
            )
        # Each question has its own, whatever other questions there are.
        shots = random.Random(f"{self.seed} {row.key}").sample(others, self.num_shots)
        shown = [f"{_question(shot)} {shot.text('answer')}\n\n" for shot in shots]
        return Problem(
            row.key, "".join(shown) + _question(row), reference_number(row, row.text("answer"))
        )


def reference_number(row: DataRow, answer: str) -> str:
    """Return the number after `####`. Raises `ConfigError` if there is none."""
    if "####" not in answer:
        raise row.error("the answer has no `####`")
    return normal_number(answer.rsplit("####", 1)[1])


def _question(row: DataRow) -> str:
    return f"Question: {row.text('question')}\nAnswer:"


class Mgsm(Task):
    """MGSM (Shi et al. 2022, arXiv 2210.03057) as in lm-evaluation-harness's `mgsm_native_cot`.

    The language is in the file's or directory's name (`mgsm_de.tsv`, `de/`); a directory of TSV
    files is read as a whole. There are no examples. The answer is the last number in the text (the
    harness's flexible match). Languages write numbers differently, so 1.000 is right for 1000, as
    in the harness, which ignores punctuation, and so is 1000.0, as in simple-evals.
    """

    name = "mgsm"
    reads = (
        "`mgsm_LANGUAGE.tsv` with lines of question, tab, number, or a directory of them; or JSON "
        "lines or parquet with `question` and `answer_number`"
    )
    max_tokens = 512

    def __init__(self, path: str | None = None, **options: Any) -> None:
        super().__init__(path, **options)
        given = Path(self.path).expanduser()
        tables = sorted(given.glob("*.tsv")) if given.is_dir() else []
        self._files = tables or question_files(self.path)
        questions = dict.fromkeys(_LABELS[_language(file)][0] for file in self._files)
        self.stop = (*questions, "</s>", "<|im_end|>")

    def problems(self) -> list[Problem]:
        found = [problem for file in self._files for problem in self._problems_of(file)]
        return found[: self.limit]

    def score(self, problem: Problem, text: str) -> Score:
        numbers = _LOCAL_NUMBER.findall(self.until_stop(text))
        if not numbers:
            return Score(0.0)
        whole = normal_number(re.sub(r"[.,]", "", numbers[-1]))
        decimal = normal_number(numbers[-1])
        right = problem.reference in (whole, decimal)
        return Score(float(right), problem.reference if right else decimal)

    def _problems_of(self, file: Path) -> list[Problem]:
        language = _language(file)
        question, answer = _LABELS[language]
        if file.suffix == ".tsv":
            prompts = read_prompts(str(file))
            if prompts[0].kind != "mgsm":
                raise ConfigError(f"{prompts[0].where}: is not a question, a tab and a number")
            asked = [(p.text, p.reference) for p in prompts]
        else:
            rows = read_rows([file])
            asked = [(r.text("question"), normal_number(str(r.get("answer_number")))) for r in rows]
        return [
            Problem(f"{file.name} {i}", f"{question} {text}\n{answer}", reference, language)
            for i, (text, reference) in enumerate(asked, 1)
        ]


def _language(file: Path) -> str:
    found: list[str] = _LANGUAGE.findall("/".join(file.absolute().parts[-2:]))
    if not found:
        raise ConfigError(
            f"{file}: its name says no language; name it mgsm_LANGUAGE with one of "
            f"{', '.join(_LABELS)}"
        )
    return found[-1]

"""ACPBench: what an action changes in a planning domain (Kokel et al. 2024, arXiv 2410.05669)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flyspec_lab.tasks.rows import DataRow, read_with_examples
from flyspec_lab.tasks.task import Problem, Score, Task

_LIST = re.compile(r"\[([^\[\]]*)\]")
_FACT = re.compile(r"\(\s*[a-z][\w-]*(?:\s+[a-z][\w-]*)*\s*\)")


class AcpBench(Task):
    """ACPBench Hard's progression, generative (arXiv 2503.24378), as the harness's `acp_prog_gen`.

    Template, limits and scoring are those of lm_eval/tasks/acpbench/gen_2shot: the answer is two
    lists of facts, made true and made false, which must be equal as sets to the known ones; a
    second list may be missing if it is empty, and headings may stand for brackets. The two
    examples are the first other rows of the dev split beside the file or of the file itself; the
    harness has two fixed ones of its own.
    """

    name = "acp_bench"
    reads = "a JSON array with `context`, `question` and `answer` of `pos` and `neg` (acp_prog_gen)"
    num_shots = 2
    max_tokens = 1000
    stop = ("\n\n", "**Question**:", "**Question:**", "Q:")

    def problems(self) -> list[Problem]:
        rows, pool = read_with_examples(self.path, ("dev", "validation", "val"))
        return [self._problem(row, pool) for row in rows[: self.limit]]

    def score(self, problem: Problem, text: str) -> Score:
        lists = _lists(self.until_stop(text))
        if lists is None:
            return Score(0.0, detail="has no list in brackets")
        known = problem.reference
        wrong = [
            f"{what} facts differ"
            for what, name, facts in zip(
                ("positive", "negative"), ("pos", "neg"), lists, strict=True
            )
            if facts != {_normal(fact) for fact in known[name]}
        ]
        return Score(float(not wrong), " ".join(map(_shown, map(sorted, lists))), "; ".join(wrong))

    def _problem(self, row: DataRow, pool: Sequence[DataRow]) -> Problem:
        others = [other for other in pool if other is not row][: self.num_shots]
        if len(others) < self.num_shots:
            raise row.error(f"has {len(others)} other rows for {self.num_shots} examples")
        shown = [f"{_asked(o)} {' '.join(map(_shown, _answer(o).values()))}\n\n" for o in others]
        return Problem(row.key, "".join(shown) + _asked(row), _answer(row))


def _asked(row: DataRow) -> str:
    return (
        f"**Question**: {row.text('context')} {row.text('question')} Provide only the two lists "
        "with the ground propositions. **Final Answer**:"
    )


def _answer(row: DataRow) -> dict[str, list[str]]:
    answer = row.get("answer")
    if not isinstance(answer, dict) or not all(
        isinstance(answer.get(name), list) for name in ("pos", "neg")
    ):
        raise row.error("`answer` does not have lists `pos` and `neg`")
    return {name: answer[name] for name in ("pos", "neg")}


def _lists(text: str) -> tuple[set[str], set[str]] | None:
    """Return the facts in the first two lists; an absent second one counts as empty."""
    text = text.lower()
    if "[" not in text and "positive effects" in text and "negative effects" in text:
        text = text.replace("positive effects", "[").replace("negative effects", "] [") + "]"
    found = [{_normal(fact) for fact in _FACT.findall(inner)} for inner in _LIST.findall(text)]
    if not found:
        return None
    return found[0], found[1] if len(found) > 1 else set()


def _normal(fact: str) -> str:
    return f"({' '.join(fact.lower().strip('() ').split())})"


def _shown(facts: Sequence[str]) -> str:
    return f"[{', '.join(facts)}]"

"""Every question that users are shown is one that the bundled pair answers, with the right number.

The pair has 12 M parameters and knows word problems of a few families, so most questions that come
to mind are none of them.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient
from tests.docs.blocks import ROOT, documents

pytestmark = pytest.mark.slow

ANSWERS = {
    "Ana has 20 apples and gives 4 to Ben and 7 to Leo. How many apples does Ana have now?": 9,
    "Leo has 12 stamps and gets 9 from Ana and 4 from Ben. How many stamps does Leo have now?": 25,
    "Ivan has 69 coins and gives 27 to Vera and 5 to Flora. How many coins does Ivan have now?": 37,
    "Tina has 50 dollars and buys a book for 12 dollars and a cup for 5 dollars. How many dollars "
    "are left?": 33,
    "Tina has 78 dollars and buys a cup for 2 dollars, a toy for 21 dollars and a drum for 19 "
    "dollars. How many dollars are left?": 36,
    "Mark has 3 brown chests and 5 red chests. Each holds 5 rings. How many rings does Mark "
    "have?": 40,
    "In a shop there are 3 red boxes with 4 pens each and 2 blue boxes with 5 pens each. How many "
    "pens are there in all?": 22,
    "Rosa collects some stamps: 12 on Monday and 9 on Friday. They are shared equally among 3 "
    "friends. How many does each friend get?": 7,
    "Rosa has 12 stamps. Leo has 30 more than Rosa. Ben has 5 fewer than Rosa. How many stamps do "
    "Leo and Ben have together?": 49,
    "A bus sets out with 18 people. At the first stop 17 get on and 6 get off. At the second stop "
    "9 get on and 9 get off. How many people are on the bus then?": 29,
    "A bus sets out with 48 people. At the first stop 12 get on and 8 get off. At the second stop "
    "2 get on and 4 get off. How many people are on the bus then?": 50,
    "A bus sets out with 49 people. At the first stop 16 get on and 5 get off. At the second stop "
    "10 get on and 8 get off. How many people are on the bus then?": 62,
}
QUESTION = re.compile(r'["\']([A-Z][^"\'?]*\d[^"\'?]*\?)["\']')
PLAIN = re.compile(r"def fibonacci|Once upon a time")
"""Prompts that the pair cannot go on from."""


def shown() -> Iterator[tuple[str, str]]:
    """Yield the files in which users are shown questions, and their text, strings in one piece."""
    listed = ["git", "ls-files", "examples", "demo/*.py", "k8s", "docker-compose*.yml",
              "flyspec/cli/serve.py", "orchestrator/front/http/page/templates"]  # fmt: skip
    done = subprocess.run(listed, cwd=ROOT, text=True, capture_output=True, check=True)
    for name in [*documents(), *done.stdout.split()]:
        text = (ROOT / name).read_text()
        if name.endswith(".ipynb"):
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        if name.endswith((".py", ".ipynb")):
            strings = (n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant))
            text = "\n".join(json.dumps(s) for s in strings if isinstance(s, str))
        yield name, text


def test_questions_are_known_and_prompts_are_the_pairs() -> None:
    asked = dict[str, str]()
    for name, text in shown():
        assert not PLAIN.search(text), f"{name}: the bundled pair cannot go on from that"
        asked |= dict.fromkeys(QUESTION.findall(re.sub(r"\s+", " ", text)), name)
    assert asked.keys() == ANSWERS.keys(), {q: asked.get(q) for q in asked.keys() ^ ANSWERS.keys()}


@pytest.fixture(scope="module")
async def client():
    async with Stack(StackOptions()) as stack, AsyncClient(stack.address) as client:
        yield client


@pytest.mark.parametrize("question", ANSWERS)
async def test_an_answer_is_right(client, question: str) -> None:
    for rule, k in (("exact", None), ("relaxed", None), ("fly", 15), ("kl", 15)):
        chat = [{"role": "user", "content": question}]
        answer = await client.complete(chat, rule=rule, num_speculative_tokens=k, max_tokens=256)
        assert answer.text.strip().endswith(f"#### {ANSWERS[question]}"), (rule, answer.text)

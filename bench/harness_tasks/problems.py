"""The documents: word problems of `--metadata '{"path": FILE}'`, as JSON lines of GSM8K."""

import json
import re
from pathlib import Path

from datasets import Dataset

ANSWER = re.compile(r"\d+\s*$")


def load(path, **_):
    lines = Path(path).read_text().splitlines()
    return {"test": Dataset.from_list([document_of(**json.loads(line)) for line in lines])}


def document_of(question, answer):
    """Return a problem with what to choose from, the right one first: solutions and answers."""
    number = int(ANSWER.search(answer)[0])
    others = [str(number + more) for more in (0, 1, 10)]
    return {
        "question": question,
        "number": str(number),
        "solutions": [ANSWER.sub(other, answer) for other in others],
        "guesses": [f"#### {other}" for other in others],
    }

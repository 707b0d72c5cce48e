"""`flyspec datastore build`, and drafting from what it builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flyspec import bundled
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient, Chat, GenerateOptions
from flyspec.datastore.store import Datastore
from flyspec.errors import ConfigError
from flyspec.rules import Rule
from flyspec.values.tokens import Origin
from flyspec_lab.word_problems import problems
from tests.cli.processes import invoke

EXACT = GenerateOptions(rule=Rule("exact"))


def test_build(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.py").write_text("def add(first, second):\n    return first + second\n" * 3)
    (texts / "b.txt").write_text("Ben has two red boxes.")
    done = invoke("datastore", "build", "--output", str(tmp_path / "store"), str(texts))
    assert "2 texts, " in done.out
    assert f"flyspec serve --datastore {tmp_path / 'store'} --drafter rest" in done.out
    python = ["--pattern", "*.py", "--json"]
    done = invoke("datastore", "build", "--output", str(tmp_path / "python"), *python, str(texts))
    document = json.loads(done.out)
    store = Datastore(tmp_path / "python")
    assert document["num_tokens"] == sum(store.facts.shards)
    assert document["num_texts"] == 1
    assert document["tokenizer_fingerprint"] == store.facts.tokenizer_fingerprint
    again = invoke("datastore", "build", "--output", str(tmp_path / "store"), str(texts))
    assert "name a new directory" in again.err
    missing = invoke("datastore", "build", "--output", str(tmp_path / "c"), "nowhere")
    assert "nowhere: No such file or directory" in missing.err
    assert not (tmp_path / "c").exists()


async def test_drafting_from_a_datastore(tmp_path: Path) -> None:
    """Of other answers in the target's words."""
    solved = problems("datastore", 300)
    (tmp_path / "answers.txt").write_text("\n\n".join(problem.solution for problem in solved))
    output = str(tmp_path / "store")
    invoke("datastore", "build", "--output", output, str(tmp_path / "answers.txt"))
    options = StackOptions(datastore=output, drafter="rest")
    async with Stack(options) as stack, AsyncClient(stack.address) as client:
        plain, drafted = [
            await client.complete(
                Chat.of_user(solved[0].question), EXACT, num_speculative_tokens=k, max_tokens=64
            )
            for k in (0, 8)
        ]
    assert drafted.token_ids == plain.token_ids
    assert drafted.started.drafter == "rest"
    assert drafted.origins.count(Origin.EXACT_LOOKUP) > len(plain.token_ids) // 4


@pytest.mark.parametrize("flags", [{"drafter": "rest"}, {"datastore": "nowhere"}])
async def test_a_missing_datastore_is_said_before_anything_starts(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="datastore"):
        async with Stack(StackOptions(model=str(bundled.TARGET), **flags)):
            pass

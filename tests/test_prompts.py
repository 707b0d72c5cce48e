"""Prompt files of every format, and error messages for broken ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from flyspec.errors import ConfigError
from flyspec.prompts import parse_prompts, read_prompts, read_raw_prompt
from flyspec.values.chat import Chat


def row(**fields: object) -> str:
    return json.dumps(fields, ensure_ascii=False)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("one\n\n  two \r\n", [("plain", "one", None), ("plain", "  two ", None)]),
        (row(question="How many?", answer="6 * 200 = 1200\n#### 1,200"),
         [("gsm8k", "How many?", "1200")]),
        # A raw line separator in a string.
        (row(question="How\u2028many?", answer="#### 3"), [("gsm8k", "How\u2028many?", "3")]),
        (row(task_id="HumanEval/0", prompt="def f():\n", canonical_solution="    pass") + "\n",
         [("humaneval", "def f():\n", None)]),
        (row(question_id=81, category="writing", turns=["Write.", "Rewrite."]),
         [("spec_bench", "Write.", None)]),
        ("Wie viele?\t1,080\nUnd nun?\t-2.50\n",
         [("mgsm", "Wie viele?", "1080"), ("mgsm", "Und nun?", "-2.5")]),
        (f'[\n{row(context="A ferry.", question="Which?", answer={"pos": []})}\n]',
         [("acpbench", "A ferry.\n\nWhich?", None)]),
        (row(text="one\n  two\n", id=3), [("text", "one\n  two\n", None)]),
        # Text that looks a little like another format is plain.
        *((line, [("plain", line, None)]) for line in (
            "[INST] not JSON", "{ not: JSON either", '["a", "list", "of", "texts"]', "a\tb",
            '"quoted"', "42",
        )),
    ],
)  # fmt: skip
def test_formats(text: str, found: list[tuple[str, str, str | None]]) -> None:
    assert [(p.kind, p.text, p.reference) for p in parse_prompts(text, "file")] == found


def test_chats_are_sent_as_they_are() -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    (prompt,) = parse_prompts(row(messages=said, tools=tools, id=3), "file")
    assert (prompt.kind, prompt.text) == ("chat", "Be brief.\nHi")
    for chat in (None, False, True):
        assert prompt.to_request(chat) == Chat(said, tools)


def test_a_raw_prompt_is_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b'{"prompt": "a"}\n\n\r\nend\n')
    assert read_raw_prompt(str(path)).to_request() == '{"prompt": "a"}\n\n\r\nend\n'
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="prompt: is empty"):
        read_raw_prompt(str(path))


def test_questions_are_told_from_code() -> None:
    asked = {p.kind: p.is_question for p in parse_prompts('{"question": "Q?"}', "f")}
    assert asked == {"gsm8k": True}
    assert not next(parse_prompts('{"prompt": "def f"}', "f")).is_question


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "file: line 2: not JSON"),
        ('{"prompt": "a"\n', "file: line 1: not JSON"),
        ('{"prompt": "a"}\n\n[1]\n', "file: line 3: not a JSON object"),
        ('{"txt": "a", "label": 1}', "file: line 1: fields txt, label; known are `text`"),
        ('{"messages": []}', "file: line 1: `messages` is empty"),
        ('{"messages": ["Hi"]}', "file: line 1: `messages` is not a list of objects"),
        (row(messages=[{}], prediction="x"), "file: line 1: `prediction` is not an object"),
        ('{"prompt": ""}', "file: line 1: `prompt` is not a non-empty string"),
        ('{"question": 3}', "file: line 1: `question` is not a non-empty string"),
        ('{"turns": []}', "file: line 1: `turns` is not a list of strings"),
        ('[{"a": 1}]', "file: entry 1: fields a"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        list(parse_prompts(text, "file"))
    assert message in str(error.value)


def test_compressed_file_and_limit(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    assert [p.text for p in read_prompts(str(path))] == ["a", "b"]
    assert [p.text for p in read_prompts(str(path), limit=1)] == ["a"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "contains no prompts"),
        (b"\n \n", "contains no prompts"),
        (b"fine\n\xff\xfe\n", "line 2: not UTF-8"),
        (gzip.compress(b"text", mtime=0)[:-6], "cannot be read"),
    ],
)
def test_unreadable_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_prompts(str(path))

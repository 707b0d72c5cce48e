"""Prompt files of every format, and error messages for broken ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from flyspec.errors import ConfigError
from flyspec.prompts import parse_prompts, read_prompts, read_raw_prompt
from flyspec.values.chat import Chat


def parse(text: str) -> list[tuple[str, str, str | None]]:
    return [(p.kind, p.text, p.reference) for p in parse_prompts(text, "file")]


def test_plain_lines_keep_their_indentation_and_skip_blank_ones() -> None:
    assert parse("one\n\n  two \r\n") == [("plain", "one", None), ("plain", "  two ", None)]


@pytest.mark.parametrize(
    "line",
    [
        "[INST] not JSON",
        "{ not: JSON either",
        '["a", "list", "of", "texts"]',
        "a\tb",
        '"quoted"',
        "42",
    ],
)
def test_text_that_looks_a_little_like_another_format_is_plain(line: str) -> None:
    assert parse(line) == [("plain", line, None)]


def test_gsm8k() -> None:
    row = {"question": "How many?", "answer": "6 * 200 = 1200\n#### 1,200"}
    assert parse(json.dumps(row)) == [("gsm8k", "How many?", "1200")]


def test_gsm8k_with_a_raw_line_separator_in_a_string() -> None:
    row = {"question": "How\u2028many?", "answer": "#### 3"}
    assert parse(json.dumps(row, ensure_ascii=False)) == [("gsm8k", "How\u2028many?", "3")]


def test_humaneval() -> None:
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass"}
    assert parse(json.dumps(row) + "\n") == [("humaneval", "def f():\n", None)]


def test_spec_bench_takes_the_first_turn() -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}
    assert parse(json.dumps(row)) == [("spec_bench", "Write.", None)]


def test_mgsm() -> None:
    assert parse("Wie viele?\t1,080\nUnd nun?\t-2.50\n") == [
        ("mgsm", "Wie viele?", "1080"),
        ("mgsm", "Und nun?", "-2.5"),
    ]


def test_acpbench() -> None:
    rows = [{"context": "A ferry.", "question": "Which?", "answer": {"pos": []}}]
    assert parse(json.dumps(rows, indent=1)) == [("acpbench", "A ferry.\n\nWhich?", None)]


def test_texts() -> None:
    assert parse('{"text": "one\\n  two\\n", "id": 3}') == [("text", "one\n  two\n", None)]


def test_chats_are_sent_as_they_are() -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"messages": said, "tools": tools, "id": 3}
    (prompt,) = parse_prompts(json.dumps(row), "file")
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


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match="/nowhere: cannot be read: No such file"):
        read_prompts("/nowhere")

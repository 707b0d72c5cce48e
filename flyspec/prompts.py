"""Reads prompt files. The format is detected from the content, not the name:

    plain        one prompt per line, blank lines skipped
    text         JSON lines with `text`, to be continued
    chat         JSON lines with `messages` and other fields of `Chat`, such as `tools`; those with
                 OpenAI's `prediction` have a predicted output
    humaneval    JSON lines with `prompt`
    gsm8k        JSON lines with `question` and `answer`; the reference follows `####`
    spec_bench   JSON lines with `turns`, the first of which is the prompt, and `category`
    mgsm         lines of question TAB number
    acpbench     a JSON array of objects with `context` and `question`

Files may be compressed with gzip. `-` is standard input.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.values.chat import Chat, strings_in
from flyspec.values.requests import Prompt as Asked

Kind = Literal[
    "plain", "text", "chat", "humaneval", "gsm8k", "spec_bench", "mgsm", "acpbench", "token_ids"
]
PromptFiles = Annotated[Sequence[str], Flag(
    "Prompt file: lines, JSON lines with `text` or `messages`, HumanEval, GSM8K, Spec-Bench, MGSM "
    "or ACPBench (auto-detected); repeatable.",
)]  # fmt: skip
PromptLimit = Annotated[int | None, Flag("Maximum prompts per file.", min=1)]
QUESTIONS: frozenset[Kind] = frozenset({"gsm8k", "spec_bench", "mgsm", "acpbench"})

_CHAT_FIELDS = frozenset(field.name for field in fields(Chat))
_NUMBER = r"-?[\d,]*\.?\d+"
_MGSM_LINE = re.compile(rf"([^\t]+)\t({_NUMBER})\s*")
_KNOWN = (
    "known are `text`, `messages`, `prompt` (HumanEval), `question` with `answer` (GSM8K), `turns` "
    "(Spec-Bench) and `context` with `question` (ACPBench)"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, its reference answer if known, and its location for error messages.

    `category` is Spec-Bench's. The kind `chat` has one, whose texts `text` shows. The kind
    `token_ids` has those instead of text; files cannot contain it. `prediction` is a text that the
    output is expected to resemble, such as the original of an edit.
    """

    text: str
    kind: Kind
    reference: str | None = None
    where: str = ""
    category: str = ""
    token_ids: tuple[int, ...] = ()
    chat: Chat | None = None
    prediction: str = ""

    @property
    def is_question(self) -> bool:
        """True if it addresses an assistant, rather than being text to continue."""
        return self.kind in QUESTIONS

    def to_request(self, chat: bool | None = None) -> Asked:
        """Return what to send: questions as chat messages, code as text, unless `chat` is given."""
        if self.token_ids:
            return self.token_ids
        if self.chat is not None:
            return self.chat
        ask = self.is_question if chat is None else chat
        return Chat.of_user(self.text) if ask else self.text


def read_prompts(name: str, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts of a file. Raises `ConfigError` with file and line."""
    label = "standard input" if name == "-" else name
    prompts: list[Prompt] = []
    for prompt in parse_prompts(read_text(name, label), label):
        prompts.append(prompt)
        if limit is not None and len(prompts) >= limit:
            break
    if not prompts:
        raise ConfigError(f"{label}: contains no prompts")
    return prompts


def read_raw_prompt(name: str) -> Prompt:
    """Read a file as one prompt, unchanged. Raises `ConfigError`."""
    label = "standard input" if name == "-" else name
    text = read_text(name, label)
    if not text:
        raise ConfigError(f"{label}: is empty; give at least one character")
    return Prompt(text, "plain", None, label)


def read_text(name: str, label: str) -> str:
    """Return a file's text, unpacked if need be. Raises `ConfigError`; `label` names it there."""
    data = b""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{label}: line {line}: not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{label}: cannot be read: {reason}") from None


def parse_prompts(text: str, label: str) -> Iterator[Prompt]:
    """Yield the prompts in a file's text; `label` names it in errors."""
    rows = parse_rows(text, label)
    if rows is not None:
        for row, where in rows:
            yield _from_row(row, where)
        return
    lines = _lines(text)
    if lines and all(_MGSM_LINE.fullmatch(line) for _, line in lines):
        for number, line in lines:
            question, answer = line.rsplit("\t", 1)
            yield Prompt(question, "mgsm", normal_number(answer), f"{label}: line {number}")
    else:
        for number, line in lines:
            yield Prompt(line, "plain", None, f"{label}: line {number}")


def parse_rows(text: str, label: str) -> Iterator[tuple[Any, str]] | None:
    """Return the rows of a JSON array or of JSON lines, each with its location; else None."""
    start = text.lstrip()
    if start.startswith("["):
        try:
            rows = json.loads(start)
        except json.JSONDecodeError:
            return None  # plain text may start with a bracket
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return ((row, f"{label}: entry {i}") for i, row in enumerate(rows, 1))
        return None
    lines = _lines(text)
    if lines and _is_json_object(lines[0][1]):
        return (_from_json(line, f"{label}: line {number}") for number, line in lines)
    return None


def normal_number(text: str) -> str:
    """Normalize a number for comparison: no thousands separators, no trailing zeros."""
    digits = text.strip().replace(",", "").rstrip(".")
    try:
        value = float(digits)
    except ValueError:
        return digits
    return str(int(value)) if value.is_integer() else str(value)


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers."""
    # Not splitlines(): JSON strings may contain other Unicode line separators.
    numbered = enumerate((line.rstrip("\r") for line in text.split("\n")), 1)
    return [(number, line) for number, line in numbered if line.strip()]


def _from_json(line: str, where: str) -> tuple[Any, str]:
    try:
        return json.loads(line), where
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} (column {error.colno})") from None


def _is_json_object(line: str) -> bool:
    """True if a first line is meant to be a JSON object, even if truncated."""
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return re.match(r'\s*\{\s*"\w+"\s*:', line) is not None


def _from_row(row: Any, where: str) -> Prompt:
    """Return the prompt in a JSON object of any known data set."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: not a JSON object")
    if "messages" in row:
        return _from_chat(row, where)
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ConfigError(f"{where}: `turns` is not a list of strings")
        category = row.get("category", "")
        if not isinstance(category, str):
            raise ConfigError(f"{where}: `category` is not a string")
        return Prompt(_text(turns[0], "turns", where), "spec_bench", None, where, category)
    if "context" in row and "question" in row:
        context, question = (_text(row[k], k, where) for k in ("context", "question"))
        return Prompt(f"{context}\n\n{question}", "acpbench", None, where)
    if "question" in row:
        answer = str(row.get("answer", ""))
        reference = normal_number(answer.rsplit("####", 1)[1]) if "####" in answer else None
        return Prompt(_text(row["question"], "question", where), "gsm8k", reference, where)
    if "prompt" in row:
        return Prompt(_text(row["prompt"], "prompt", where), "humaneval", None, where)
    if "text" in row:
        return Prompt(_text(row["text"], "text", where), "text", None, where)
    raise ConfigError(f"{where}: fields {', '.join(map(str, row)) or '(none)'}; {_KNOWN}")


def _from_chat(row: dict[str, Any], where: str) -> Prompt:
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ConfigError(f"{where}: `messages` is not a list of objects")
    if not messages:
        raise ConfigError(f"{where}: `messages` is empty; give at least one message")
    chat = Chat(**{name: row[name] for name in _CHAT_FIELDS & row.keys()})
    shown = [text for m in messages for text in strings_in(m.get("content"))]
    predicted = row.get("prediction") or {}
    text = predicted.get("content", "") if isinstance(predicted, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"{where}: `prediction` is not an object whose `content` is a string")
    return Prompt("\n".join(shown), "chat", None, where, chat=chat, prediction=text)


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: `{field}` is not a non-empty string")
    return value

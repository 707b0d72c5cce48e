"""`flyspec chat`: messages, commands, Ctrl-C, line editing in a pseudo terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import sys
import termios
from pathlib import Path
from unittest import mock

from flyspec.cli.conversation import Terminal
from flyspec.cli.stack import Stack
from flyspec.rules.presets import DEFAULT_RULE
from tests.cli.processes import COMMAND, ENVIRONMENT, ROOT, invoke

CODE = re.compile(rb"\x1b\[[\d;?]*[A-Za-z]")


def chat(stack: Stack, *lines: str, flags: tuple[str, ...] = ("--max-tokens", "8")):
    return invoke(
        "chat", "--address", stack.address, *flags, stdin="".join(f"{line}\n" for line in lines)
    )


def test_a_pipe_gets_an_answer_per_line_and_the_conversation_grows(
    stack: Stack, tmp_path: Path
) -> None:
    file = tmp_path / "talk.jsonl"
    result = chat(stack, "One cat", "/rule exact", "and a dog", "", f"/save {file}", "/stats")
    assert result.code == 0
    messages = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert result.out == "".join(f"{m['content']}\n" for m in messages[1::2])
    assert "rule exact" in result.err
    assert "2 answers" in result.err
    # It is a prompt file.
    again = invoke(
        "generate", "--address", stack.address, "--prompt-file", str(file), "--max-tokens", "4"
    )
    assert again.code == 0


def test_messages_of_several_lines_the_system_message_and_retry(
    stack: Stack, tmp_path: Path
) -> None:
    file = tmp_path / "talk.jsonl"
    lines = ["/system Be brief", "a\\", "b", '"""', "/c", "", "d", '"""', "/retry", f"/save {file}"]
    assert chat(stack, *lines).code == 0
    first, *others = json.loads(file.read_text())["messages"]
    assert first == {"role": "system", "content": "Be brief"}
    assert [m["content"] for m in others[::2]] == ["a\nb", "/c\n\nd"]
    assert others[-1]["role"] == "assistant"
    assert len(others) == 4


def test_what_cannot_be_done_is_named_and_the_conversation_goes_on(stack: Stack) -> None:
    long = "cat " * 400
    result = chat(stack, "/dance", "/rule banana", "/save", "/retry", long, "One cat", "/stats")
    assert result.code == 2
    assert "/dance: no such command; /help lists them" in result.err
    assert (
        f"/rule banana: not a rule of this server; use one of {DEFAULT_RULE}, exact" in result.err
    )
    assert "/save: name a file" in result.err
    assert "/retry: there is no message" in result.err
    assert "does not fit" in result.err
    assert "/reset forgets it" in result.err
    assert "1 answers" in result.err


def test_a_rule_may_have_phases(stack: Stack) -> None:
    result = chat(stack, "/rule fly until a then banana", "/rule fly until a then exact", "One cat")
    assert "/rule banana: not a rule of this server" in result.err
    assert "rule fly until a then exact" in result.err
    assert "rule fly until 'a', then exact" in result.err


async def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(
    stack: Stack, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "COLUMNS": "80", "TERM": "xterm", "XDG_STATE_HOME": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "chat", "--address", stack.address, "--ignore-eos", "--max-tokens", "150",
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = bytearray()

    def is_readable(seconds: float) -> bool:
        return bool(select.select([ours], [], [], seconds)[0])

    async def until(text: str) -> None:
        while not re.search(text.encode(), CODE.sub(b"", bytes(shown))):
            assert await asyncio.to_thread(is_readable, 60), f"no {text!r} in {bytes(shown)!r}"
            shown.extend(os.read(ours, 4096))

    async def interrupt_typing() -> None:
        # A signal between readline's echo and its select() waits for the next one or a key
        # (CPython 3.11, Modules/readline.c), and we send ours as soon as we see the echo.
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            if await asyncio.to_thread(is_readable, 3):
                return

    await until("> ")
    os.write(ours, b"/ru\tmarg\t\r")  # completed
    await until("\nrule margin\r\n> ")
    os.write(ours, b"One cat\r")
    await until("One cat\r\n[^\r]")
    process.send_signal(signal.SIGINT)
    await until("tokens/s[^>]*> ")  # after its summary, stopped or not
    os.write(ours, b"forget this")
    await until("forget this")
    await interrupt_typing()
    await until("forget this\r\n")
    os.write(ours, b"/stats\r")
    await until("answers[^>]*> ")
    os.write(ours, b"\x04")
    assert await asyncio.wait_for(process.wait(), 30) == 0
    os.close(ours)
    history = (tmp_path / "flyspec" / "chat_history").read_text().splitlines()
    assert history == ["/rule margin", "One cat", "/stats"]


def test_what_is_typed_during_an_answer_is_kept_and_not_shown() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin, mock.patch.object(sys, "stdin", stdin):
        with Terminal().silent():
            os.write(ours, b"early\n")
            assert not select.select([ours], [], [], 0)[0]
        assert stdin.readline() == "early\n"
        assert termios.tcgetattr(theirs)[3] & termios.ECHO
    os.close(ours)


def test_only_generate_prints_documents(stack: Stack) -> None:
    result = chat(stack, flags=("--logprobs", "3"))
    assert result.code == 2
    assert "--logprobs: only with `flyspec generate --json`" in result.err

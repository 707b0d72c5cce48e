"""The conversation of `flyspec chat`: its messages, commands and line editing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from flyspec.cli import render
from flyspec.cli.conditions import parse_condition
from flyspec.cli.stack import Stack
from flyspec.cli.streaming import StreamedAnswer, note
from flyspec.client import AsyncClient, Chat, Generation
from flyspec.errors import ConfigError, FlyspecError, InvalidArgumentError
from flyspec.progress import error_console
from flyspec.values.requests import GenerateOptions

BLOCK = '"""'
"""A line of this begins and ends a message of several lines."""
_TOO_LONG = "maximum context length"
"""Part of the server's message for a conversation that does not fit (OpenAI's wording)."""
_HISTORY_LINES = 1000


class Terminal:
    """Lines typed with line editing, a history, and completion of commands."""

    def __init__(self) -> None:
        import readline

        self._readline = readline
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self._file = Path(base) / "flyspec" / "chat_history"
        self.words: Callable[[str], list[str]] = lambda _: []
        with contextlib.suppress(OSError):
            readline.read_history_file(self._file)
        readline.set_history_length(_HISTORY_LINES)
        readline.set_completer(self._complete)
        readline.set_completer_delims(" ")
        readline.parse_and_bind("tab: complete")

    def _complete(self, text: str, state: int) -> str | None:
        found = [w for w in self.words(self._readline.get_line_buffer()) if w.startswith(text)]
        return found[state] if state < len(found) else None

    def read(self, prompt: str) -> str:
        return input(prompt)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Keep what is typed in the context for the next line, without showing it."""
        import termios

        was = termios.tcgetattr(sys.stdin)
        now = [*was[:3], was[3] & ~termios.ECHO, *was[4:]]
        termios.tcsetattr(sys.stdin, termios.TCSANOW, now)
        try:
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, was)

    def close(self) -> None:
        """Keep the history."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._readline.write_history_file(self._file)
            self._file.chmod(0o600)


@dataclass
class Conversation:
    """A conversation with the server of `client`; without a terminal, messages are piped in.

    `generations` are its complete answers, which took so many `seconds`.
    """

    client: AsyncClient
    server: Stack | None
    options: GenerateOptions
    system: str
    color: bool
    terminal: Terminal | None
    messages: list[dict[str, str]] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    seconds: float = 0.0
    rules: tuple[str, ...] = ()
    context_length: int = 0

    # --- the loop -----------------------------------------------------------------------------

    def hold(self, runner: asyncio.Runner) -> int:
        """Read and answer messages until the end; return the exit code."""
        models = runner.run(self.client.list_models())
        self.rules, self.context_length = models.rules, models.target.context_length
        if self.terminal is not None:
            self.terminal.words = self._words
            self._say(f"{models.target.name}; /help for help, Ctrl-D to leave")
            if self.color:
                console = error_console()
                console.print(render.legend(console.width))
        failed = False
        try:
            for text, is_command in self._typed():
                try:
                    if is_command:
                        self._command(runner, text)
                    else:
                        self.messages.append({"role": "user", "content": text})
                        self._answer(runner)
                except _LeftError:
                    break
                except KeyboardInterrupt:
                    if self.terminal is None:
                        raise
                    self._forget_unanswered()
                    print()
                except FlyspecError as error:
                    failed = True
                    error_console().print(f"error: {error}", markup=False)
        finally:
            if self.terminal is not None:
                self.terminal.close()
        return 2 if failed and self.terminal is None else 0

    def _typed(self) -> Iterator[tuple[str, bool]]:
        """Yield messages and commands; the flag says which."""
        while True:
            try:
                line = self._line("> ")
                text = self._message(line)
            except EOFError:
                if self.terminal is not None:
                    print()
                return
            except KeyboardInterrupt:  # forgets what was being typed
                if self.terminal is None:
                    raise
                print()
                continue
            if text.strip():
                yield text, line.startswith("/")

    def _message(self, line: str) -> str:
        """Read the rest of a message: of lines that end in a backslash, or of a block."""
        if line.strip() == BLOCK:
            lines = []
            while (line := self._line("... ")).strip() != BLOCK:
                lines.append(line)
            return "\n".join(lines)
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line("... ")
        return "\n".join([*lines, line])

    def _line(self, prompt: str) -> str:
        if self.terminal is not None:
            return self.terminal.read(prompt)
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line.rstrip("\n")

    # --- answers ------------------------------------------------------------------------------

    def _answer(self, runner: asyncio.Runner) -> None:
        """Answer the last message. If it is stopped, what was reached stays.

        Raises `FlyspecError`, and forgets the message.
        """
        answer = StreamedAnswer(self.color)
        first = [{"role": "system", "content": self.system}] if self.system else []
        source = Chat((*first, *self.messages))
        work = answer.stream(self.client, source, self.options)
        try:
            with self.terminal.silent() if self.terminal else contextlib.nullcontext():
                runner.run(self.server.guard(work) if self.server else work)
        except KeyboardInterrupt:
            if self.terminal is None:
                raise
        except FlyspecError as error:
            self._forget_unanswered()
            if _TOO_LONG not in str(error):
                raise
            raise ConfigError(
                f"the conversation does not fit into the {self.context_length} tokens that this "
                "model can hold; /reset forgets it, or send something shorter"
            ) from error
        transcript = answer.transcript
        if transcript.started is None:
            self._forget_unanswered()
            return
        if (generation := transcript.generation) is not None:
            self.generations.append(generation)
            self.seconds += answer.seconds
        self.messages.append({"role": "assistant", "content": transcript.text})

    def _forget_unanswered(self) -> None:
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    # --- commands -----------------------------------------------------------------------------

    def _command(self, runner: asyncio.Runner, text: str) -> None:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        match name:
            case "/help":
                self._say(HELP)
            case "/rule" if rest:
                self._rule(rest)
            case "/rule":
                now = self.options.rule.name if self.options.rule else ""
                self._say(f"rule {now or self.rules[0]}; others: {', '.join(self.rules)}")
            case "/exact":
                self._rule("exact")
            case "/system":
                self.system = rest
                self._say("system message set" if rest else "no system message")
            case "/reset":
                self.messages.clear()
                self._say("the conversation is empty")
            case "/retry":
                self._retry(runner)
            case "/stats":
                self._say(render.total(self.generations, self.seconds, "answers"))
            case "/save":
                self._save(rest)
            case "/quit" | "/exit":
                raise _LeftError
            case _:
                raise InvalidArgumentError(
                    f"{name}: no such command; /help lists them. To send a message that begins "
                    f"with a slash, put it between two lines of {BLOCK}"
                )

    def _rule(self, text: str) -> None:
        try:
            condition = parse_condition(text)
        except ValueError as error:
            raise InvalidArgumentError(f"/rule {error}") from None
        unknown = next((r.name for r in condition.rules if r.name not in self.rules), None)
        if unknown is not None:
            raise InvalidArgumentError(
                f"/rule {unknown}: not a rule of this server; use one of {', '.join(self.rules)}"
            )
        self.options = replace(self.options, rule=condition.rule, phases=condition.phases)
        self._say(f"rule {text}")

    def _retry(self, runner: asyncio.Runner) -> None:
        if not self.messages:
            raise InvalidArgumentError("/retry: there is no message to answer again")
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if self.options.seed is not None:  # another text, if it is sampled
            self.options = replace(self.options, seed=self.options.seed + 1)
        self._answer(runner)

    def _save(self, name: str) -> None:
        """Write the conversation as a prompt file for `generate`, `bench` and `eval`."""
        if not name:
            raise InvalidArgumentError("/save: name a file")
        first = [{"role": "system", "content": self.system}] if self.system else []
        document = json.dumps({"messages": [*first, *self.messages]}, ensure_ascii=False)
        try:
            Path(name).expanduser().write_text(document + "\n")
        except OSError as error:
            raise InvalidArgumentError(f"/save {name}: {error.strerror}") from None
        self._say(f"{len(self.messages)} messages saved in {name}")

    def _words(self, line: str) -> list[str]:
        """Words that may be typed next on this line."""
        if line.startswith("/rule "):
            return list(self.rules)
        return [f"{name} " for name in COMMANDS] if line.startswith("/") else []

    def _say(self, text: str) -> None:
        note(error_console(), text)


class _LeftError(Exception):
    """The conversation was left."""


COMMANDS = {
    "/help": "show this",
    "/rule": "NAME  use another acceptance rule; without a name, list them",
    "/exact": "use the exact rule",
    "/system": "TEXT  set the system message; without a text, none",
    "/retry": "answer the last message again",
    "/reset": "forget the conversation",
    "/stats": "tokens, speed and loose tokens of the complete answers so far",
    "/save": "FILE  write the conversation, as a prompt file for `flyspec generate`",
    "/quit": "leave",
}
HELP = "\n".join(
    [
        *(f"{name:8} {what}" for name, what in COMMANDS.items()),
        "",
        f"A line that ends in \\ goes on in the next; between two lines of {BLOCK}, a message",
        "has any number of lines. Ctrl-C stops an answer, Ctrl-D leaves.",
    ]
)

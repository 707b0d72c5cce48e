"""Labels for a judge, made by the models themselves: which mismatches change the final answer?

AutoJudge's semi-greedy search (arXiv 2504.20039): the target decodes greedily; at the first token
that the draft model would have chosen otherwise, the draft's token is put in and the target
finishes. If the final answer stays the same, the mismatch was unimportant and the new text is gone
on with, else it was important and the old one is. Then the next mismatch, after that position, has
its turn.

Control tokens are left out, since no rule accepts them loosely.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flyspec.concurrency import UntilCtrlC
from flyspec.engine.autojudge import HIDDEN_LAYER
from flyspec.engine.model import Draw, Model, Step
from flyspec.engine.sampling import likeliest
from flyspec.prefix import num_same
from flyspec.values.tokens import SamplingParams
from flyspec_lab.tasks import Problem, Task

DRAWN_AT_ONCE = 16
"""Tokens that a text grows by before other texts have their turn."""
ROWS_AT_ONCE = 256
"""Rows of the draft model's logits per text and step."""
TOKENS_AT_ONCE = 2048
"""Tokens per step over all texts, unless one of them has more."""
_GREEDY = SamplingParams()


@dataclass(frozen=True)
class Mismatch:
    """A token that the draft model would have chosen otherwise, and what came of it.

    `output_token_index` counts from the first output token of problem number `problem`. `hidden`
    [hidden size] is the target's hidden row after reading the draft's token there, float32.
    """

    problem: int
    output_token_index: int
    target_token_id: int
    draft_token_id: int
    important: bool
    hidden: Tensor


@dataclass
class Mined:
    """What was mined of the problems that were finished.

    `unanswered` of them have no mismatches, since the target gives no answer there. `num_tokens`
    were decoded by the target.
    """

    mismatches: list[Mismatch] = field(default_factory=list)
    problems: int = 0
    unanswered: int = 0
    num_tokens: int = 0


class Choices(NamedTuple):
    """Asks for the draft model's most likely token after each of a step's last tokens."""

    step: Step


class Entry(NamedTuple):
    """Asks for the target's hidden row at a step's last token, and its most likely token after."""

    step: Step


class Continuation(NamedTuple):
    """Asks for the tokens with which the target goes on."""

    draw: Draw


Want: TypeAlias = Choices | Entry | Continuation
Got: TypeAlias = "list[int] | tuple[Tensor, int]"
Work: TypeAlias = Generator[Want, Got, list[Mismatch] | None]


class MinedText:
    """One problem's text: its tokens, and what both models' slots hold of it."""

    def __init__(
        self,
        prompt: Sequence[int],
        slots: tuple[int, int],
        max_length: int,
        stop_token_ids: Collection[int],
    ) -> None:
        self.prompt = len(prompt)
        self.tokens = [*prompt]
        self._target, self._draft = slots
        self._max_length, self._stop = max_length, stop_token_ids
        self._held: list[int] = []  # by the target's slot

    def grow(self) -> Generator[Want, Got, None]:
        """Have the target finish the text, greedily."""
        tokens = self.tokens
        while len(tokens) < self._max_length and tokens[-1] not in self._stop:
            most = min(DRAWN_AT_ONCE, self._max_length - len(tokens))
            drawn = yield Continuation(
                Draw(self._step(), _GREEDY, max_tokens=most, stop_token_ids=self._stop)
            )
            tokens += drawn  # type: ignore[arg-type]
            self._held = tokens[:-1]

    def enter(self, index: int, token_id: int) -> Generator[Want, Got, Tensor]:
        """Replace everything from an index on by a token; return its hidden row."""
        self.tokens[index:] = [token_id]
        found = yield Entry(self._step()._replace(hidden_layers=(HIDDEN_LAYER,)))
        assert isinstance(found, tuple)
        hidden, following = found
        self._held = self.tokens[:]
        if len(self.tokens) < self._max_length:
            self.tokens.append(following)
        return hidden

    def choices(self, first: int) -> Generator[Want, Got, list[int]]:
        """Return the draft model's choice for each token from index `first` on.

        Its slot holds the tokens before that, or nothing if `first` is where the output begins.
        """
        start = 0 if first == self.prompt else first - 1
        found: list[int] = []
        for at in range(first, len(self.tokens), ROWS_AT_ONCE):
            end = min(at + ROWS_AT_ONCE, len(self.tokens))
            step = Step(self._draft, start, self.tokens[start : end - 1], end - at)
            found += yield Choices(step)  # type: ignore[arg-type]
            start = end - 1
        return found

    def _step(self) -> Step:
        """The step that reads what the target's slot does not hold, at least the last token."""
        start = min(num_same(self._held, self.tokens), len(self.tokens) - 1)
        return Step(self._target, start, self.tokens[start:])


def mine(
    text: MinedText,
    number: int,
    answer_of: Callable[[Sequence[int]], str | None],
    control_token_ids: Collection[int],
    same: Callable[[str | None, str | None], bool] = eq,
) -> Work:
    """Mine one problem; None if the target gives no answer.

    `answer_of` reads the answer of an output; `same` compares two of them.
    """
    yield from text.grow()
    own = answer_of(text.tokens[text.prompt :])
    if own is None:
        return None
    found: list[Mismatch] = []
    index = text.prompt
    drafts = yield from text.choices(index)
    while index < len(text.tokens):
        token, draft = text.tokens[index], drafts[index - text.prompt]
        if token != draft and not {token, draft} & set(control_token_ids):
            before = text.tokens[:]
            hidden = yield from text.enter(index, draft)
            yield from text.grow()
            important = not same(own, answer_of(text.tokens[text.prompt :]))
            found.append(Mismatch(number, index - text.prompt, token, draft, important, hidden))
            if important:
                text.tokens = before
            else:
                more = yield from text.choices(index + 1)
                drafts[index - text.prompt + 1 :] = more
        index += 1
    return found


class Miner:
    """Mines problems, many at once, with a target and a draft model of the same tokenizer.

    `task_of` returns the task of a problem, which knows what texts say the same.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        task_of: Callable[[Problem], Task],
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: Collection[int],
        control_token_ids: Collection[int],
    ) -> None:
        self._target, self._draft, self._task_of = target, draft, task_of
        self._decode, self._eos, self._control = decode, eos_token_ids, control_token_ids

    def run(
        self,
        problems: Sequence[tuple[Problem, Sequence[int]]],
        max_tokens: int,
        concurrency: int,
        advance: Callable[[], None] = lambda: None,
    ) -> Mined:
        """Mine problems, given with their prompts' tokens; call `advance` after each.

        Raises `StoppedEarly` with what was mined if Ctrl-C was pressed after some problem.
        """
        mined, waiting = Mined(), iter(enumerate(problems))
        running: dict[int, tuple[Work, Want, tuple[int, int]]] = {}

        def begin() -> None:
            for number, (problem, prompt) in waiting:
                slots = self._target.cache.acquire().slot, self._draft.cache.acquire().slot
                work = self._work(number, problem, prompt, max_tokens, slots)
                running[number] = work, next(work), slots
                if len(running) == concurrency:
                    return

        def go_on(number: int, got: Got) -> None:
            work, _, slots = running[number]
            try:
                running[number] = work, work.send(got), slots
            except StopIteration as end:
                del running[number]
                for model, slot in zip((self._target, self._draft), slots, strict=True):
                    model.cache.release(slot)
                found: list[Mismatch] | None = end.value
                mined.problems += 1
                mined.unanswered += found is None
                mined.mismatches += found or ()
                until.reached = True
                advance()

        with UntilCtrlC() as until:
            begin()
            while running:
                for number, got in self._answers({n: want for n, (_, want, _) in running.items()}):
                    if not isinstance(running[number][1], Choices):
                        mined.num_tokens += len(got) if isinstance(got, list) else 1
                    go_on(number, got)
                if len(running) < concurrency:
                    begin()
        mined.mismatches.sort(key=lambda each: (each.problem, each.output_token_index))
        return until.result(mined)

    def _work(
        self,
        number: int,
        problem: Problem,
        prompt: Sequence[int],
        max_tokens: int,
        slots: tuple[int, int],
    ) -> Work:
        length = min(
            len(prompt) + max_tokens,
            self._target.info.context_length,
            self._draft.info.context_length,
        )
        text = MinedText(prompt, slots, length, self._eos)

        task = self._task_of(problem)

        def answer_of(output: Sequence[int]) -> str | None:
            return task.answer(problem, self._decode(output))

        return mine(text, number, answer_of, self._control, task.says_the_same)

    def _answers(self, wants: dict[int, Want]) -> Iterator[tuple[int, Got]]:
        """Answer what all running texts ask for, each kind in as few calls as memory allows."""
        choices = {n: want.step for n, want in wants.items() if isinstance(want, Choices)}
        for numbers in _parts(choices):
            rows = self._draft.forward([choices[n] for n in numbers])
            chosen = [likeliest(each.logits).tolist() for each in rows]
            yield from zip(numbers, chosen, strict=True)
        entries = {n: want.step for n, want in wants.items() if isinstance(want, Entry)}
        for numbers in _parts(entries):
            rows = self._target.forward([entries[n] for n in numbers])
            entered = [
                (
                    each.hidden[0][-1].to("cpu", torch.float32, copy=True),
                    int(likeliest(each.logits)[-1]),
                )
                for each in rows
            ]
            yield from zip(numbers, entered, strict=True)
        growths = {n: want.draw for n, want in wants.items() if isinstance(want, Continuation)}
        for numbers in _parts({n: draw.step for n, draw in growths.items()}):
            drawn = self._target.draw([growths[n] for n in numbers])
            yield from zip(numbers, ([*each.token_ids] for each in drawn), strict=True)


def _parts(steps: dict[int, Step]) -> Iterable[list[int]]:
    """Divide steps among calls, by number."""
    part: list[int] = []
    size = 0
    for number, step in steps.items():
        if part and size + len(step.token_ids) > TOKENS_AT_ONCE:
            yield part
            part, size = [], 0
        part.append(number)
        size += len(step.token_ids)
    if part:
        yield part

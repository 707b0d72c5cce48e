"""Labels for a judge, made by the models themselves: which mismatches change the final answer?

AutoJudge's semi-greedy search (arXiv 2504.20039): the target decodes greedily; at the first token
that the draft model would have chosen otherwise, the draft's token is put in and the target
finishes. If the final answer stays the same, the mismatch was unimportant and the new text is gone
on with, else it was important and the old one is. Then the next mismatch, after that position, has
its turn. Texts are mined side by side, each of them one mismatch at a time.

Control tokens are left out, since no rule accepts them loosely.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flyspec.engine.autojudge import HIDDEN_LAYER
from flyspec.engine.sampling import likeliest
from flyspec_lab.interrupting import UntilCtrlC
from flyspec_lab.local_model import LocalModel
from flyspec_lab.tasks import Problem, Task


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
    """Mismatches of the problems that were finished.

    `unanswered` of them have no mismatches, since the target gives no answer there. `num_tokens`
    were decoded by the target.
    """

    mismatches: list[Mismatch] = field(default_factory=list)
    unanswered: int = 0
    num_tokens: int = 0


@dataclass
class _Text:
    """A text while it is mined: its output so far, and the draft model's choice of each token.

    Mismatches before index `at` of the output have had their turn.
    """

    number: int
    task: Task
    problem: Problem
    prompt: list[int]
    output: list[int]
    answer: str | None = None
    choices: list[int] = field(default_factory=list)
    at: int = 0
    found: list[Mismatch] = field(default_factory=list)


class Miner:
    """Mines problems, `concurrency` at once, with two models of the same tokenizer."""

    def __init__(
        self, target: LocalModel, draft: LocalModel, max_tokens: int, concurrency: int
    ) -> None:
        self._target, self._draft = target, draft
        self._max_tokens, self._concurrency = max_tokens, concurrency
        self._left_out = target.eos.union(target.bundle.control_token_ids)

    @torch.inference_mode()
    def run(
        self,
        problems: Sequence[tuple[Task, Problem]],
        advance: Callable[[], None] = lambda: None,
    ) -> Mined:
        """Mine problems; call `advance` after each.

        Raises `StoppedEarly` with what was mined if Ctrl-C was pressed after some problem.
        """
        mined, waiting = Mined(), enumerate(problems)
        running: list[_Text] = []
        with UntilCtrlC() as until:
            while True:
                new = list(itertools.islice(waiting, self._concurrency - len(running)))
                if not new and not running:
                    break
                running += self._begin(new, mined)
                going_on = [text for text in running if self._seek(text)]
                finished = [text for text in running if text not in going_on]
                running = going_on
                self._try(running, mined)
                for text in finished:
                    mined.unanswered += text.answer is None
                    mined.mismatches += text.found
                    until.reached = True
                    advance()
        mined.mismatches.sort(key=lambda each: (each.problem, each.output_token_index))
        return until.result(mined)

    def _begin(
        self, problems: Sequence[tuple[int, tuple[Task, Problem]]], mined: Mined
    ) -> list[_Text]:
        """Return the target's own texts of problems, with their answers."""
        prompts = [self._target.encode(problem.prompt) for _, (_, problem) in problems]
        outputs = self._ends(prompts, [[] for _ in prompts], mined)
        texts = [
            _Text(number, task, problem, prompt, output)
            for (number, (task, problem)), prompt, output in zip(
                problems, prompts, outputs, strict=True
            )
        ]
        for text in texts:
            text.answer = self._answer(text, text.output)
            if text.answer is not None:
                self._choose(text)
        return texts

    def _seek(self, text: _Text) -> bool:
        """Go on to the text's next mismatch; return whether there is one."""
        while text.answer is not None and text.at < len(text.output):
            pair = {text.output[text.at], text.choices[text.at]}
            if len(pair) == 2 and not pair & self._left_out:
                return True
            text.at += 1
        return False

    def _try(self, texts: Sequence[_Text], mined: Mined) -> None:
        """Put the draft's token in at the next mismatch of each text, and label it."""
        parts = [[*text.output[: text.at], text.choices[text.at]] for text in texts]
        prompts = [text.prompt for text in texts]
        rows = self._target.rows(
            [[*prompt, *part] for prompt, part in zip(prompts, parts, strict=True)],
            [1] * len(texts),
            (HIDDEN_LAYER,),
        )
        hidden = [each.hidden[0][-1].to("cpu", torch.float32, copy=True) for each in rows]
        ends = self._ends(prompts, parts, mined)
        for text, part, end, row in zip(texts, parts, ends, hidden, strict=True):
            output, at = part + end, text.at
            important = self._answer(text, output) != text.answer
            text.found.append(Mismatch(text.number, at, text.output[at], part[-1], important, row))
            text.at += 1
            if not important:
                text.output = output
                self._choose(text)

    def _ends(
        self, prompts: Sequence[list[int]], parts: Sequence[list[int]], mined: Mined
    ) -> list[list[int]]:
        """Return what the target goes on with after the beginnings of outputs."""
        longest = min(self._target.info.context_length, self._draft.info.context_length)
        most = [
            min(self._max_tokens, longest - len(prompt)) - len(part)
            for prompt, part in zip(prompts, parts, strict=True)
        ]
        sequences = [[*prompt, *part] for prompt, part in zip(prompts, parts, strict=True)]
        ends = self._target.continued(sequences, most)
        mined.num_tokens += sum(map(len, ends))
        return ends

    def _choose(self, text: _Text) -> None:
        """Note the draft model's choices from the text's next token on."""
        count = len(text.output) - text.at
        if count:
            (rows,) = self._draft.rows([[*text.prompt, *text.output[:-1]]], [count])
            text.choices[text.at :] = likeliest(rows.logits).tolist()

    def _answer(self, text: _Text, output: Sequence[int]) -> str | None:
        score = text.task.score(text.problem, self._target.tokenizer.decode(output))
        return None if score is None else score.answer

"""Mining, batched and cached, against the algorithm as it is told, with nothing cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flyspec.bundled import DRAFT, TARGET
from flyspec.concurrency import StoppedEarly
from flyspec.config import DraftSettings, VerifySettings
from flyspec.engine.loading import load_model
from flyspec.tokenizer import Tokenizer
from flyspec.values.chat import Chat
from flyspec_lab.local_model import LocalModel
from flyspec_lab.tasks import TASKS, Problem, Task
from flyspec_lab.training.mining import Miner

MOST = 80
SEED, COUNT = 11, 3


@torch.inference_mode()
def rows(module: Any, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and last hidden states of all tokens."""
    out = module(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
    return out.logits[0], out.hidden_states[-1][0]


def finished(module: Any, tokens: Sequence[int], most: int, eos: set[int]) -> list[int]:
    """The text that the target makes of its beginning."""
    tokens = list(tokens)
    while len(tokens) < most and tokens[-1] not in eos:
        tokens.append(int(rows(module, tokens)[0][-1].argmax()))
    return tokens


def told(target: Any, draft: Any, prompt: list[int], answer_of: Any, ids: Any) -> list[Any] | None:
    """AutoJudge's algorithm, token by token (arXiv 2504.20039, the semi-greedy search)."""
    eos, control = ids
    most = len(prompt) + MOST
    text = finished(target, prompt, most, eos)
    own = answer_of(text[len(prompt) :])
    if own is None:
        return None
    found = []
    for at in range(len(prompt), most):
        if at >= len(text):
            break
        guess = int(rows(draft, text[:at])[0][-1].argmax())
        if guess == text[at] or guess in control or text[at] in control:
            continue
        entered = [*text[:at], guess]
        other = finished(target, entered, most, eos)
        important = answer_of(other[len(prompt) :]) != own
        found.append((at - len(prompt), text[at], guess, important, rows(target, entered)[1][-1]))
        if not important:
            text = other
    return found


@pytest.fixture(scope="module")
def pair() -> Any:
    torch.set_num_threads(1)
    return [load_model(str(path), "cpu", "float32") for path in (TARGET, DRAFT)]


def miner_of(num_slots: int) -> tuple[Miner, list[tuple[Task, Problem]]]:
    same: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_sessions": num_slots}
    target = LocalModel(VerifySettings(model=str(TARGET), **same))
    draft = LocalModel(DraftSettings(model=str(DRAFT), **same))
    task = TASKS["word_problems"](limit=COUNT, seed=SEED)
    return Miner(target, draft, MOST, num_slots), [(task, each) for each in task.problems()]


@pytest.fixture(scope="module")
def expected(pair: Any) -> list[list[Any] | None]:
    """Findings of the algorithm in each problem."""
    bundle, task = pair[0].tokenizer, TASKS["word_problems"]()
    tokenizer = Tokenizer(bundle)
    ids = set(bundle.eos_token_ids), set(bundle.control_token_ids)
    found = []
    for problem in TASKS["word_problems"](limit=COUNT, seed=SEED).problems():
        assert isinstance(problem.prompt, Chat)
        prompt = tokenizer.encode_chat(problem.prompt)

        def answer_of(output: list[int], problem: Problem = problem) -> str | None:
            score = task.score(problem, tokenizer.decode(output))
            assert score is not None
            return score.answer

        found.append(told(pair[0].model, pair[1].model, prompt, answer_of, ids))
    return found


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.slow
def test_mining_is_the_algorithm(expected: list[list[Any] | None], concurrency: int) -> None:
    miner, problems = miner_of(concurrency)
    advanced: list[int] = []
    mined = miner.run(problems, lambda: advanced.append(1))
    assert len(advanced) == COUNT
    assert mined.unanswered == expected.count(None)
    assert mined.mismatches
    for number, wanted in enumerate(expected):
        found = [m for m in mined.mismatches if m.problem == number]
        assert [
            (m.output_token_index, m.target_token_id, m.draft_token_id, m.important) for m in found
        ] == [each[:4] for each in wanted or ()]
        for one, (*_, hidden) in zip(found, wanted or (), strict=True):
            torch.testing.assert_close(one.hidden, hidden.float(), atol=2e-3, rtol=2e-3)


@pytest.mark.slow
def test_ctrl_c_keeps_the_finished_problems() -> None:
    miner, problems = miner_of(1)
    whole = miner.run(problems)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(StoppedEarly) as caught:
        miner.run(problems, advance)
    kept = caught.value.reached
    assert [m.output_token_index for m in kept.mismatches] == [
        m.output_token_index for m in whole.mismatches if m.problem < 2
    ]

"""Does a text depend on the batch that it was made in, and what does it cost that it does not?

    python -m bench.invariance --data DIR --json invariance.json

The target alone, in this process, greedy, rule `exact`: texts made with K drafts a round, several
at a time, against the same texts made one token a step, one at a time; with and without the
batch-invariant mode. Drafts are the plain text, each token wrong with a fixed probability, so that
rounds of every length occur. Then step times with and without, in turn: processor time, so that a
busy machine does not show, and the median of the pairs' ratios.

Exits with 1 if anything differs with the mode on. Prompts: freshly generated problems, and
HumanEval where its file is in DIR.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench import command
from bench.command import print_records, say
from demo.corpus import chat_prompt, problems
from flyspec.cli.stack import DEMO_MODELS
from flyspec.engine.loading import load_model
from flyspec.engine.model import Step
from flyspec.engine.runner import ModelRunner
from flyspec.prompts import read_prompts

WRONG_DRAFTS = 0.15
"""Share of drafted tokens that are not the plain text's."""
CONTEXT_LENGTH = 1024
CONTEXTS = range(40, 600, 17)
"""Tokens of the sequences in the step times, one after the other."""
PREFILL = 512
"""Tokens of the prompt whose time is taken, in one step."""


@dataclass(frozen=True)
class Agreement:
    """Texts that are not those of plain decoding; K 0 is plain decoding in a batch."""

    dtype: str
    batch_invariant: bool
    k: int
    batch: int
    texts: int
    different: int


@dataclass(frozen=True)
class Cost:
    """Median processor time of a step, ms, without the mode and with it, and of their ratio."""

    dtype: str
    step: str
    off_ms: float
    on_ms: float
    ratio: float


@dataclass
class Text:
    """A text under way: the prompt and what follows; `plain` is what to draft from."""

    slot: int
    token_ids: list[int]
    end: int
    plain: Sequence[int]


def prompts(data: Path, count: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of `count` prompts, half of them code where there is any."""
    path = data / "HumanEval.jsonl.gz"
    code: list[str] = []
    if path.exists():
        code = [prompt.text for prompt in read_prompts(str(path), count // 2)]
    else:
        say(f"SKIPPED humaneval: {path} is not there")
    chats = [chat_prompt(p.question) for p in problems("invariance", count - len(code))]
    texts = [text for pair in zip(chats, code, strict=False) for text in pair]
    texts += chats[len(code) :]
    return [tokenizer.encode(text, add_special_tokens=False).ids[:CONTEXT_LENGTH // 2]
            for text in texts]  # fmt: skip


def generate(
    runner: ModelRunner,
    prompts: Sequence[list[int]],
    plain: Sequence[Sequence[int]],
    k: int,
    batch: int,
    max_tokens: int,
) -> list[list[int]]:
    """Greedy texts, `batch` at a time, `k` drafts a round; one that ends makes room for another."""
    drafting = random.Random(k)
    vocab_size = runner.info.vocab_size
    waiting = list(enumerate(prompts))[::-1]
    texts: dict[int, Text] = {}
    done: dict[int, list[int]] = {}
    while waiting or texts:
        while waiting and len(texts) < batch:
            index, ids = waiting.pop()
            slot, held = runner.cache.acquire(ids)
            held = min(held, len(ids) - 1)
            if len(ids) - held > 1:
                runner.forward([Step(slot, held, ids[held:-1], 0)])
            reference = plain[index] if plain else ()
            texts[index] = Text(slot, list(ids), len(ids) + max_tokens, reference)
        steps, drafts = [], []
        for index, text in texts.items():
            at = len(text.token_ids) - len(prompts[index])
            guess = [
                drafting.randrange(vocab_size) if drafting.random() < WRONG_DRAFTS else token
                for token in text.plain[at : at + k]
            ]
            drafts.append(guess)
            last = len(text.token_ids) - 1
            steps.append(Step(text.slot, last, [text.token_ids[-1], *guess], len(guess) + 1))
        found = runner.forward(steps)
        for (index, text), guess, rows in zip(list(texts.items()), drafts, found, strict=True):
            text.token_ids += _accepted(guess, rows.logits)
            if len(text.token_ids) >= text.end:
                done[index] = text.token_ids[len(prompts[index]) : text.end]
                runner.cache.release(text.slot)
                del texts[index]
    runner.cache.forget()
    return [done[index] for index in range(len(prompts))]


def _accepted(guess: Sequence[int], rows: Tensor) -> list[int]:
    """The target's own tokens, up to the first one that was not drafted."""
    own: list[int] = rows.argmax(dim=-1).tolist()
    matches = 0
    while matches < len(guess) and guess[matches] == own[matches]:
        matches += 1
    return own[: matches + 1]


def agreement(
    runner: ModelRunner, ids: Sequence[list[int]], options: argparse.Namespace, dtype: str
) -> list[Agreement]:
    """Compare every K and batch with plain decoding; prints each as it is known."""
    plain = generate(runner, ids, (), 0, 1, options.max_tokens)
    found = []
    for batch in options.batch:
        for k in (0, *options.k):
            if (k, batch) == (0, 1):
                continue
            texts = generate(runner, ids, plain, k, batch, options.max_tokens)
            different = sum(text != own for text, own in zip(texts, plain, strict=True))
            found.append(Agreement(dtype, runner.batch_invariant, k, batch, len(ids), different))
            say(
                f"{dtype:9s} {'invariant' if runner.batch_invariant else 'as it is':9s}  K {k:2d}  "
                f"batch {batch:2d}  {different:3d} of {len(ids)} texts differ "
                f"({different / len(ids):.0%})"
            )
    return found


def context(slot: int) -> int:
    """Tokens of a slot's sequence in the step times, in no order."""
    return CONTEXTS[(slot * 13 + 15) % len(CONTEXTS)]


def costs(off: ModelRunner, on: ModelRunner, repeats: int, dtype: str) -> list[Cost]:
    """Step times of both, in turn."""
    cases: dict[str, list[Step]] = {}
    for batch in (1, 8, 32):
        for k in (0, 4, 8, 15):
            cases[f"batch {batch}, K {k}"] = [
                Step(slot, context(slot), [7] * (k + 1), k + 1) for slot in range(batch)
            ]
    cases[f"prefill of {PREFILL}"] = [Step(0, 0, [7] * PREFILL, 1)]
    cases["batch 8, K 4, and 256 of a prefill"] = [
        *(Step(slot, context(slot), [7] * 5, 5) for slot in range(8)),
        Step(8, 0, [7] * 256, 0),
    ]
    found = []
    for name, steps in cases.items():
        times: dict[ModelRunner, list[float]] = {off: [], on: []}
        for repeat in range(repeats + 2):
            for runner in (off, on) if repeat % 2 else (on, off):
                started = time.process_time_ns()
                runner.forward(steps)
                if repeat >= 2:  # kernels are made at first use
                    times[runner].append((time.process_time_ns() - started) / 1e6)
        ratios = [b / a for a, b in zip(times[off], times[on], strict=True)]
        medians = [statistics.median(t) for t in (times[off], times[on], ratios)]
        cost = Cost(dtype, name, *medians)
        found.append(cost)
        say(f"{dtype:9s} {name:36s} {cost.off_ms:8.2f} ms  {cost.on_ms:8.2f} ms  "
            f"{cost.ratio:.3f}")  # fmt: skip
    for runner in (off, on):
        runner.cache.forget()  # the steps stood behind contexts that were never computed
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything; the report."""
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    ids = prompts(Path(options.data), options.texts, tokenizer)
    slots = max(32, *options.batch)
    rows: list[Agreement] = []
    steps: list[Cost] = []
    for dtype in options.dtype:
        runners = []
        for invariant in (False, True):
            loaded = load_model(options.model, "cpu", dtype, CONTEXT_LENGTH)
            runner = ModelRunner(loaded, slots, batch_invariant=invariant)
            runner.warm_up()
            runners.append(runner)
        if not options.no_cost:
            steps += costs(runners[0], runners[1], options.repeats, dtype)
        if not options.no_agreement:
            for runner in runners:
                rows += agreement(runner, ids, options, dtype)
    return {
        "threads": options.threads,
        "max_tokens": options.max_tokens,
        "agreement": [asdict(row) for row in rows],
        "cost": [asdict(step) for step in steps],
    }


def main() -> int:
    """Parse flags, compare, report."""
    parser = command.parser("invariance", __doc__)
    parser.add_argument("--model", default=str(DEMO_MODELS / "target"), help="a directory")
    parser.add_argument("--data", default="../shared/data", help="folder of the prompt files")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"],
                        choices=["bfloat16", "float16", "float32", "float64"])  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 1 for fair costs")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4, 8, 15])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of every step")
    parser.add_argument("--no-agreement", action="store_true", help="costs only")
    parser.add_argument("--no-cost", action="store_true", help="texts only")
    options = parser.parse_args()
    return command.run(options, lambda: run(options), dict, show, lambda report: not _wrong(report))


def show(report: dict[str, Any]) -> None:
    """Tables, and whether the mode does what it is for."""
    print_records(report["agreement"])
    print_records(report["cost"])
    print(f"with the mode, {_wrong(report)} texts differ")


def _wrong(report: dict[str, Any]) -> int:
    return sum(row["different"] for row in report["agreement"] if row["batch_invariant"])


if __name__ == "__main__":
    raise SystemExit(main())

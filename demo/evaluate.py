"""`python -m demo.evaluate`: measures the bundled models, for docs/demo-models.md."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from rich.text import Text
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from demo import corpus
from flyspec import word_problems
from flyspec.bundled import MODELS
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, say, single
from flyspec.flags import Flag
from flyspec.tables import markdown
from flyspec.word_problems import WordProblem
from flyspec_lab.bench.options import Problems, ProblemSeed
from flyspec_lab.python_source import python_version
from flyspec_lab.report import Report, Results

Threads = Annotated[int, Flag("CPU threads.", min=1)]
THRESHOLD = 0.3  # for both entropy measures, as in FLy's presets


@dataclass(slots=True)
class Row:
    """One model's row of the table; None: not measured."""

    model: str
    parameters: int
    megabytes: float
    exact_answers: float
    unfinished: float
    code_bits_per_byte: float
    agreement_on_problems: float | None = None
    agreement_on_code: float | None = None


@dataclass(slots=True)
class Freedom:
    """How often the target is undecided in its own solutions."""

    positions: int
    normalized_entropy_share: float
    top3_entropy_share: float


def load(folder: Path) -> tuple[LlamaForCausalLM, Tokenizer]:
    """Load a model, in float32, and its tokenizer."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def pad_id(model: LlamaForCausalLM) -> int:
    return int(model.config.pad_token_id or 0)


def end_ids(model: LlamaForCausalLM) -> set[int]:
    ends = model.config.eos_token_id
    return set(ends) if isinstance(ends, list) else {int(ends or 0)}


@torch.no_grad()
def continuations(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], limit: int, batch: int = 64
) -> list[list[int]]:
    """Return greedy continuations, including the token that ends them."""
    pad, ends = pad_id(model), end_ids(model)
    results: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        width = max(map(len, rows))
        padded = [[pad] * (width - len(row)) + list(row) for row in rows]
        ids = torch.tensor(padded, device=model.device)
        given = model.generate(  # type: ignore[misc]
            input_ids=ids,
            attention_mask=torch.ne(ids, pad).long(),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=sorted(ends),
            pad_token_id=pad,
        )
        for row in given[:, width:].tolist():
            stop = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
            results.append(row[: stop + 1])
    return results


def encode_prompts(tokenizer: Tokenizer, problems: Sequence[WordProblem]) -> list[list[int]]:
    texts = [corpus.chat_prompt(problem.question) for problem in problems]
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def read_answers(tokenizer: Tokenizer, outputs: Sequence[Sequence[int]]) -> list[int | None]:
    """Return the answers in outputs; None if a solution was cut off."""
    end = tokenizer.token_to_id(corpus.END)
    return [
        corpus.extract_answer(tokenizer.decode(list(output[:-1]))) if output[-1] == end else None
        for output in outputs
    ]


def answers(
    model: LlamaForCausalLM, tokenizer: Tokenizer, problems: Sequence[WordProblem]
) -> list[int | None]:
    limit = 220 if tokenizer.get_vocab_size() > 1000 else 900
    outputs = continuations(model, encode_prompts(tokenizer, problems), limit)
    return read_answers(tokenizer, outputs)


def _windows(tokenizer: Tokenizer, texts: Sequence[str], length: int = 512) -> list[list[int]]:
    """Cut texts into windows, each starting with a BOS."""
    bos = int(tokenizer.token_to_id(corpus.BOS) or 0)
    cut: list[list[int]] = []
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids = encoding.ids
        cut += [[bos, *ids[i : i + length]] for i in range(0, len(ids), length)]
    return cut


def _logits(
    model: LlamaForCausalLM, rows: Sequence[Sequence[int]], batch: int = 8
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield each row with the logits after each of its tokens; shortest rows first."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for first in range(0, len(order), batch):
        group = [list(rows[i]) for i in order[first : first + batch]]
        width = max(map(len, group))
        pad = pad_id(model)
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in group])
        with torch.no_grad():  # right padding is invisible to a causal model
            logits = model(input_ids=ids, use_cache=False).logits
        for row, values in zip(group, logits, strict=True):
            yield row, values[: len(row)]


def bits_per_byte(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    nats = 0.0
    for row, logits in _logits(model, _windows(tokenizer, texts)):
        nats += float(F.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="sum"))
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def agreement(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    rows: Sequence[Sequence[int]],
    prompt_lengths: dict[tuple[int, ...], int] | None = None,
) -> float:
    """Return the fraction of positions after the prompt where both models prefer the same token."""
    same = total = 0
    both = zip(_logits(target, rows), _logits(draft, rows), strict=True)
    for (row, of_target), (_, of_draft) in both:
        start = prompt_lengths[tuple(row)] - 1 if prompt_lengths else 0
        equal = of_target[start:-1].argmax(-1) == of_draft[start:-1].argmax(-1)
        same, total = same + int(equal.sum()), total + len(equal)
    return same / total


def freedom(
    target: LlamaForCausalLM,
    rows: Sequence[Sequence[int]],
    prompt_lengths: dict[tuple[int, ...], int],
) -> Freedom:
    """Return the fractions of undecided positions in the target's own outputs."""
    normalized, top3 = [], []
    for row, logits in _logits(target, rows):
        logs = F.log_softmax(logits[prompt_lengths[tuple(row)] - 1 : -1].double(), dim=-1)
        normalized.append(-(logs.exp() * logs).sum(-1) / math.log(logs.shape[-1]))
        best = logs.topk(3, dim=-1).values
        top3.append(-(best.exp() * best).sum(-1))
    n, t = torch.cat(normalized), torch.cat(top3)
    return Freedom(
        positions=len(n),
        normalized_entropy_share=float((n >= THRESHOLD).double().mean()),
        top3_entropy_share=float((t >= THRESHOLD).double().mean()),
    )


def evaluate(models: Path, count: int, seed: int) -> tuple[list[Row], Freedom]:
    """Measure all models in the folder, which must include the target."""
    problems = word_problems.problems(seed, count)
    held_out = corpus.code_split()[1]
    rows: list[Row] = []
    target, target_tokenizer = load(models / "target")
    prompts = encode_prompts(target_tokenizer, problems)
    outputs: list[list[int]] = []
    texts: list[list[int]] = []
    for name in ("target", "draft", "draft-bytes"):
        if not (models / name / "model.safetensors").exists():
            continue
        model, tokenizer = (target, target_tokenizer) if name == "target" else load(models / name)
        own = tokenizer.get_vocab_size() != target_tokenizer.get_vocab_size()
        began = time.monotonic()
        given = continuations(model, encode_prompts(tokenizer, problems), 900 if own else 220)
        found = read_answers(tokenizer, given)
        row = Row(
            model=name,
            parameters=sum(p.numel() for p in model.parameters()),
            megabytes=(models / name / "model.safetensors").stat().st_size / 1e6,
            exact_answers=sum(a == p.answer for a, p in zip(found, problems, strict=True)) / count,
            unfinished=sum(a is None for a in found) / count,
            code_bits_per_byte=bits_per_byte(model, tokenizer, held_out),
        )
        if name == "target":
            outputs = given
            texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
        elif not own:
            starts = {tuple(t): len(p) for t, p in zip(texts, prompts, strict=True)}
            row.agreement_on_problems = agreement(target, model, texts, starts)
            row.agreement_on_code = agreement(target, model, _windows(tokenizer, held_out))
        rows.append(row)
        say(f"{name}: {time.monotonic() - began:.0f} s")
    starts = {tuple(t): len(p) for t, p in zip(texts, prompts, strict=True)}
    return rows, freedom(target, texts, starts)


def table(rows: Sequence[Row], free: Freedom, count: int, seed: int) -> str:
    def share(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f} %"

    columns = ("model", "parameters", "MB", "exact answers", "no answer",
               "held-out code, bits/byte", "agrees with target: problems", "code")  # fmt: skip
    found = [
        (r.model, f"{r.parameters / 1e6:.2f} M", f"{r.megabytes:.1f}", share(r.exact_answers),
         share(r.unfinished), f"{r.code_bits_per_byte:.3f}", share(r.agreement_on_problems),
         share(r.agreement_on_code))
        for r in rows
    ]  # fmt: skip
    return "\n".join((
        f"{count} fresh problems (seed {seed}), greedy, float32; code: {python_version()}",
        "",
        markdown(columns, found),
        "",
        f"In the target's own solutions ({free.positions} positions): normalized entropy >= "
        f"{THRESHOLD} at {share(free.normalized_entropy_share)}, top-3 entropy >= {THRESHOLD} nats "
        f"at {share(free.top3_entropy_share)}.",
    ))  # fmt: skip


@with_flags
def evaluate_models(
    models: Annotated[Path, Flag("Folder of the models.", default="the bundled ones")] = MODELS,
    problems: Problems = 500,
    seed: ProblemSeed = 7,
    threads: Threads = 2,
    *,
    results: Results,
) -> None:
    """Measure the bundled models; print a table in Markdown. Takes a few minutes on two cores."""

    def measure() -> Report:
        torch.set_num_threads(threads)
        rows, free = evaluate(models, problems, seed)
        found = Text(table(rows, free, problems, seed), no_wrap=True, overflow="ignore")
        return Report({"models": rows, "target_freedom": free}, [found])

    results.of(measure)


if __name__ == "__main__":
    run(single(evaluate_models))

"""Times judging many rounds together, with the logits of a step on the device.

As with a language model, most rows are certain of one token; the draft differs from the target in
every other round. Special tokens are the last ids of the vocabulary, and impossible.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from flyspec.engine.sampling import choose
from flyspec.progress import progress
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.device.calls import calls_on
from flyspec_lab.bench.device.report import JudgingTime
from flyspec_lab.bench.device.timing import WARM_UP, answer_times
from verify_service.rules import decide_all, prepare

RULES = ("exact", "fly", "typical")
TEMPERATURES = (0.0, 1.0)
START_POSITION = 1000
_SEED = 1
_DISTINCT = 4
"""Rounds that differ; the others of a batch repeat them, with seeds of their own."""
_DEVIATION, _SURE = 2.0, 12.0
"""Standard deviation of the logits, and the lead of the most likely one."""


class RandomRound(NamedTuple):
    """K drafted tokens, and the target's raw logits [K + 1, V]."""

    draft_token_ids: list[int]
    logits: Tensor


def control_token_ids(vocab_size: int) -> list[int]:
    """Return the special tokens of a vocabulary, as many as Llama 3 has; the first is its end."""
    return list(range(vocab_size - min(256, max(1, vocab_size // 8)), vocab_size))


def make_round(
    k: int, vocab_size: int, temperature: float, mismatch: bool, dtype: torch.dtype, seed: int
) -> RandomRound:
    """Make a round of the target's own tokens, except for one in the middle if `mismatch`.

    There the target hesitates between the two, so that a lossy rule accepts the draft.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = _DEVIATION * torch.randn(k + 1, vocab_size, generator=generator)
    logits[:, control_token_ids(vocab_size)] = -math.inf
    best = logits.topk(2)
    logits.scatter_(1, best.indices[:, :1], best.values[:, :1] + _SURE)
    if mismatch:
        logits[k // 2, best.indices[k // 2]] = best.values[k // 2, 0] + _SURE
    logits = (logits * (temperature or 1.0)).to(dtype)
    drafts = choose(logits, SamplingParams(temperature=temperature), START_POSITION, seed)
    token_ids = drafts.tolist()[:k]
    if mismatch:
        token_ids[k // 2] = next(t for t in best.indices[k // 2].tolist() if t != token_ids[k // 2])
    return RandomRound(token_ids, logits)


def judging_times(
    device: torch.device,
    dtype: torch.dtype,
    vocab_size: int,
    k: int,
    batches: Sequence[int],
    repeats: int,
) -> list[JudgingTime]:
    """Time each rule at each temperature for batches of rounds, a mismatch in half of them."""
    found = []
    cells = list(product(TEMPERATURES, batches, RULES))
    made = {
        temperature: [
            make_round(k, vocab_size, temperature, index % 2 == 0, dtype, _SEED + index)
            for index in range(min(_DISTINCT, max(batches)))
        ]
        for temperature in TEMPERATURES
    }
    with progress("judging", len(cells)) as advance:
        for temperature, batch, name in cells:
            own = [made[temperature][index % _DISTINCT] for index in range(batch)]
            logits = torch.cat([r.logits for r in own]).to(device)  # as a forward leaves them
            drafts = [r.draft_token_ids for r in own]
            work = partial(_judge, Rule(name), temperature, drafts, logits.split(k + 1))
            for _ in range(WARM_UP):
                work()
            times = answer_times(work, device, repeats)
            calls = calls_on(device, work)
            found.append(JudgingTime(
                name, temperature, k, batch, statistics.median(times), max(times),
                calls and calls.launches, calls and calls.waits,
            ))  # fmt: skip
            advance()
    return found


def _judge(
    rule: Rule, temperature: float, drafts: Sequence[Sequence[int]], logits: Sequence[Tensor]
) -> None:
    control = control_token_ids(logits[0].shape[-1])
    verdicts = decide_all(
        [
            prepare(
                rule,
                tokens,
                rows,
                sampling=SamplingParams(temperature=temperature),
                seed=_SEED + index,
                start_position=START_POSITION,
                eos_token_ids=frozenset(control[:1]),
                control_token_ids=frozenset(control),
            )
            for index, (tokens, rows) in enumerate(zip(drafts, logits, strict=True))
        ]
    )
    for verdict in verdicts:
        if isinstance(verdict, Exception):
            raise verdict

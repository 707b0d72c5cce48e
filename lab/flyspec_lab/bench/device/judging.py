"""Times judging many rounds together, with the logits of a step on the device."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from flyspec.progress import progress
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench import rounds
from flyspec_lab.bench.device.calls import calls_on
from flyspec_lab.bench.device.report import JudgingTime
from flyspec_lab.bench.device.timing import WARM_UP, answer_times
from flyspec_lab.bench.rounds import SEED, START_POSITION, RandomRound, make_round
from verify_service.rules import decide_all, hear

RULES = ("exact", "fly", "typical")
TEMPERATURES = (0.0, 1.0)
_DISTINCT = 4
"""Rounds that differ; the others of a batch repeat them, with seeds of their own."""


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
    eos, control = rounds.eos_token_ids(vocab_size), rounds.control_token_ids(vocab_size)
    with progress("judging", len(cells)) as advance:
        for temperature in TEMPERATURES:
            sampling = SamplingParams(temperature=temperature)
            made = [
                make_round(
                    k, vocab_size, sampling,
                    mismatch=index % 2 == 0, dtype=dtype, device=device, seed=SEED + index,
                )
                for index in range(min(_DISTINCT, max(batches)))
            ]  # fmt: skip
            for batch in batches:
                own = [made[index % len(made)] for index in range(batch)]
                logits = torch.cat([round_.logits for round_ in own])  # as a forward leaves them
                views = logits.split(k + 1)
                for name in RULES:
                    work = partial(_judge, Rule(name), own, views, sampling, eos, control)
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
    rule: Rule,
    own: Sequence[RandomRound],
    views: Sequence[Tensor],
    sampling: SamplingParams,
    eos: frozenset[int],
    control: frozenset[int],
) -> None:
    verdicts = decide_all(
        [
            hear(
                rule,
                round_.draft_token_ids,
                view,
                sampling=sampling,
                seed=SEED + index,
                start_position=START_POSITION,
                eos_token_ids=eos,
                control_token_ids=control,
            )
            for index, (round_, view) in enumerate(zip(own, views, strict=True))
        ]
    )
    for verdict in verdicts:
        if isinstance(verdict, Exception):
            raise verdict

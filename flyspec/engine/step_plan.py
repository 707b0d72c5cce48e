"""Wire layout of a step: what rank 0 sends the other tensor-parallel ranks before a forward.

A plan is one int64 vector, so that a step costs one broadcast and no pickling:

    length, kind, copies, steps,  source, target, length  of each copy,
                                  slot, start, tokens, logits  of each step,
                                  the token ids of all steps

`length` counts the whole vector. Hidden layers are not sent, since rank 0's rows are whole.
`encode` and `decode` are pure; `flyspec.engine.parallel` sends the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from flyspec.engine.cache_table import Copy
from flyspec.engine.model import Step

HEADER = 4
FIRST_MESSAGE = 512
"""Numbers in the first message; the rest of a longer plan follows in a second one."""


class Kind(IntEnum):
    """What the other ranks must do."""

    STEP = 0
    IDLE = 1
    """Nothing: shows that rank 0 is alive and keeps idle connections from being dropped."""
    STOP = 2


class Plan(NamedTuple):
    """A decoded plan; copies and steps are empty unless `kind` is STEP."""

    kind: Kind
    copies: list[Copy]
    steps: list[Step]


def encode(copies: Sequence[Copy], steps: Sequence[Step], kind: Kind = Kind.STEP) -> Tensor:
    """Return the plan as an int64 vector on the CPU."""
    shapes = [(s.slot, s.start, len(s.token_ids), s.num_logits) for s in steps]
    numbers = [0, int(kind), len(copies), len(steps)]
    numbers.extend(chain.from_iterable(copies))
    numbers.extend(chain.from_iterable(shapes))
    numbers.extend(chain.from_iterable(step.token_ids for step in steps))
    numbers[0] = len(numbers)
    return torch.tensor(numbers, dtype=torch.int64)


def decode(plan: Tensor) -> Plan:
    """Decode a plan. Numbers beyond its own length are ignored.

    Raises `ValueError` for a vector that is not a plan: the ranks are out of step.
    """
    numbers: list[int] = plan.tolist()
    length, kind, num_copies, num_steps = numbers[:HEADER]
    first = HEADER + 3 * num_copies
    at = first + 4 * num_steps
    if not at <= length <= len(numbers):
        raise ValueError(f"invalid step plan: length {length}, received {len(numbers)} numbers")
    copies = [Copy(*numbers[i : i + 3]) for i in range(HEADER, first, 3)]
    steps = []
    for i in range(first, at, 4):
        slot, start, num_tokens, num_logits = numbers[i : i + 4]
        steps.append(Step(slot, start, numbers[at : at + num_tokens], num_logits))
        at += num_tokens
    if at != length:
        raise ValueError(f"invalid step plan: length {length}, contents describe {at} numbers")
    return Plan(Kind(kind), copies, steps)

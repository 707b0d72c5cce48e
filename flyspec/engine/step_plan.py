"""Wire layout of a step: what rank 0 tells the other tensor-parallel ranks before a forward.

A plan is one int64 vector, so that a step costs a broadcast of numbers and nothing is pickled:

    length, kind, copies, steps,  source, target, length  of each copy,
                                  slot, start, tokens, logits  of each step,
                                  the token ids of all steps

`length` counts the whole vector. Hidden layers are rank 0's alone: its rows are whole. `encode` and
`decode` are pure; `flyspec.engine.parallel` sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from flyspec.engine.model import Step
from flyspec.engine.slots import Copy

HEADER = 4
FIRST_MESSAGE = 512
"""Numbers that are always sent; a longer plan's rest follows in a second message."""


class Kind(IntEnum):
    """What the other ranks are to do."""

    STEP = 0
    IDLE = 1
    """Nothing: says that rank 0 is there, and keeps connections from being dropped for silence."""
    STOP = 2


class Plan(NamedTuple):
    """A decoded plan; copies and steps are empty unless `kind` is STEP."""

    kind: Kind
    copies: list[Copy]
    steps: list[Step]


def encode(copies: Sequence[Copy], steps: Sequence[Step], kind: Kind = Kind.STEP) -> Tensor:
    """The plan as an int64 vector on the CPU."""
    shapes = [(s.slot, s.start, len(s.token_ids), s.num_logits) for s in steps]
    numbers = [0, int(kind), len(copies), len(steps)]
    numbers.extend(chain.from_iterable(copies))
    numbers.extend(chain.from_iterable(shapes))
    numbers.extend(chain.from_iterable(step.token_ids for step in steps))
    numbers[0] = len(numbers)
    return torch.tensor(numbers, dtype=torch.int64)


def decode(plan: Tensor) -> Plan:
    """What was encoded. Numbers behind the plan's own length are ignored.

    Raises `ValueError` for a vector that is no plan: the ranks no longer understand each other.
    """
    numbers: list[int] = plan.tolist()
    length, kind, num_copies, num_steps = numbers[:HEADER]
    first = HEADER + 3 * num_copies
    at = first + 4 * num_steps
    if not at <= length <= len(numbers):
        raise ValueError(f"a step plan of {length} numbers, {len(numbers)} came")
    copies = [Copy(*numbers[i : i + 3]) for i in range(HEADER, first, 3)]
    steps = []
    for i in range(first, at, 4):
        slot, start, num_tokens, num_logits = numbers[i : i + 4]
        steps.append(Step(slot, start, numbers[at : at + num_tokens], num_logits))
        at += num_tokens
    if at != length:
        raise ValueError(f"a step plan of {length} numbers describes {at}")
    return Plan(Kind(kind), copies, steps)

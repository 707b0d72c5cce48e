"""Wire layout of a step: what rank 0 sends the other tensor-parallel ranks before a forward.

A plan is one int64 vector, so that a step costs one broadcast and no pickling:

    length, kind, copies, changes, steps,  source, target, length  of each copy,
                                           slot, index, block  of each change of the block table,
                                           slot, start, tokens, logits  of each step,
                                           the token ids of all steps

`length` counts the whole vector. Hidden layers are not sent, since rank 0's rows are whole, and
trees are not run.
`encode` and `decode` are pure; `flyspec.engine.parallel` sends the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from flyspec.engine.cache_table import BlockChange, Copy, Moves
from flyspec.engine.model import Step

HEADER = 5
FIRST_MESSAGE = 512
"""Numbers in the first message; the rest of a longer plan follows in a second one."""


class Kind(IntEnum):
    """Tasks of the other ranks."""

    STEP = 0
    IDLE = 1
    """Nothing: shows that rank 0 is alive and keeps idle connections from being dropped."""
    STOP = 2


class Plan(NamedTuple):
    """A decoded plan; moves and steps are empty unless `kind` is STEP."""

    kind: Kind
    moves: Moves
    steps: list[Step]


def encode(moves: Moves, steps: Sequence[Step], kind: Kind = Kind.STEP) -> Tensor:
    """Return the plan as an int64 vector on the CPU."""
    shapes = [(s.slot, s.start, len(s.token_ids), s.num_logits) for s in steps]
    numbers = [0, int(kind), len(moves.copies), len(moves.changes), len(steps)]
    numbers.extend(chain.from_iterable(c for c in moves.copies if isinstance(c, Copy)))
    numbers.extend(chain.from_iterable(moves.changes))
    numbers.extend(chain.from_iterable(shapes))
    numbers.extend(chain.from_iterable(step.token_ids for step in steps))
    numbers[0] = len(numbers)
    return torch.tensor(numbers, dtype=torch.int64)


def decode(plan: Tensor) -> Plan:
    """Decode a plan. Numbers beyond its own length are ignored.

    Raises `ValueError` for a vector that is not a plan: the ranks are out of step.
    """
    numbers: list[int] = plan.tolist()
    length, kind, num_copies, num_changes, num_steps = numbers[:HEADER]
    copied = HEADER + 3 * num_copies
    first = copied + 3 * num_changes
    at = first + 4 * num_steps
    if not at <= length <= len(numbers):
        raise ValueError(f"invalid step plan: length {length}, received {len(numbers)} numbers")
    moves = Moves(
        [Copy(*numbers[i : i + 3]) for i in range(HEADER, copied, 3)],
        [BlockChange(*numbers[i : i + 3]) for i in range(copied, first, 3)],
    )
    steps = []
    for i in range(first, at, 4):
        slot, start, num_tokens, num_logits = numbers[i : i + 4]
        steps.append(Step(slot, start, numbers[at : at + num_tokens], num_logits))
        at += num_tokens
    if at != length:
        raise ValueError(f"invalid step plan: length {length}, contents describe {at} numbers")
    return Plan(Kind(kind), moves, steps)
